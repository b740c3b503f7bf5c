"""`trainprobe preflight train.py`: a script that is not edited, run up to its first update."""
