"""`trainprobe golden`: today's software instead of last month's. Record what a small run computes, and check it later."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from trainprobe.again.first_place import Difference, first_difference
from trainprobe.again.floors import MARGIN, verdict_of
from trainprobe.again.golden_record import (
    GoldenRow,
    is_given,
    read_golden,
    rows_of_dump,
    with_floors,
    within_reach,
    write_golden,
)
from trainprobe.again.recording import Key, Run, Shown, parameter_of
from trainprobe.again.script_runs import PASS_ON, Script, run_script, script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.files import writing
from trainprobe.comparison.verdict import Verdict
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.compare.headline import causes_and_consequences
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.config_check.plan import PACK
from trainprobe.engine.core.log_lines import say as log
from trainprobe.errors import ProbeError
from trainprobe.integrations.perturbed_start import SEED

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, help=__doc__, no_args_is_help=True)
# the runs that measure rounding
FLOORS: tuple[dict[str, Any], ...] = (
    {"condition": ("floor",), "environment": {SEED: "0"}},
    {"condition": ("floor",), "environment": {SEED: "1"}},
    {"condition": ("floor", "--way", "threads")},
)
_EXAMPLE = "golden record --steps 3 golden.txt -- train.py"

Golden = Annotated[Path, typer.Argument(metavar="GOLDEN", help="The record; what is configured goes to GOLDEN.zip beside it.")]
Ranks = Annotated[int, typer.Option(help="How many processes run the script; more than one are started by torchrun.", min=1)]


@app.command(context_settings=PASS_ON)  # pyright: ignore[reportUntypedFunctionDecorator]
def record(
    golden: Golden,
    words: Script = None,
    steps: Annotated[int, typer.Option(help="How many first steps are recorded.", min=1)] = 3,
    ranks: Ranks = 1,
) -> int:
    """Write the record: the run itself, and three runs with another rounding, which measure what rounding does to it."""
    script = script_of(words, _EXAMPLE)
    with tempfile.TemporaryDirectory() as folder:
        rows, pack = shown_by(script, Path(folder) / "run", steps, ranks)
        others = [shown_by(script, Path(folder) / f"floor{i}", steps, ranks, **how)[0] for i, how in enumerate(FLOORS)]
        kept, note = within_reach(with_floors(rows, others))
        write_golden(golden, kept, script, note)
        if pack is not None:
            with writing(pack_of(golden)):
                shutil.copyfile(pack, pack_of(golden))
    size = golden.stat().st_size / max(len({row.step for row in kept}), 1)
    about = f"{len(kept)} values of {steps} step{'s' * (steps > 1)}, {size / 1000:.0f} kB a step"
    log(f"{golden}: {about}{f'; {note}' if note else ''}")
    return 0


@app.command(context_settings=PASS_ON)  # pyright: ignore[reportUntypedFunctionDecorator]
def check(
    golden: Golden,
    words: Script = None,
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


def shown_by(script: Sequence[str], folder: Path, steps: int, ranks: int, **how: Any) -> tuple[list[GoldenRow], Path | None]:
    """Run the script; return what its first steps showed, and the file of its configuration. how: see `run_script`."""
    ran = run_script(script, folder, range(steps), ranks=ranks, stacks=False, config_check=True, **how).to_its_end()
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


def judge(golden: Sequence[GoldenRow], now: Sequence[GoldenRow], changed: Sequence[str] = ()) -> Verdict:
    """Return whether a run is what the record says. changed: sentences about what is configured otherwise than then."""
    before, after = {row.place: row for row in golden}, {row.place: row for row in now}
    both = [place for place in before if place in after]
    lost = [place for place in before if place not in after]
    if not both:
        return Verdict(3, "not comparable: no value of the record is in this run; does the training reach its first step?")
    verdict = verdict_of([before[place].floors_to(after[place]) for place in both], lambda: _first(before, after))
    details = [*verdict.details, *(f"otherwise than then: {sentence}" for sentence in changed)]
    if verdict.code < 2 and lost:
        text = f"{len(lost)} of {len(before)} values of the record are not in this run, first {_where(lost[0])}"
        return Verdict(3, f"incomplete: {text}", details)
    blind = [place for place in both if _is_blind(before[place], after[place])]
    if verdict.code < 2 and blind:
        text = f"{len(blind)} of {len(both)} values are NaN or infinite then and now, and their bits differ"
        return Verdict(3, f"not comparable: {text}, first {_where(blind[0])}", details)
    return replace(verdict, details=details)


def _where(place: tuple[int, int, Key, str]) -> str:
    step, rank, key, slot = place
    return f"step {step}, rank {rank}: {key}, {slot}"


def _is_blind(golden: GoldenRow, now: GoldenRow) -> bool:
    """Whether bits differ and no number says how far."""
    return golden.fingerprint != now.fingerprint and not any(map(math.isfinite, golden.numbers))


def _first(before: Mapping[tuple[int, int, Key, str], GoldenRow], after: Mapping[tuple[int, int, Key, str], GoldenRow]) -> str:
    """Say where a run is first beyond rounding, and how far."""
    moments = sorted({(step, rank) for step, rank, _, _ in before})
    for step, rank in moments:
        a, b = (_run(rows, step, rank) for rows in (before, after))
        found = first_difference(a, b, lambda mine, theirs: mine.floors_to(theirs) <= MARGIN)
        if found is not None:
            row = {**a[found.key].given, **a[found.key].made}[found.slot]
            return f"{_cause(found, step == moments[0][0])}, step {step}, rank {rank}: {_told(row, after[row.place])}"
    return "nowhere"


def _run(rows: Mapping[tuple[int, int, Key, str], GoldenRow], step: int, rank: int) -> Run:
    """Return one step of a rank as a run; the module around another is told by its name."""
    found: Run = {}
    for row in rows.values():
        if (row.step, row.rank) == (step, rank):
            shown = found.setdefault(row.key, Shown(row.key, None))
            made = row.key.kind in ("parameter", "scalar") or row.slot.startswith(("output", "grad_input"))
            (shown.made if made else shown.given)[row.slot] = row
    for key, shown in found.items():
        shown.parent = _around(key, found)
    return found


def _around(key: Key, run: Run) -> Key | None:
    """Return the innermost call around a module that the run has, by its name."""
    parts = key.name.split(".") if key.kind == "module" and key.name != "root" else []
    names = [".".join(parts[:i]) or "root" for i in reversed(range(len(parts)))]
    keys = (key._replace(name=name, number=number) for name in names for number in (key.number, 0))
    return next((around for around in keys if around in run), None)


def _cause(found: Difference, at_first: bool) -> str:
    key, slot = found.key, found.slot
    if slot.startswith("parameters."):
        name = parameter_of(key, slot)
        return f"the weights that the run begins with, {name}" if at_first else f"the update of {name}"
    if is_given(key, slot):
        return f"the data, {slot} of the model"
    if key.kind == "module" and key.name == "root" and slot.startswith("grad_output"):
        return "the loss or its scale: the gradient of the model's output"
    if key.kind == "parameter":
        return f"the gradient of {key.name}"
    if key.kind == "scalar":
        return f"the noted number {key.name}"
    if key.kind == "module" and slot.startswith(("input", "kwargs", "grad_output")):
        return f"what module {key} is given, {slot}"
    return f"{'module ' if key.kind == 'module' else ''}{key}, {slot}"


def _told(golden: GoldenRow, now: GoldenRow) -> str:
    if golden.shape != now.shape or golden.dtype != now.dtype:
        return f"{golden.dtype} {list(golden.shape)} then, {now.dtype} {list(now.shape)} now"
    times = f"{golden.floors_to(now):.3g} times the measured floor of {golden.floor:.2g}"
    norms = f"norm {golden.numbers[3]:.9g} then, {now.numbers[3]:.9g} now"
    return f"{norms}, {golden.distance(now):.2g} apart, {times if golden.floor else 'no rounding changed it'}"
