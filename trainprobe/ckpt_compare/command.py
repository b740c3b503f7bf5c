"""`trainprobe ckpt-compare` and `trainprobe ckpt-show`."""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import orjson
import typer
from rich.console import Console
from rich.filesize import decimal
from rich.progress import DownloadColumn, TransferSpeedColumn

from trainprobe.ckpt_compare import formats, report
from trainprobe.ckpt_compare.check import CheckedCheckpoint, summary
from trainprobe.ckpt_compare.check import check as check_all
from trainprobe.ckpt_compare.compare import CheckpointComparison, compare, logical
from trainprobe.ckpt_compare.coverage import coverage_of
from trainprobe.ckpt_compare.distributed import PATIENCE, joined, place, run_on_ray
from trainprobe.ckpt_compare.fingerprints import tensor_fingerprint
from trainprobe.ckpt_compare.names import to_logical
from trainprobe.ckpt_compare.pieces import KINDS, Checkpoint, LogicalTensor, What
from trainprobe.ckpt_compare.quantised_layouts import decoded
from trainprobe.ckpt_compare.tasks import Advance
from trainprobe.ckpt_compare.tolerance import selected, tolerated, unmatched
from trainprobe.ckpt_compare.verdict import verdict_of
from trainprobe.comparison.ci_formats import Github, Junit, case_of, tell
from trainprobe.comparison.terminal import plain_table, progress_bar, say, wide_console
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.compare.uncollected import uncollected
from trainprobe.errors import UsageError, did_you_mean

Heads = Annotated[int | None, typer.Option(help="attention heads, if no checkpoint states them")]
Groups = Annotated[int | None, typer.Option(help="query groups (key/value heads)")]
HeadDim = Annotated[int | None, typer.Option(help="width of one attention head")]
Vocab = Annotated[int | None, typer.Option(help="entries of the vocabulary: rows after them are padding")]
Maps = Annotated[list[Path] | None, typer.Option("--names", help="further name maps (YAML), used before the built-in ones")]


def ckpt_compare(
    a: Annotated[Path, typer.Argument(help="one checkpoint: a file or folder in any known format")],
    b: Annotated[Path, typer.Argument(help="the other one, in any known format and layout")],
    what: Annotated[str, typer.Option(help=f"what counts, comma-separated: {', '.join(KINDS)}")] = "weights,optimizer",
    json: Annotated[Path | None, typer.Option(help="write {name: {l2, cos, numel, shape, …}} here")] = None,
    csv: Annotated[Path | None, typer.Option(help="write one line per tensor here")] = None,
    html: Annotated[
        Path | None, typer.Option(help="write one self-contained page with a layer × parameter heatmap here")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="list every tensor instead of every kind of tensor")] = False,
    names: Maps = None,
    heads: Heads = None,
    groups: Groups = None,
    head_dim: HeadDim = None,
    vocab: Vocab = None,
    format_a: Annotated[str | None, typer.Option(help="format of A, if it is not recognised")] = None,
    format_b: Annotated[str | None, typer.Option(help="format of B, if it is not recognised")] = None,
    threads: Annotated[int | None, typer.Option(help="threads; by default one per core")] = None,
    copies: Annotated[bool, typer.Option(help="also compare the copies of a tensor inside each checkpoint")] = True,
    ray: Annotated[bool, typer.Option("--ray", help="measure on a Ray cluster whose machines see the same paths")] = False,
    wait: Annotated[
        float,
        typer.Option(min=0.1, max=86400, help="under torchrun: give up on a rank that shows no sign of life for these seconds"),
    ] = PATIENCE,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="print only the verdict")] = False,
    only: Annotated[
        list[str] | None, typer.Option(help="compare tensors whose name matches this pattern (`layers.0.*`)")
    ] = None,
    ignore: Annotated[list[str] | None, typer.Option(help="leave out tensors whose name matches this pattern")] = None,
    atol: Annotated[float, typer.Option(min=0.0, help="differences of up to this much are no difference (code 1)")] = 0.0,
    rtol: Annotated[float, typer.Option(min=0.0, help="relative l2 differences of up to this much are none (code 1)")] = 0.0,
    junit: Junit = None,
    github: Github = False,
) -> int:
    """Compare two checkpoints. Exit code: 0 identical, 1 within rounding, 2 differ, 3 not comparable or incomplete."""
    chosen = kinds_of(what)
    if not all(math.isfinite(number) for number in (atol, rtol, wait)):
        raise typer.BadParameter("--atol, --rtol and --wait need finite numbers")
    given = {"heads": heads, "groups": groups, "head_dim": head_dim, "vocab": vocab}
    config = {k: v for k, v in given.items() if v}
    maps = [str(n) for n in names or ()]
    with nullcontext(run_on_ray) if ray else joined(wait) as runner:
        with uncollected():
            left, right = logical(formats.open_checkpoint(a, format_a), formats.open_checkpoint(b, format_b), config, maps)
            notes = _check_patterns(only or (), ignore or (), (left, right))
            left, right = (selected(one, only or (), ignore or ()) for one in (left, right))
        if not (left.tensors or right.tensors) and (only or ignore):
            raise typer.BadParameter("--only and --ignore leave no tensor; `trainprobe ckpt-show` lists the names")
        with uncollected(), _progress(left, right, chosen, quiet) as advance:
            found = compare(left, right, chosen, threads=threads, copies=copies, advance=advance, runner=runner)
        found = replace(tolerated(found, atol, rtol), notes=(*notes, *found.notes))
        verdict = verdict_of(found)
        if place()[0] == 0:  # in a torchrun world rank 0 speaks for all
            _write(found, verdict, json, csv, html)
            tell("ckpt-compare", [case_of(f"{a} and {b}", verdict.code, verdict.sentence, verdict.details)], junit, github)
            if quiet:
                say(wide_console(), verdict.sentence)
            else:
                report.show(found, verdict, wide_console(), every=every)
    return verdict.code


