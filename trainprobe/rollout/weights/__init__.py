"""Did every weight arrive in the rollout engine: fingerprints under logical names, pushes, and the verdict."""
