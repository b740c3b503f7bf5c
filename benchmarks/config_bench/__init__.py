"""Planted differences between two trainings, and whether the first line of `config-check compare` names them."""
