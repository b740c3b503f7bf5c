"""The same step once more under another condition: is it the same, rounding, or not, and where first?

A condition is one file that says how the second run differs. What a run showed (`recording`), the first place where two runs
differ (`first_place`) and what is said of it are shared.
"""
