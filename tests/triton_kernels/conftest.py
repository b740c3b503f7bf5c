"""The tests of this folder run in an environment of their own, which adds Triton to `.venv`, under Triton's interpreter.

`make test` runs both. The interpreter is chosen when Triton is imported: without TRITON_INTERPRET=1 they are left out.
"""

from __future__ import annotations

import importlib.util
import os

HERE = importlib.util.find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore_glob = [] if HERE else ["test_*.py"]
