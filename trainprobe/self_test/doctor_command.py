"""`trainprobe doctor`: what this environment can do, what it lacks, and the command that mends it."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shutil
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from trainprobe import __version__
from trainprobe.engine import compiled
from trainprobe.engine.plan.command import sentences
from trainprobe.engine.plan.loading import load_plan
from trainprobe.self_test.frameworks import version_of

_LEAST_FREE = 1 << 30  # bytes; a dump of one step of a small model takes some hundred megabytes
_FRAMEWORKS = (
    "torch",
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron-core",
    "mindspore",
    "mindformers",
    "triton",
)
# extra → what it is for; each is an extra of the package (a test compares them)
EXTRAS = {
    "tensorboard": "the sink `tensorboard`, and `export`",
    "xlsx": "`config-check` tables as .xlsx",
    "wandb": "the sink `wandb`, and reading its offline files",
    "mlflow": "the sink `mlflow`",
    "trackio": "the sink `trackio`",
    "otlp": "the sink `otlp`, for OpenTelemetry",
    "prometheus": "the sink `prometheus`",
    "mcp": "`mcp`: agents read runs",
    "top": "`top --keys`: a finding chosen with the arrow keys",
    "serve": "`serve`: the page of a run that goes on",
    "fleet": "`--fleet`: many ranks through DuckDB",
    "remote": "runs behind an address (s3://, gs://, …)",
    "npu": "`kernel-dump` of protobuf files",
    "zarr": "checkpoints in zarr folders",
    "ray": "the place of Ray workers",
    "certs": "`op-check certs`",
}


class Fact(NamedTuple):
    """One line. state: "ok", "absent" for what nobody needs, or "fault" for what keeps the tool from working."""

    name: str
    state: str
    text: str


def doctor(
    folder: Annotated[Path, typer.Argument(help="where a run would be written")] = Path("probe_out"),
) -> int:
    """Say what this environment can do and what it lacks. Exit code: 0 a training can be watched here, 1 it cannot."""
    facts = [*_own(), *_frameworks(), *_devices(), *_extras(), *_disk(folder), *_environment()]
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for name, state, text in facts:
        style = {"ok": "green", "absent": "dim", "fault": "bold red"}[state]
        table.add_row(Text(name), Text({"ok": "ok", "absent": "–", "fault": "FAULT"}[state], style=style), Text(text))
    console = Console(highlight=False)
    console.print(table)
    console.print("without a plan, `trainprobe run -- train.py` and `watch(model, optimizer)` would:", markup=False)
    for sentence in sentences(load_plan(output=folder)):
        console.print(f"  {sentence}", markup=False)
    faults = [fact for fact in facts if fact.state == "fault"]
    console.print(
        Text(f"{len(faults)} faults: {'; '.join(fact.name for fact in faults)}" if faults else "a training can be watched here")
    )
    return int(bool(faults))


def _own() -> Iterator[Fact]:
    yield Fact("trainprobe", "ok", f"{__version__}, Python {platform.python_version()}, {platform.platform(terse=True)}")
    if compiled.native is None:
        yield Fact("compiled part", "fault", str(compiled.MissingCompiledPart()))
    else:
        yield Fact("compiled part", "ok", "loaded")


def _frameworks() -> Iterator[Fact]:
    found = {name: version for name in _FRAMEWORKS if (version := version_of(name))}
    if not {"torch", "mindspore"} & found.keys():
        text = "neither PyTorch nor MindSpore is installed: pip install 'trainprobe[torch]'; what was recorded can be read"
        yield Fact("frameworks", "fault", text)
    least = _least_versions()
    for name, version in found.items():
        wanted = least.get(name)
        if wanted is not None and _numbers(version) < _numbers(wanted):
            yield Fact(name, "fault", f"{version} is older than {wanted}, the oldest release that works: pip install -U {name}")
        else:
            yield Fact(name, "ok", version)


def _devices() -> Iterator[Fact]:
    try:
        import torch
    except ImportError:
        return
    kinds = [kind for kind in ("cuda", "npu", "xpu", "mps") if getattr(torch, kind, None) is not None]
    names = [f"{kind} × {module.device_count()}" for kind in kinds if (module := getattr(torch, kind)).is_available()]
    yield Fact("devices", "ok", ", ".join(["cpu", *names]))
    if any(name.startswith("cuda") for name in names) and importlib.util.find_spec("triton") is None:
        yield Fact(
            "kernels", "absent", "Triton is not installed: torch's own operations reduce, more slowly: pip install triton"
        )


def _extras() -> Iterator[Fact]:
    for extra, purpose in EXTRAS.items():
        missing = [name for name in _packages_of(extra) if not version_of(name)]
        if missing:
            yield Fact(f"[{extra}]", "absent", f"{purpose}: pip install 'trainprobe[{extra}]'")
        else:
            yield Fact(f"[{extra}]", "ok", purpose)


def _disk(folder: Path) -> Iterator[Fact]:
    there = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir())
    if not os.access(there, os.W_OK):
        yield Fact("output", "fault", f"{there} cannot be written to: name another folder")
        return
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free in {there}"
    yield Fact("output", "ok" if free >= _LEAST_FREE else "fault", text if free >= _LEAST_FREE else f"only {text}")


def _environment() -> Iterator[Fact]:
    for name in sorted(name for name in os.environ if name.startswith("TRAINPROBE_")):
        yield Fact(name, "ok", os.environ[name])


def _requirements() -> Iterator[tuple[str, str, str]]:
    """Yield (extra, package, least version or "") of the optional requirements of the installed package."""
    for line in metadata.requires("trainprobe") or ():
        found = re.match(r"([A-Za-z0-9._-]+)[^;]*?(?:>=([0-9.]+))?[^;]*;.*extra == ['\"]([\w-]+)['\"]", line)
        if found:
            yield found[3], found[1], found[2] or ""


def _packages_of(extra: str) -> list[str]:
    return [package for name, package, _ in _requirements() if name == extra]


def _least_versions() -> dict[str, str]:
    return {package: least for _, package, least in _requirements() if least}


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3]]
