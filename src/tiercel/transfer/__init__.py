"""Moving bytes between pools: plans, copiers, the controller. Owners of bytes are not known here."""
