"""Where two runs part: two dumps of the same steps, call by call, each difference held against what rounding explains."""
