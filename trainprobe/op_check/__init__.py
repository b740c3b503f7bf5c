"""Is one operator right on this device, or merely rounded: each recorded call against a float64 reference of its own inputs."""
