"""The properties, one file each: `examine(subject)` tests one and returns what it found. By value, the first line first."""

ORDER = ("split", "padding", "causality", "rows", "gradient", "start", "determinism", "precision", "update", "input")