def _write(found: CheckpointComparison, verdict: Verdict, json: Path | None, csv: Path | None, html: Path | None) -> None:
    """Write the files that were asked for, beside earlier ones."""
    for kept in filter(None, (report.keep_earlier(file) for file in (json, csv, html) if file is not None)):
        say(Console(stderr=True), kept)
    if json is not None:
        report.write_tensors(found, json, verdict)
    if csv is not None:
        report.write_table(found, csv)
    if html is not None:
        from trainprobe.ckpt_compare.page import write_page

        write_page(found, verdict, html)


def _check_patterns(only: Sequence[str], ignore: Sequence[str], sides: Sequence[Checkpoint]) -> list[str]:
    """Raise BadParameter for a pattern of --only that matches nothing; return what to note of those of --ignore."""
    for pattern, hint in unmatched(only, sides).items():
        listed = hint or "; `trainprobe ckpt-show` lists the names"
        raise typer.BadParameter(f"--only {pattern} matches no tensor of either checkpoint{listed}")
    return [
        f"--ignore {pattern} matches no tensor of either checkpoint{hint}" for pattern, hint in unmatched(ignore, sides).items()
    ]


def kinds_of(text: str) -> tuple[What, ...]:
    """Read a comma-separated list of kinds of content; raise UsageError for an unknown one."""
    given = [word.strip() for word in text.split(",") if word.strip()]
    for word in given:
        if word not in KINDS:
            raise UsageError(f"--what {word!r} is not known{did_you_mean(word, list(KINDS))}; known are {', '.join(KINDS)}")
    if not given:
        raise UsageError(f"--what is empty; name some of {', '.join(KINDS)}")
    return cast("tuple[What, ...]", tuple(given))


def _bytes(a: Checkpoint, b: Checkpoint, what: Sequence[What]) -> int:
    """Bytes that will be read, as a bound for the progress bar."""
    both = (c.tensors[k] for c in (a, b) for k in a.tensors if k in b.tensors)
    return sum(t.count * t.format.itemsize for t in both if t.what in what and t.stored)


@contextmanager
def _progress(a: Checkpoint, b: Checkpoint, what: Sequence[What], quiet: bool) -> Generator[Advance | None]:
    """Show bytes measured on standard error while the block runs; nothing where nobody looks."""
    with progress_bar("comparing", DownloadColumn(), TransferSpeedColumn(), total=_bytes(a, b, what), quiet=quiet) as bar:
        yield None if bar is None else partial(bar[0].advance, bar[1])


