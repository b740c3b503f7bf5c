"""A plan made into a running probe: its taps, when each runs, its programs, and what they need of a framework."""
