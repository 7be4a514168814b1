"""Moving bytes between pools: plans, copiers, the controller. Never whose bytes they are."""
