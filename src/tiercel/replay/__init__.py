"""Recorded traffic on the shipping cache, without a model and without bytes."""
