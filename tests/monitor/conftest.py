"""Helpers of the monitor's tests can be imported by their file names."""

import sys
from pathlib import Path

for folder in (".", "rules", "report"):
    sys.path.insert(0, str(Path(__file__).parent / folder))
