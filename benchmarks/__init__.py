"""Measurements. Timings live here and never in tests."""
