"""Calls that change a running server."""
