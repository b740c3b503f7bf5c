"""`trainprobe nan-trace DIR`: the call, rank and step that made the first NaN or infinity of a run, and where it went."""
