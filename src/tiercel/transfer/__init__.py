"""Moving bytes between pools: plans, copiers, the layer gate, the controller. Never whose bytes they are."""
