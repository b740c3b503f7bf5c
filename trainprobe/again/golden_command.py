"""`trainprobe golden`: record what a small run computes, and check it after an upgrade."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import tempfile
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from trainprobe.again.golden import GoldenRow, judge, read_golden, rows_of_dump, with_floors, within_reach, write_golden
from trainprobe.comparison.files import write_csv, write_json, writing
from trainprobe.comparison.terminal import show_verdict
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.headline import causes_and_consequences
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.plan import PACK
from trainprobe.engine import at_start as python_start
from trainprobe.engine.core.log_lines import say as log
from trainprobe.errors import ProbeError, UsageError
from trainprobe.integrations.perturbed_start import SEED
from trainprobe.parity.layouts import TORCHRUN, ScriptLayout, last_lines, run_layout

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True)
_PASS_ON = {"allow_interspersed_args": False}
# how the runs that measure rounding differ: which elements of the weights move up, or how many threads there are
_PERTURBED = python_start.environment_for("trainprobe.integrations.perturbed_start")
FLOORS: tuple[Mapping[str, str], ...] = (
    {**_PERTURBED, SEED: "0"},
    {**_PERTURBED, SEED: "1"},
    {"OMP_NUM_THREADS": "2", "MKL_NUM_THREADS": "2"},
)

Words = Annotated[
    list[str] | None,
    typer.Argument(metavar="-- SCRIPT [ARGUMENTS]", help="The script and its arguments: a small run.", show_default=False),
]
Golden = Annotated[Path, typer.Argument(metavar="GOLDEN", help="The record; what is configured goes to GOLDEN.zip beside it.")]
Ranks = Annotated[int, typer.Option(help="How many processes run the script; more than one are started by torchrun.", min=1)]


@app.command(context_settings=_PASS_ON)  # pyright: ignore[reportUntypedFunctionDecorator]
def record(
    golden: Golden,
    words: Words = None,
    steps: Annotated[int, typer.Option(help="How many first steps are recorded.", min=1)] = 3,
    ranks: Ranks = 1,
) -> int:
    """Write the record: the run itself, and three runs with another rounding, which measure what rounding does to it."""
    script = _script(words)
    with tempfile.TemporaryDirectory() as folder:
        rows, pack = run_script(script, Path(folder) / "run", steps, ranks, {})
        others = [run_script(script, Path(folder) / f"floor{i}", steps, ranks, more)[0] for i, more in enumerate(FLOORS)]
        kept, note = within_reach(with_floors(rows, others))
        write_golden(golden, kept, script, note)
        if pack is not None:
            with writing(pack_of(golden)):
                shutil.copyfile(pack, pack_of(golden))
    size = golden.stat().st_size / max(len({row.step for row in kept}), 1)
    about = f"{len(kept)} values of {steps} step{'s' * (steps > 1)}, {size / 1000:.0f} kB a step"
    log(f"{golden}: {about}{f'; {note}' if note else ''}")
    return 0


@app.command(context_settings=_PASS_ON)  # pyright: ignore[reportUntypedFunctionDecorator]
def check(
    golden: Golden,
    words: Words = None,
    ranks: Ranks = 1,
    json: Annotated[Path | None, typer.Option(help="Write the answer as JSON.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write each value, then and now, as CSV.")] = None,
) -> int:
    """Run the script as it is now, and say whether it computes what the record says.

    Exit code: 0 identical, 1 within rounding as it was measured, 2 not the same, 3 not comparable or incomplete.
    """
    rows = read_golden(golden)
    with tempfile.TemporaryDirectory() as folder:
        now, pack = run_script(_script(words), Path(folder) / "run", 1 + max((row.step for row in rows), default=0), ranks, {})
        verdict = judge(rows, now, changed_since(pack_of(golden), pack))
    show_verdict(verdict, Console(highlight=False))
    if json is not None:
        write_json(verdict.to_json(), json)
    if csv is not None:
        write_csv(("step", "rank", "call", "slot", "norm then", "norm now", "distance", "floor"), _table(rows, now), csv)
    return verdict.code


def _table(rows: Sequence[GoldenRow], now: Sequence[GoldenRow]) -> Iterator[Sequence[Any]]:
    after = {row.place: row for row in now}
    for row in rows:
        other = after.get(row.place)
        there = (other.numbers[3], row.distance(other)) if other is not None else ("", "")
        yield row.step, row.rank, str(row.key), row.slot, row.numbers[3], *there, row.floor


def _script(words: Sequence[str] | None) -> list[str]:
    script = list(words or [])
    if script and script[0] == "--":
        script.pop(0)
    if not script:
        raise UsageError("nothing to run: give the script behind `--`, as in `trainprobe golden check golden.txt -- train.py`")
    return script


def run_script(
    script: Sequence[str], folder: Path, steps: int, ranks: int, more: Mapping[str, str]
) -> tuple[list[GoldenRow], Path | None]:
    """Run the script under a plan; return what its first steps showed, and its configuration."""
    monitor = {"parameters": True, "gradients": True}
    plan = {"level": "L0", "summary": "both", "step": list(range(steps)), "sinks": ["dump"], "stacks": False}
    path = folder.with_suffix(".json")
    path.write_bytes(orjson.dumps({**plan, "monitor": monitor, "config_check": True}))
    launcher = TORCHRUN if ranks > 1 else shlex.quote(sys.executable)
    with _environment(more):
        ran = run_layout(ScriptLayout(folder.name, ranks), script, path, folder.parent, launcher)
    if ran.code:
        lines = "".join(f"\n  {line}" for line in last_lines(ran))
        raise ProbeError(f"the script ended with exit code {ran.code}; it printed last:{lines}")
    rows = rows_of_dump(ran.folder)
    if not rows:
        raise ProbeError(f"no step of {script[0]} was recorded: does it train, and is its loop one that trainprobe knows?")
    pack = ran.folder / PACK
    return rows, pack if pack.exists() else None


@contextmanager
def _environment(more: Mapping[str, str]) -> Generator[None]:
    before = dict(os.environ)
    os.environ |= more
    try:
        yield
    finally:
        os.environ.clear()
        os.environ |= before


def pack_of(golden: Path) -> Path:
    """Return where the settings of a record lie."""
    return golden.with_suffix(".zip")


def changed_since(then: Path, now: Path | None) -> list[str]:
    """Return what is configured otherwise than when the record was made."""
    if now is None or not then.exists():
        return []
    causes, _ = causes_and_consequences(compare_packs(read_pack(then), read_pack(now)).checks)
    return [finding.text for finding in causes]
