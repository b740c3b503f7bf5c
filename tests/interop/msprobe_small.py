"""mindstudio-probe where it was imported once (tests/distributed/launch.py): `msprobe_small.py train FOLDER JSON`, as
train_small.py does it, or `msprobe_small.py COMMAND…`, a command of its own.
"""

from __future__ import annotations

import json
import sys

import msprobe.msprobe
import pandas  # noqa: F401
from children import import_once

import_once("msprobe.pytorch")
import train_small  # noqa: E402

if __name__ == "__main__":
    if sys.argv[1] == "train":
        train_small.by_msprobe(sys.argv[2], json.loads(sys.argv[3]))
    else:
        msprobe.msprobe.main()
