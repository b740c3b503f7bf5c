"""Runs a script in one layout after the other, each under the same plan."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainprobe.errors import OutputError, UsageError
from trainprobe.integrations.auto_attach import AttachedRun, environment_for

_LAYOUT = re.compile(r"(?P<name>[\w.-]+)=(?P<ranks>\d+)(?:\s+(?P<arguments>.*))?", re.DOTALL)
_FOR_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "torchrun --standalone --nproc-per-node {ranks}"
LOG = "output.txt"


@dataclass(frozen=True, slots=True)
class ScriptLayout:
    """One way to run the script. name: of its folder. ranks: processes. arguments: of the script, in this layout alone."""

    name: str
    ranks: int
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a layout. folder: its dump. code: exit code of its launcher."""

    layout: ScriptLayout
    folder: Path
    code: int


def read_layouts(texts: Sequence[str]) -> list[ScriptLayout]:
    """Return the layouts that `NAME=RANKS ARGUMENTS` tell. Raises UsageError."""
    found: list[ScriptLayout] = []
    for text in texts:
        match = _LAYOUT.fullmatch(text.strip())
        if match is None or match["ranks"] == "0":
            raise UsageError(f"--layout {text!r} cannot be read: write NAME=RANKS ARGUMENTS, such as 'tp2=2 --tp 2'")
        try:
            arguments = tuple(shlex.split(match["arguments"] or ""))
        except ValueError as error:
            raise UsageError(f"--layout {text!r}: its arguments cannot be read: {error}") from None
        found.append(ScriptLayout(match["name"], int(match["ranks"]), arguments))
    names = [layout.name for layout in found]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"--layout {twice}: two layouts have this name")
    if len(found) < 2:
        raise UsageError("parity compares layouts: give --layout at least twice")
    return found


def plan_of(steps: Sequence[int]) -> dict[str, Any]:
    """Return the plan that every layout is run under: statistics and fingerprints of all modules, weights and gradients."""
    monitor = {"parameters": True, "gradients": True}
    return {"level": "L0", "summary": "both", "step": list(steps), "sinks": ["dump"], "monitor": monitor}


def run_layout(layout: ScriptLayout, script: Sequence[str], plan: Path, output: Path, launcher: str = TORCHRUN) -> Ran:
    """Run the script in one layout and wait for it; what it prints goes to a file beside its dump. Raises OutputError."""
    folder = output / layout.name
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise OutputError(f"{folder} exists, and nothing is overwritten: choose another --output") from None
    words = [word.format(ranks=layout.ranks) for word in shlex.split(launcher)]
    if words[0] == "torchrun":
        words[:1] = [sys.executable, "-m", "torch.distributed.run"]
    environment = {name: text for name, text in environment_for(AttachedRun(plan, folder)).items() if name not in _FOR_RANKS}
    with (folder / LOG).open("wb") as log:
        try:
            done = subprocess.run(
                [*words, *script, *layout.arguments],
                env={"OMP_NUM_THREADS": "1", **environment},
                stdout=log,
                stderr=subprocess.STDOUT,
                check=False,
            )
        except OSError as error:
            raise UsageError(f"{words[0]!r} cannot be run: {error.strerror or error}") from None
    return Ran(layout, folder, done.returncode)


def last_lines(ran: Ran, most: int = 15) -> list[str]:
    """Return the end of what a layout printed."""
    text = (ran.folder / LOG).read_bytes()[-(1 << 16) :].decode("utf-8", "replace")
    return [line for line in text.splitlines() if line.strip()][-most:]
