"""Why two engines differ on the log-probabilities of the same tokens: reading them, and the causes with their evidence."""
