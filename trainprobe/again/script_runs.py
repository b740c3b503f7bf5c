"""Runs a script, which is not edited, and has its first steps dumped: what all conditions share that run a whole script again.

A condition says how its run differs: by the words of the command (`floor --way threads`), the environment, the number of
processes or the arguments of the script.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from trainprobe.errors import OutputError, ProbeError, UsageError

Script = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The script and what it is given.", show_default=False),
]
PASS_ON = {"allow_interspersed_args": False}  # all words behind a command's own options are the script's
_FOR_RANKS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
TORCHRUN = "torchrun --standalone --nproc-per-node {ranks}"
LOG, PLAN = "output.txt", "asked.json"
_MOST = 15  # lines that are told of what a run printed


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of a run."""

    folder: Path
    """Of its dump, its plan, and what it printed."""
    code: int
    """Exit code of its launcher."""

    @property
    def failure(self) -> str:
        """How it ended, with the end of what it printed."""
        text = (self.folder / LOG).read_bytes()[-(1 << 16) :].decode("utf-8", "replace")
        lines = [f"\n  {line}" for line in text.splitlines() if line.strip()]
        return f"ended with exit code {self.code}; it printed last:{''.join(lines[-_MOST:])}"

    def to_its_end(self) -> Ran:
        """Return the run. Raises ProbeError where it ended otherwise than well."""
        if self.code:
            raise ProbeError(f"the script {self.failure}")
        return self


def of_a_script(command: Any) -> Any:
    """Let a command leave all words behind its own options to the script."""
    command.context_settings = PASS_ON
    return command


def script_of(words: Sequence[str] | None, example: str) -> list[str]:
    """Return the script and its arguments, without the `--` before them. Raises UsageError where there are none."""
    script = list(words or [])
    if script[:1] == ["--"]:
        script.pop(0)
    if not script:
        raise UsageError(f"nothing to run: give the script behind `--`, as in `trainprobe {example}`")
    if script[0].startswith("-") and script[0] != "-m":
        raise UsageError(f"{script[0]} is given in the place of the script: options come first, as in `trainprobe {example}`")
    return script


def run_script(
    script: Sequence[str],
    folder: Path,
    steps: Collection[int],
    *,
    ranks: int = 1,
    launcher: str = "",
    condition: Sequence[str] = ("run",),
    environment: Mapping[str, str] | None = None,
    **plan: Any,
) -> Ran:
    """Run a script, and wait for it. Statistics and fingerprints of modules, weights and gradients are dumped.

    folder: a new one, for the dump and what the script prints. launcher: starts the processes, with {ranks} for their number;
    by default this Python, and torchrun for several. condition: the verb of trainprobe that runs it, with its options.
    environment: variables in place of this process's. plan: further fields of it. Raises OutputError.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise OutputError(f"{folder} exists, and nothing is overwritten: choose another --output") from None
    whole = {"level": "L0", "summary": "both", "step": sorted(steps), "sinks": ["dump"]}
    whole |= {"monitor": {"parameters": True, "gradients": True}, **plan}
    (folder / PLAN).write_bytes(orjson.dumps(whole))
    words = [word.format(ranks=ranks) for word in shlex.split(launcher or (TORCHRUN if ranks > 1 else "python"))]
    known = {"python": [sys.executable], "torchrun": [sys.executable, "-m", "torch.distributed.run"]}
    words[:1] = known.get(words[0], words[:1])
    probe = [sys.executable, "-m", "trainprobe", *condition, "--output", str(folder), str(folder / PLAN), "--"]
    inherited = {name: text for name, text in os.environ.items() if name not in _FOR_RANKS}
    with (folder / LOG).open("wb") as log:
        done = subprocess.run(
            [*probe, *words, *script],
            env={"OMP_NUM_THREADS": "1", **inherited, **(environment or {})},
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    return Ran(folder, done.returncode)
