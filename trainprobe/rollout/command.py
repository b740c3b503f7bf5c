"""`trainprobe rollout-compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trainprobe.engine.storage.dumps.layout import find_dumps, holds_dump
from trainprobe.errors import UsageError
from trainprobe.rollout.compare import SingleComparator


def rollout_compare(
    a: Annotated[Path, typer.Argument(help="folder of SingleSave, dump of the engine, or file of log-probabilities")],
    b: Annotated[Path | None, typer.Argument(help="the other run's folder, or the dump of the trainer")] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="folders: where a sheet a key and verdict.json go")] = Path(
        "rollout_compare"
    ),
    floor: Annotated[
        Path | None, typer.Option(help="folder of a repeated run of A: twice its distance from A counts as noise")
    ] = None,
    workers: Annotated[int, typer.Option("--workers", "-n", help="arrays that are compared at a time")] = 8,
    dtype: Annotated[str | None, typer.Option(help="a file: what both engines compute in (bfloat16, float32 …)")] = None,
    layers: Annotated[int | None, typer.Option(help="a file: layers of the model, which with --dtype give the noise")] = None,
    json: Annotated[Path | None, typer.Option(help="a file or dumps: write all that was found here")] = None,
    html: Annotated[Path | None, typer.Option(help="a file or dumps: write one self-contained page here")] = None,
) -> int:
    """Say where two runs' key data first differ, in which module two dumps do, or why the log-probabilities of a file do.

    Exit code: 0 the same, 1 within noise, 2 they differ, 3 not comparable.
    """
    if b is None:
        return _file(a, dtype, layers, json, html)
    if all(any(map(holds_dump, ranks.values())) for path in (a, b) for ranks in find_dumps(path).values() or [{}]):
        if floor is not None:
            raise UsageError("--floor is of folders of key data: two dumps are judged by the rounding of their formats")
        return _modules(a, b, json, html)
    found = SingleComparator.compare(a, b, output, workers, floor=floor)
    typer.echo(found.sentence)
    typer.echo(f"sheets and verdict.json in {output}")
    return found.code


def _modules(engine: Path, trainer: Path, json: Path | None, html: Path | None) -> int:
    """Compare two dumps along the tokens of the engine."""
    from trainprobe.comparison.terminal import wide_console
    from trainprobe.dump_compare.along_tokens import compare_along_tokens
    from trainprobe.dump_compare.page.comparison import page_of_rank, write_comparison
    from trainprobe.dump_compare.report import show, write_calls

    ranks, verdict = compare_along_tokens(engine, trainer, make={"page": page_of_rank} if html is not None else None)
    if html is not None:
        write_comparison(ranks, verdict, (engine, trainer), html)
    if json is not None:
        write_calls(ranks, verdict, json)
    show(ranks, verdict, wide_console())
    return verdict.code


def _file(path: Path, dtype: str | None, layers: int | None, json: Path | None, html: Path | None) -> int:
    """Judge one file of log-probabilities."""
    from trainprobe.comparison.files import write_json
    from trainprobe.comparison.terminal import show_verdict, wide_console
    from trainprobe.rollout.logprobs.judge import as_json, judge
    from trainprobe.rollout.logprobs.read import read_file
    from trainprobe.rollout.torch_files import SUFFIXES, read_torch_file

    if path.is_dir():
        raise UsageError(f"{path} is a folder, and folders are compared by two: name the other run's, or one file")
    scored = read_torch_file(path) if path.suffix.lower() in SUFFIXES else read_file(path)
    found = judge(scored, dtype, layers)
    if json is not None:
        write_json(as_json(found), json)
    if html is not None:
        from trainprobe.rollout.logprobs.page import write_page

        write_page(found, path, html)
    show_verdict(found.verdict, wide_console())
    return found.verdict.code
