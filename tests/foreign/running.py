"""Runs a program bare and under `trainprobe run default`, and says what differed and what was found."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path

from tests.foreign import data
from tests.foreign.catalog import Program
from tests.foreign.sources import sources, vision
from trainprobe.monitor.run_folder import find_logs, frames_of_log

HERE = Path(__file__).parent
TREE = HERE.parents[1]  # the trainprobe that is tested
RESULTS = Path(os.environ.get("TRAINPROBE_PROOFS") or TREE / ".proofs") / "foreign"
LIMIT = 900  # seconds a run
UPDATES_OF_WRAPPERS = ("OSS",)


@dataclass
class Result:
    """What was seen of one program, with trainprobe and without."""

    name: str
    versions: str
    codes: tuple[int, int]  # exit codes: bare, watched
    difference: str  # first line of the observer that differs, or nothing
    losses: int  # values on which backward or autograd.grad started
    updates: int  # steps of torch's optimizers
    steps: int  # complete steps that trainprobe recorded
    models: int
    findings: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])  # rule, severity, message
    warnings: list[str] = field(default_factory=list[str])  # Python's warnings that the program gives only when watched
    ending: str = ""  # trainprobe's last line
    seconds: tuple[float, float] = (0.0, 0.0)


def run(program: Program, folder: Path) -> Result:
    """Run a program both ways below `folder`, and keep the result for the table."""
    where = _places()
    bare, watched = (_start(program, folder / kind, where, kind == "watched") for kind in ("bare", "watched"))
    lines = [_observed(folder / kind, program.threads) for kind in ("bare", "watched")]
    output = (folder / "watched" / "output.txt").read_text(errors="replace")
    logs = find_logs(folder / "watched")
    said = [
        line
        for line in output.replace("\r", "\n").splitlines()
        if re.search(r"trainprobe: (?!watching )|\d steps? watched", line)  # some programs set a format for all log lines
    ]
    result = Result(
        program.name,
        _package(program),
        (bare[0], watched[0]),
        _difference(*lines),
        sum(line.startswith(("backward", "grad")) for line in lines[0]),
        sum(line.startswith("step") and not line.endswith(UPDATES_OF_WRAPPERS) for line in lines[0]),
        sum(frame.complete for log in logs for frame in frames_of_log(log)),
        len(logs),
        [(f["rule"], f["severity"], f["message"]) for f in _logged(folder, "findings.jsonl")],
        sorted(_warnings(output) - _warnings((folder / "bare" / "output.txt").read_text(errors="replace"))),
        said[-1] if said else "",
        (bare[1], watched[1]),
    )
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{program.name}.json").write_text(json.dumps(asdict(result), indent=1))
    return result


def _places() -> dict[str, str]:
    """Return the folders that programs and their arguments name; the data are made once for an environment."""
    made = Path(sys.prefix) / "data"
    data.make(made)
    core = importlib.util.find_spec("accelerate")
    assert core is not None and core.origin is not None
    site, core_site = sysconfig.get_path("purelib"), str(Path(core.origin).parents[1])
    return {"data": str(made), "site": site, "here": str(HERE / "programs"), "core": core_site}


def _start(program: Program, folder: Path, where: dict[str, str], watch: bool) -> tuple[int, float]:
    """Run the program in a folder of its own; return its exit code and how long it took, in seconds."""
    for name in ("work", "observed", "home"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "data").symlink_to(where["data"])
    (folder / "work" / "data").symlink_to(Path(where["data"]) / "lmdata")
    words = [_filled(word, where) for word in program.start.split()]
    bare = words if program.launcher else [sys.executable, *words]
    command = [sys.executable, "-m", "trainprobe", "run", "default", "--", *words] if watch else bare
    began = time.monotonic()
    with (folder / "output.txt").open("w") as output:
        done = subprocess.run(
            command,
            cwd=folder / "work",
            env=_environment(program, folder, where),
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=LIMIT,
            check=False,
        )
    return done.returncode, round(time.monotonic() - began, 1)


def _filled(word: str, where: dict[str, str]) -> str:
    if "{sources}" in word:
        where = {**where, "sources": str(sources())}
    word = word.format(**where) if "{" in word else word
    path = Path(word)
    if where["site"] in word and not path.exists():  # it is in the environment that this one adds to
        return word.replace(where["site"], where["core"])
    return word


def _environment(program: Program, folder: Path, where: dict[str, str]) -> dict[str, str]:
    paths = [str(HERE / "observer"), *([str(vision())] if program.vision else []), _filled(program.path, where), str(TREE)]
    return {
        **os.environ,
        **{name: _filled(value, where) for name, value in program.environment.items()},
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "PATH": os.pathsep.join(
            [str(Path(sys.executable).parent), os.environ["PATH"], str(Path(where["core"]).parents[2] / "bin")]
        ),
        "DATA": where["data"],
        "OUT": str(folder / "out"),
        "HOME": str(folder / "home"),
        "FOREIGN_OBSERVED": str(folder / "observed"),
        "FOREIGN_SEED": "0",
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
    }


def _warnings(output: str) -> set[str]:
    return {line.partition("Warning: ")[2] for line in output.splitlines() if "Warning: " in line}


def _observed(folder: Path, any_order: bool) -> list[str]:
    """Return what the observer wrote, one process after the other; which process is which is told by what they computed."""
    processes = sorted(path.read_text().splitlines() for path in (folder / "observed").iterdir())
    lines = [line for process in processes for line in process]
    return sorted(lines) if any_order else lines


def _difference(bare: list[str], watched: list[str]) -> str:
    for i, (one, other) in enumerate(zip(bare, watched, strict=False)):
        if one != other:
            return f"line {i}: {one!r} bare, {other!r} watched"
    return "" if len(bare) == len(watched) else f"{len(bare)} lines bare, {len(watched)} watched"


def _logged(folder: Path, name: str) -> Iterator[dict[str, object]]:
    for path in sorted((folder / "watched" / "work").rglob(name)):
        yield from map(json.loads, path.read_text().splitlines())


def _package(program: Program) -> str:
    name, _, pin = program.package.partition("==")
    if f"/{name}-{pin}/" in program.start + program.path + "/":
        return program.package  # its source distribution, which `sources` fetched
    return f"{name}=={version(name).split('+')[0]}"
