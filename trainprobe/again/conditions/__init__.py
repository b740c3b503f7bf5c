"""The conditions, each one file: how the second run differs, how its rounding is measured, and the command that asks.

`twice`: nothing at all. `compiled`: compiled instead of eager. `golden`: today's software instead of last month's. `resume`:
after a resume instead of straight on. `replay`: another process, and float64. `layouts`: other ranks. `rounding`: another
rounding.
"""
