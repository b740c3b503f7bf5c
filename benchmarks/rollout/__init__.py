"""Planted causes of reinforcement learning: log-probabilities that differ, and weights that did not arrive."""
