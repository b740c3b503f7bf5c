"""One training script that is started in several ways: what started it is no difference."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config_check.launch import RUNS, compared, run
from tests.distributed.launch import free_port
from tests.matrices import covered
from trainprobe.config_check.pack_reader import read_pack

SCRIPT = RUNS / "plain.py"
SET = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}  # by torchrun, where nobody has: a difference, and not of how the script runs
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def direct(tmp_path_factory) -> Path:
    """Return the pack of `python plain.py`."""
    folder = tmp_path_factory.mktemp("direct")
    run(SCRIPT, folder, "base", **SET)
    return folder / "base.zip"


def torchrun(*how: str) -> tuple[str, ...]:
    return ("-m", "torch.distributed.run", "--nproc-per-node=1", f"--master-port={free_port()}", *how)


LAUNCHERS = {
    "python -m": lambda: ("-m", "plain"),
    "torchrun": lambda: torchrun(str(SCRIPT)),
    "torchrun -m": lambda: torchrun("-m", "plain"),
    "torchrun --run-path": lambda: torchrun("--run-path", str(SCRIPT)),
    "trainprobe run": lambda: ("-m", "trainprobe", "run", "default", "--", str(SCRIPT)),
    "trainprobe run -m": lambda: ("-m", "trainprobe", "run", "default", "--", "-m", "plain"),
}
WITHIN_RUNPY = {"python -m", "torchrun -m", "torchrun --run-path", "trainprobe run -m"}


def has_runpy(pack: Path) -> bool:
    """Tell whether a pack holds a random call of the script that was made beneath `runpy`."""
    stacks = read_pack(pack).ranks[0].single["randomness"]["stacks"]
    return any(
        "runpy" in frame["file"] and "plain.py" in {f["file"].rpartition("/")[2] for f in stack}
        for stack in stacks
        for frame in stack
    )


def how_it_starts(launcher: str) -> tuple[str, str]:
    """Return what starts the script, and as what."""
    starter, _, what = launcher.partition(" -")
    return starter, what


@pytest.mark.parametrize("launcher", covered(LAUNCHERS, how_it_starts))
def test_a_script_differs_in_nothing_from_itself_however_it_is_started(direct, tmp_path, launcher):
    run(*LAUNCHERS[launcher](), tmp_path, "base", **SET)
    assert has_runpy(tmp_path / "base.zip") == (launcher in WITHIN_RUNPY)  # else the comparison proves nothing
    (tmp_path / "direct.zip").write_bytes(direct.read_bytes())
    comparison = compared(tmp_path, "base", base="direct")
    assert [f.text for check in comparison.checks for f in check.findings if f.level != "note"] == []
    assert comparison.sentence == "no difference found: everything that was captured is the same"


def test_another_seed_is_told_though_the_launchers_differ_too(direct, tmp_path):
    run("-m", "plain", tmp_path, "seed", **SET)
    (tmp_path / "base.zip").write_bytes(direct.read_bytes())
    assert compared(tmp_path, "seed").sentence == "seed of torch differs: 7 and 8"