def ckpt_show(
    path: Annotated[Path, typer.Argument(help="a checkpoint: a file or folder in any known format")],
    native: Annotated[bool, typer.Option("--native", help="names as they stand in the checkpoint, nothing split")] = False,
    fingerprint: Annotated[bool, typer.Option("--fingerprint", help="a 64-bit fingerprint a tensor, free of layout")] = False,
    check: Annotated[
        bool, typer.Option("--check", help="read everything: NaN, missing parts, copies and masters that disagree")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
    names: Maps = None,
    heads: Heads = None,
    groups: Groups = None,
    head_dim: HeadDim = None,
    format: Annotated[str | None, typer.Option(help="format, where recognising it fails")] = None,
) -> int:
    """List the logical tensors, the layout and the metadata of one checkpoint.

    Exit code 3 when parts of it are missing or cannot be read; with --check 2 when values are wrong in themselves.
    """
    checkpoint = formats.open_checkpoint(path, format)
    checkpoint = decoded(checkpoint, checkpoint) if check else checkpoint
    if not native:
        given = {k: v for k, v in (("heads", heads), ("groups", groups), ("head_dim", head_dim)) if v}
        checkpoint = to_logical(checkpoint, {**checkpoint.config, **given}, [str(n) for n in names or ()])
    described = {t.key: _described(t, fingerprint) for t in checkpoint.tensors.values()}
    console = wide_console()
    checked = check_all(checkpoint) if check else None
    if json:
        said = _summary(checkpoint) | ({} if checked is None else {"check": summary(checked)})
        console.print_json(orjson.dumps(said | {"tensors": described}, default=str).decode())
    elif checked is not None:
        _show_check(checked, console)
    else:
        _show(checkpoint, described, console)
    if checked is not None:
        return checked.code
    broken = checkpoint.problems or any(d["missing"] for d in described.values())
    return 3 if broken else 0


def _show_check(checked: CheckedCheckpoint, console: Console) -> None:
    """Print the answer, and every fault on a line of its own."""
    style = {0: "bold green", 2: "bold red"}.get(checked.code, "bold yellow")
    say(console, checked.sentence, style)
    for fault in checked.faults:
        say(console, f"  • {fault.where}: {fault.message}")


def _described(tensor: LogicalTensor, fingerprint: bool) -> dict[str, Any]:
    held = coverage_of(tensor)
    found: dict[str, Any] = {
        "shape": list(tensor.shape), "dtype": tensor.format.name if tensor.stored else None, "pieces": len(held.parts),
        "copies": len(held.copies), "missing": held.uncovered, "native": tensor.native or tensor.name,
    }  # fmt: skip
    if fingerprint:
        number = tensor_fingerprint(tensor)
        found["fingerprint"] = None if number is None else f"{number:016x}"
    return found


def _summary(c: Checkpoint) -> dict[str, Any]:
    sizes = [t.count * t.format.itemsize for t in c.tensors.values() if t.stored]
    return {
        "path": c.path, "format": c.format, "family": c.family, "layout": dict(c.layout), "bytes": sum(sizes),
        "config": {k: v for k, v in c.config.items() if v is not None}, "state": {k: dict(v) for k, v in c.state.items()},
        "warnings": list(c.warnings), "problems": [f"{p.where}: {p.message}" for p in c.problems], "notes": list(c.notes),
    }  # fmt: skip


def _show(c: Checkpoint, described: dict[str, dict[str, Any]], console: Console) -> None:
    said = _summary(c)
    names = f" ({c.family} names)" if c.family else ""
    say(console, f"{c.format}{names}: {len(described)} tensors, {decimal(said['bytes'], precision=3)}")
    for key in ("layout", "config"):
        if said[key]:
            say(console, f"  {key}: " + ", ".join(f"{k} {v}" for k, v in said[key].items()))
    for section, values in said["state"].items():
        short = ", ".join(f"{k} {v}" for k, v in list(values.items())[:4])
        say(console, f"  {section}: {short}{f' … {len(values)} values' if len(values) > 4 else ''}")
    for line in [*said["warnings"], *said["problems"], *said["notes"]]:
        say(console, f"  ! {line}", "yellow")
    numbers = ("pieces", "copies", "missing")
    further = ("fingerprint",) if "fingerprint" in next(iter(described.values()), {}) else ()
    table = plain_table(("tensor", "shape", "dtype", *numbers, *further), numbers)
    for key, d in described.items():
        shape = "×".join(map(str, d["shape"])) or "scalar"
        cells = [key, shape, d["dtype"] or "?", str(d["pieces"]), str(d["copies"] or ""), str(d["missing"] or "")]
        table.add_row(*cells, *((d["fingerprint"] or "incomplete",) if "fingerprint" in d else ()))
    console.print(table)
