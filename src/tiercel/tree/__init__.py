"""Which prefix: page keys, the prefix tree over pages and tails in both tiers, and what may leave it."""
