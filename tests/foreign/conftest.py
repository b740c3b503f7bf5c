"""The tests of this folder run in environments that add other people's packages to `.venv`.

`make test-foreign` runs the quick ones (`make test` includes them), `make test-foreign-all` every program but one that needs
other releases than the rest: `make test-foreign-axolotl`.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRAINPROBE_FOREIGN") else ["test_*.py"]
