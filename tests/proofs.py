"""What passing tests prove: the marker `proves`, collected while tests run, for the support table of docs/frameworks.md.

    @pytest.mark.proves("Lightning", "DDP", ranks=2)
    @pytest.mark.proves("Lightning", {"ddp": "DDP", "fsdp": "FSDP1"}, ranks=2)   # by the value of a parameter of the test
    @pytest.mark.proves("DeepSpeed", "ZeRO 3", ranks=(2, 4))                     # by the test's parameter `ranks`

Something is proved when tests with that marker have passed and none has failed. Each interpreter leaves a file in `.proofs/`,
with the versions of what it ran; `python -m tests.support_table` makes the table of them.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(os.environ.get("TRAINPROBE_PROOFS") or Path(__file__).parents[1] / ".proofs")
PACKAGES = {
    "PyTorch": ("torch",),
    "Lightning": ("lightning",),
    "Hugging Face Trainer": ("transformers",),
    "Accelerate": ("accelerate",),
    "DeepSpeed": ("deepspeed",),
    "Megatron-core": ("megatron-core",),
    "MindSpeed": (),
    "MindSpore": ("mindspore",),
    "MindFormers": ("mindformers",),
}
Proof = tuple[str, str, int]  # framework, what of it, number of ranks
_outcome: dict[Any, bool] = {}  # False once a test of it has failed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write on each test what it proves, so that its report carries that from a worker to whoever collects."""
    for item in items:
        item.user_properties += [("proves", [*proof]) for proof in proofs_of(item)]


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Take the outcome of a test."""
    if report.failed or (report.passed and report.when == "call"):
        for proof in [tuple(value) for key, value in report.user_properties if key == "proves"]:
            _outcome[proof] = _outcome.get(proof, True) and not report.failed


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave what was proved; workers leave it to the process that started them."""
    if _outcome and not hasattr(session.config, "workerinput"):
        FOLDER.mkdir(parents=True, exist_ok=True)
        path = FOLDER / ("mindspore.json" if importlib.util.find_spec("mindspore") else "torch.json")
        versions = {name: versions_of(name) for name in sorted({framework for framework, _, _ in _outcome})}
        before = json.loads(path.read_text()) if path.exists() else {"versions": {}, "outcome": []}
        kept = {tuple(p): good for *p, good in before["outcome"] if before["versions"].get(p[0]) == versions_of(p[0])}
        lines = [[*proof, good] for proof, good in sorted({**kept, **_outcome}.items())]
        path.write_text(json.dumps({"versions": {**before["versions"], **versions}, "outcome": lines}, indent=1))


def proofs_of(item: pytest.Item) -> Iterator[Proof]:
    """Yield what a test proves if it passes."""
    parameters: dict[str, Any] = getattr(getattr(item, "callspec", None), "params", {})
    for marker in item.iter_markers("proves"):
        framework, *whats = marker.args
        given = marker.kwargs.get("ranks", 1)
        ranks = parameters["ranks"] if isinstance(given, tuple) else given
        for what in whats:
            if isinstance(what, dict):
                yield from ((framework, text, ranks) for key, text in what.items() if key in parameters.values())
            else:
                yield framework, what, ranks


def versions_of(framework: str) -> str:
    """Return the versions of a framework's packages here, as the table shows them."""
    try:
        return " ".join(version(package).partition("+")[0] for package in PACKAGES[framework])
    except PackageNotFoundError:
        return ""
