"""`compare` and `compare_distributed` as scripts call them that were written for mindstudio-probe: its arguments, its files."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from trainprobe.comparison.files import writing
from trainprobe.dump_compare.command import compare_rank
from trainprobe.dump_compare.pairing import RankPair, pair_ranks
from trainprobe.dump_compare.renamed.mapping_files import MappingFile, read_mappings
from trainprobe.dump_compare.results import Compared, DumpsVerdict
from trainprobe.dump_compare.verdict import judge_runs
from trainprobe.engine.core.log_lines import say
from trainprobe.engine.storage.safe_files import LARGEST_STATE, read_bounded
from trainprobe.engine.storage.writer import flush_all
from trainprobe.errors import FormatError, UsageError

_OLD_KEYS = {"npu_json_path": "npu_path", "bench_json_path": "bench_path", "stack_json_path": "stack_path"}  # of 1.3 and 8.1
# keywords of mindstudio-probe that have no effect here → why
_MAPPINGS = ("data_mapping", "cell_mapping", "api_mapping", "layer_mapping")
_WITHOUT_EFFECT = {
    "fuzzy_match": "calls are aligned as sequences here, whatever their numbers are",
    "stack_mode": "stacks are in the sheet wherever the dump holds them",
    "stack_path": "stacks are found beside the dump",
    "is_print_compare_log": "nothing is printed for each tensor",
    "summary_compare": "what is compared follows from the dumps",
    "md5_compare": "what is compared follows from the dumps",
}


def compare(
    input_param: Mapping[str, Any] | str | Path,
    output_path: str | Path,
    *,
    auto_analyze: bool = True,
    suffix: str = "",
    xlsx: bool = False,
    **others: Any,
) -> int:
    """Compare two ranks and write `compare_result{suffix}_{time}.csv`, the sheet that `dump-compare --sheets` writes.

    input_param: "npu_path" and "bench_path", each a `dump.json` or the folder of one, or the path of a JSON file that holds
    them. auto_analyze: also write `advisor_{time}.txt`, which names the first place where the two part. xlsx: write a workbook.
    others: data_mapping, cell_mapping, api_mapping, layer_mapping, each the path of a mapping file; the rest has no effect.
    Returns the exit code of `dump-compare`. Raises UsageError for arguments that cannot be used, FormatError where there is no
    dump, OutputError where nothing can be written.
    """
    arguments = {_OLD_KEYS.get(key, key): value for key, value in _read(input_param).items()}
    paths = [arguments.get(key) for key in ("npu_path", "bench_path")]
    if not all(paths):
        raise UsageError("compare: input_param needs npu_path and bench_path, the dump.json of both sides")
    mapping = _mapping_of(others)
    _say_without_effect({**{key: value for key, value in arguments.items() if key not in ("npu_path", "bench_path")}, **others})
    a, b = (Path(str(path)) for path in paths)
    return _compare(a, b, Path(output_path), suffix, xlsx, auto_analyze, mapping).code


def compare_distributed(
    npu_dump_dir: str | Path,
    bench_dump_dir: str | Path,
    output_path: str | Path,
    *,
    auto_analyze: bool = True,
    xlsx: bool = False,
    **others: Any,
) -> int:
    """Compare all ranks of two steps and write `compare_result_rank{R}_{time}.csv` for each; else as `compare`.

    npu_dump_dir, bench_dump_dir: folders of a step, which hold the folders of ranks. Raises as `compare` does, and UsageError
    where a suffix is given.
    """
    if others.pop("suffix", ""):
        raise UsageError("compare_distributed takes no suffix: the sheets are named by their ranks")
    mapping = _mapping_of(others)
    _say_without_effect(others)
    return _compare(Path(npu_dump_dir), Path(bench_dump_dir), Path(output_path), None, xlsx, auto_analyze, mapping).code


def _mapping_of(others: dict[str, Any]) -> MappingFile | None:
    """Take the arguments that name mapping files; True asks for the built-in mapping, which is always at work here."""
    given = [others.pop(name, None) for name in _MAPPINGS]
    return read_mappings([Path(path) for path in given if path and path is not True])


def _compare(
    a: Path, b: Path, output: Path, suffix: str | None, xlsx: bool, advise: bool, mapping: MappingFile | None
) -> DumpsVerdict:
    """Compare what two paths hold. suffix: of the sheet's name; None, or several ranks, add the rank."""
    flush_all()  # a debugger of this process may be at work on its dumps
    pairs, missing = pair_ranks(a, b)
    if len({pair.step for pair in pairs}) > 1:
        raise UsageError(f"{a} holds several steps: name one of them, such as {pairs[0].a.parent}")
    stamp = time.strftime("%Y%m%d%H%M%S")

    def sheet(pair: RankPair) -> Path:
        middle = suffix or "" if len(pairs) == 1 and suffix is not None else f"_rank{pair.rank}{suffix or ''}"
        return output / f"compare_result{middle}_{stamp}{'.xlsx' if xlsx else '.csv'}"

    ranks = [compare_rank(pair, sheet=sheet(pair), mapping=mapping) for pair in pairs]
    verdict = judge_runs(ranks, missing)
    say(f"{verdict.sentence}; the sheets are in {output}")
    if advise:
        _write(output / f"advisor_{stamp}.txt", advice(ranks, verdict))
    return verdict


def advice(ranks: list[Compared], verdict: DumpsVerdict) -> str:
    """Return what to look at, as text: the verdict, where it was found, and what was called there."""
    lines = [verdict.sentence, *(f"  {detail}" for detail in verdict.details)]
    if verdict.first is not None:
        rank, first = verdict.first
        lines += [f"Compared: {rank.at.a} (NPU) and {rank.at.b} (Bench), {len(rank.calls)} calls."]
        lines += [f"  {value.slot}: {value.interval.low:.1e} apart ({value.interval.evidence})" for value in first.values]
    return "\n".join(lines) + "\n"


def _read(input_param: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(input_param, Mapping):
        return input_param
    path = Path(input_param)
    try:
        arguments = orjson.loads(read_bounded(path, LARGEST_STATE, follow=True))
    except ValueError as error:
        raise FormatError(f"{path} is no JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise FormatError(f'{path} is no object of arguments: expected {{"npu_path": …, "bench_path": …}}')
    return arguments


def _say_without_effect(given: Mapping[str, Any]) -> None:
    for name, value in given.items():
        if value:
            reason = _WITHOUT_EFFECT.get(name, "there is no such argument here")
            say(f"{name}={value!r} has no effect: {reason}", severity="warning")


def _write(path: Path, text: str) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
