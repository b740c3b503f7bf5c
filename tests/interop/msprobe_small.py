"""mindstudio-probe where it was imported once (tests/distributed/launch.py): `msprobe_small.py train FOLDER JSON`, as
train_small.py does it, or `msprobe_small.py COMMAND…`, a command of its own.
"""

from __future__ import annotations

import json
import sys

import msprobe.msprobe
import msprobe.pytorch
import pandas  # noqa: F401
import train_small

if __name__ == "__main__":
    if sys.argv[1] == "train":
        train_small.by_msprobe(sys.argv[2], json.loads(sys.argv[3]))
    else:
        msprobe.msprobe.main()
