"""The tests of this folder run in environments that add other people's packages to `.venv`.

`make test-foreign` runs the quick ones (`make test` includes them), `make test-foreign-all` every program.
"""

from __future__ import annotations

import os

collect_ignore_glob = [] if os.environ.get("TRAINPROBE_FOREIGN") in {"quick", "all"} else ["test_*.py"]
