"""What every request passes: connections, keys, limits, bodies, errors, logs."""
