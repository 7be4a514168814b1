"""Models that run on the cache: their dimensions, their weights, their layers."""
