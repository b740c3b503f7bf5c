"""`trainprobe golden`: record what a small run computes, and check it after an upgrade."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from trainprobe.again.golden import GoldenRow, judge, read_golden, rows_of_dump, with_floors, within_reach, write_golden
from trainprobe.again.script_runs import run_script, script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.files import writing
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.headline import causes_and_consequences
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.plan import PACK
from trainprobe.engine.core.log_lines import say as log
from trainprobe.errors import ProbeError
from trainprobe.integrations.perturbed_start import SEED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True)
_PASS_ON = {"allow_interspersed_args": False}
# the runs that measure rounding: conditions, each with its environment
FLOORS: tuple[tuple[Sequence[str], Mapping[str, str]], ...] = (
    (("floor",), {SEED: "0"}),
    (("floor",), {SEED: "1"}),
    (("floor", "--way", "threads"), {}),
)
_EXAMPLE = "golden check golden.txt -- train.py"

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
    script = script_of(words, _EXAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        rows, pack = shown_by(script, Path(folder) / "run", steps, ranks)
        others = [shown_by(script, Path(folder) / f"floor{i}", steps, ranks, *how)[0] for i, how in enumerate(FLOORS)]
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
    json: Json = None,
    html: Html = None,
) -> int:
    """Run the script as it is now, and say whether it computes what the record says.

    Exit code: 0 identical, 1 within rounding as it was measured, 2 not the same, 3 not comparable or incomplete.
    """
    rows = read_golden(golden)
    with tempfile.TemporaryDirectory() as folder:
        steps = 1 + max((row.step for row in rows), default=0)
        now, pack = shown_by(script_of(words, _EXAMPLE), Path(folder) / "run", steps, ranks)
        verdict = judge(rows, now, changed_since(pack_of(golden), pack))
    return answered(verdict, "golden", str(golden), json, html)


def shown_by(
    script: Sequence[str],
    folder: Path,
    steps: int,
    ranks: int,
    condition: Sequence[str] = ("run",),
    environment: Mapping[str, str] | None = None,
) -> tuple[list[GoldenRow], Path | None]:
    """Run the script; return what its first steps showed, and the file of its configuration."""
    how: dict[str, Any] = {"ranks": ranks, "condition": condition, "environment": environment}
    ran = run_script(script, folder, range(steps), stacks=False, config_check=True, **how)
    if ran.code:
        raise ProbeError(f"the script {ran.failure}")
    rows = rows_of_dump(ran.folder)
    if not rows:
        raise ProbeError(f"no step of {script[0]} was recorded: does it train, and is its loop one that trainprobe knows?")
    pack = ran.folder / PACK
    return rows, pack if pack.exists() else None


def pack_of(golden: Path) -> Path:
    """Return where the settings of a record lie."""
    return golden.with_suffix(".zip")


def changed_since(then: Path, now: Path | None) -> list[str]:
    """Return what is configured otherwise than when the record was made."""
    if now is None or not then.exists():
        return []
    causes, _ = causes_and_consequences(compare_packs(read_pack(then), read_pack(now)).checks)
    return [finding.text for finding in causes]
