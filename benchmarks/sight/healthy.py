"""Healthy loops."""
HEALTHY = {}
