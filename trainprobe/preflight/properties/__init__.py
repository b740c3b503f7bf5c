"""The properties, one file each: `examine(subject)` tests one and returns what it found. By value, the first line first."""

ORDER = ("split", "padding", "causality", "rows", "gradient", "start", "determinism", "precision", "update", "input")
EXTRA = ("overfit",)  # takes more passes than all others together, and is tested where it is asked for alone
