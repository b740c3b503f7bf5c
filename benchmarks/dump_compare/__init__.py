"""How often dump-compare calls a healthy pair of runs a bug, and how often it names a planted difference first."""
