"""The state of a running server: health, statistics, the page."""
