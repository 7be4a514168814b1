"""What is going on: health, statistics, the page."""
