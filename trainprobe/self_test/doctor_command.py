"""`trainprobe doctor`: what works on this machine, what is missing for what, and what would be watched without a plan."""

from __future__ import annotations

import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Annotated

import typer

from trainprobe import __version__, compiled
from trainprobe.engine.plan.command import sentences
from trainprobe.engine.plan.loading import load_plan

FRAMEWORKS = ("torch", "lightning", "transformers", "accelerate", "deepspeed", "megatron-core", "mindspore", "mindformers")
ENOUGH = 1 << 30  # free bytes under which a line says so


def doctor(
    folder: Annotated[Path, typer.Argument(help="Folder that a run would be written to.")] = Path("probe_out"),
) -> int:
    """Say what works here and what is missing. Exit code 1 where a training could not be recorded.

    Example: trainprobe doctor runs/today
    """
    found = list(_lines(folder))
    for good, line in found:
        typer.echo(f"{'ok     ' if good else 'MISSING' if good is False else '       '} {line}")
    return int(any(good is False for good, _ in found))


def _lines(folder: Path) -> Iterator[tuple[bool | None, str]]:
    """Yield lines, each with whether it is good; None for one that decides nothing."""
    yield True, f"trainprobe {__version__}, Python {platform.python_version()}, {platform.system()} {platform.machine()}"
    lacks = compiled.native is None
    yield not lacks, str(compiled.MissingCompiledPart()) if lacks else "the compiled part, which records a training"
    there = [f"{name} {number}" for name in FRAMEWORKS if (number := _version(name))]
    records = any(line.startswith(("torch ", "mindspore ")) for line in there)
    what = ", ".join(there) or "no framework"
    yield records, what if records else f"{what}: pip install 'trainprobe[torch]', or mindspore"
    missing = [extra for extra, packages in _extras().items() if not all(map(_version, packages))]
    if missing:
        yield None, f"extras that are not installed: {', '.join(missing)} (pip install 'trainprobe[NAME]')"
    yield _disk(folder)
    yield None, "without a plan, `trainprobe run -- train.py` and `watch(model, optimizer)` would:"
    yield from ((None, f"  {sentence}") for sentence in sentences(load_plan(output=folder)))


def _version(package: str) -> str:
    """Return the version of a package that is installed, empty for one that is not. Nothing is imported."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _extras() -> dict[str, list[str]]:
    """Return extra → packages that it installs."""
    try:
        told = requires("trainprobe") or []
    except PackageNotFoundError:
        return {}
    found: dict[str, list[str]] = {}
    for line in told:
        if match := re.match(r"([\w.-]+).*;.*\bextra == [\"']([\w-]+)", line):
            found.setdefault(match[2], []).append(match[1])
    return found


def _disk(folder: Path) -> tuple[bool, str]:
    """Return whether a folder, or the one that it would be made in, can be written and has room."""
    there = next(one for one in (folder.absolute(), *folder.absolute().parents) if one.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        return False, f"{there} cannot be written: give the plan another `output`"
    free = shutil.disk_usage(there).free
    return free >= ENOUGH, f"{free / 1e9:.1f} GB free in {there}" + (": little for a run" if free < ENOUGH else "")
