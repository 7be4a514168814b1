"""The prefix tree over pages and tails in both tiers: page keys, and what may leave it."""
