"""What sinks that send to a service of other people share: the client, which process sends, and which series."""

from __future__ import annotations

import importlib
import os
import random
import shlex
import sys
import threading
from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.storage.safe_files import read_bounded, write_whole
from trainprobe.engine.storage.tagged_numbers import numbers_of
from trainprobe.errors import FormatError, MissingExtra

_MOST_KEPT = 1 << 16  # bytes of what is kept of a service's run
MOST = 500  # series that a service is sent
THREAD = "trainprobe-"  # how names of the threads of sinks begin
_FIRST = ("scalars", "gradients", "activations", "parameters", "optimizer")


def client_of(sink: str, *modules: str) -> list[Any]:
    """Return modules of the client that a sink needs, the extra of its name. Raises MissingExtra.

    The client's retries draw random numbers on threads of its own; they get a generator of their own, as those of the global
    one are the training's. So do those of urllib3 on the threads of sinks.
    """
    try:
        found = [importlib.import_module(name) for name in modules]
    except ImportError as error:
        raise MissingExtra(error.name or modules[0], sink, f"the sink {sink!r}") from None
    own = {modules[0].partition(".")[0]: random.Random(), "urllib3": _OfSinks()}
    for name, module in list(sys.modules.items()):
        package = name.partition(".")[0]
        if package in own and vars(module).get("random") is random:
            module.random = own[package]  # type: ignore[attr-defined]
    return found


class _OfSinks:
    """Draws random numbers of its own on the threads of sinks (service_thread), and elsewhere those of the module `random`."""

    def __init__(self) -> None:
        self._own = random.Random()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._own if threading.current_thread().name.startswith(THREAD) else random, name)


def sends(place: Place) -> bool:
    """Tell whether this process is the one of its machine that sends."""
    return int(os.environ.get("LOCAL_RANK") or place.rank) == 0


def remember_run(folder: Path, sink: str, **where: str | None) -> None:
    """Keep in a run's folder which run of a service it was sent to. where: what the client needs to find that run again."""
    write_whole(_kept(folder, sink), orjson.dumps({key: value for key, value in where.items() if value}))


def remembered_run(folder: Path, sink: str) -> dict[str, str]:
    """Return what `remember_run` kept; nothing where the run was not sent. Raises FormatError for a damaged file."""
    path = _kept(folder, sink)
    if not path.exists():
        return {}
    try:
        found = orjson.loads(read_bounded(path, _MOST_KEPT))
    except orjson.JSONDecodeError as error:
        raise FormatError(f"{path} is damaged ({error}): delete it, and the page goes to a run of its own") from None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _kept(folder: Path, sink: str) -> Path:
    return folder / f"sent_to_{sink}.json"


def alert_text(finding: Finding, folder: Path) -> str:
    """Return what an alert says: the finding, what to do next, and the command that looks for its cause in the run's folder."""
    command = f"trainprobe why {shlex.quote(str(folder.absolute()))}"
    return "\n".join(filter(None, [finding.message, finding.next, command]))


class SendsNothing:
    """The sink of a process that leaves the service to another one."""

    def close(self) -> None:
        """Return at once: nothing is open."""


class FewNumbers:
    """The numbers of steps for a service that takes few series: scalars first, then norms, in the order of the model."""

    def __init__(self, sink: str, most: int = MOST) -> None:
        self._sink, self._most = sink, most
        self._chosen: set[str] = set()
        self._left_out: set[str] = set()
        self._told = False

    def of(self, step_data: StepData) -> dict[str, float]:
        """Return tag → number. A series that was chosen once stays chosen."""
        numbers = dict(numbers_of(step_data))
        for name in sorted(numbers.keys() - self._chosen - self._left_out, key=_rank):
            (self._chosen if len(self._chosen) < self._most else self._left_out).add(name)
        return {name: number for name, number in numbers.items() if name in self._chosen}

    def warnings_made(self) -> list[Finding]:
        """Return, once, that series are left out."""
        if self._told or not self._left_out:
            return []
        self._told = True
        whole = len(self._chosen) + len(self._left_out)
        text = f"the sink {self._sink!r} sends {self._most} of {whole} series: scalars first, then norms"
        return [Finding("probe", "info", text, next="the run log holds all: `sinks: [parquet]` in the plan")]


def _rank(name: str) -> tuple[bool, bool, int]:
    group = name.partition("/")[0]
    return group != "scalars", not name.endswith("/norm"), _FIRST.index(group) if group in _FIRST else len(_FIRST)
