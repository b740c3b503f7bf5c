"""Another process, and float64: `trainprobe replay PACK` says whether data, op, precision or hardware is wrong.

Nothing of a pack is executed: its modules are made from a closed table, the classes of `torch.nn`, and from modules that the
caller names with `--import`.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import orjson
import torch
import typer
from safetensors import SafetensorError
from safetensors.torch import load

from trainprobe.again.floors import MARGIN, nudged
from trainprobe.again.pack import PACK, TENSORS
from trainprobe.again.rebuild import run, values
from trainprobe.again.step_again import host_bits
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.stats.flipped import flips, odd_one_out
from trainprobe.engine.storage.safe_files import read_bounded
from trainprobe.errors import FormatError

_MOST_JSON, _MOST_TENSORS, _MOST_RANKS = 16 << 20, 4 << 30, 4096
_FAR = 1e4  # times the median of the rows: a row of a batch that is not like the others
_LOST = 0.05  # of a result, that rounding alone changes


@dataclass(frozen=True, slots=True)
class ReplayVerdict(Verdict):
    """What a pack or one call of it comes to.

    Exit codes: 0 the same bits and nothing wrong, 1 other bits within rounding, 2 something is wrong, 3 no answer, or calls
    that were not judged.
    """

    kind: str = "none"
    """What is wrong: "data", "op", "precision", "hardware", "none", or "unknown"."""
    reproduced: bool | None = None
    """Whether the bits of the training came again; None where that was not seen."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return {"class": self.kind, "sentence": self.sentence, "reproduced": self.reproduced, "details": list(self.details)}


def _verdict(
    kind: str, text: str, reproduced: bool | None = None, details: Sequence[str] = (), whole: bool = True
) -> ReplayVerdict:
    """whole: every call was judged."""
    code = (0 if reproduced else 1) if kind == "none" and whole else 3 if kind in ("none", "unknown") else 2
    return ReplayVerdict(code, text, details, kind, reproduced)


def read_packs(folder: Path) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return (document, tensors) of each rank. Raises FormatError for what no run of ours wrote."""
    folders = [folder] if (folder / PACK).exists() else sorted(folder.glob("rank*"))[:_MOST_RANKS]
    if not folders:
        raise FormatError(f"{folder} holds no replay pack: name a folder such as probe_out/replay/step3")
    return [_read(one) for one in folders]


def _read(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    try:
        document = orjson.loads(read_bounded(folder / PACK, _MOST_JSON))
        tensors = load(read_bounded(folder / TENSORS, _MOST_TENSORS))
        if document["format"] != 1:
            raise FormatError(f"{folder} is a pack of format {document['format']!r}, and 1 can be read")
        for i, call in enumerate(document["calls"]):
            _ = [call[key] for key in ("name", "module", "args", "kwargs", "outputs", "device")], tensors[f"{i}.random.cpu"]
        _ = [document[key] for key in ("rank", "findings", "left_out", "threads")]
    except (OSError, SafetensorError, orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{folder} is no whole replay pack: {fault_text(error)}") from None
    return document, tensors


def finder(imports: Sequence[str]) -> Callable[[str], Any]:
    """Return what finds a class by its import path: one of torch.nn, or of a module that the caller named."""
    files = [torch.nn, *(x for x in vars(torch.nn.modules).values() if isinstance(x, ModuleType))]
    known = {f"{c.__module__}.{c.__qualname__}": c for file in files for c in vars(file).values() if isinstance(c, type)}
    for name in imports:
        module = importlib.import_module(name)
        known |= {f"{name}.{c.__qualname__}": c for c in vars(module).values() if isinstance(c, type)}

    def find(path: str) -> Any:
        cls = known.get(path)
        if cls is None or not issubclass(cls, torch.nn.Module):
            raise FormatError(
                f"{path} is not of torch.nn: name its module if you trust it (`--import {path.rpartition('.')[0]}`)"
            )
        return cls

    return find


def _ranks_differ(packs: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> Iterator[str]:
    """Yield a sentence for each weight of which the ranks hold other bits, by one flipped bit."""
    for name in packs[0][1] if len(packs) > 1 else ():
        held = [(document["rank"], tensors[name]) for document, tensors in packs if name in tensors]
        at, _, short = name.partition(".state.")
        calls = [document["calls"][int(at)]["name"] for document, tensors in packs if short and name in tensors]
        if not short or len(held) < 2 or len({*calls}) > 1 or len({(t.shape, t.dtype) for _, t in held}) > 1:
            continue
        arrays = [host_bits(t) for _, t in held]
        odd = odd_one_out(arrays)
        for i in odd or range(1, len(arrays)):
            other = next(j for j in range(len(arrays)) if j != i and j not in odd)
            count, few = flips(arrays[other], arrays[i], str(held[i][1].dtype).removeprefix("torch."))
            if count == 1 and len(few[0].bits) == 1:
                full = f"{calls[0]}.{short}"
                whose = f"rank {held[i][0]} is alone with it" if odd else "of two ranks, either"
                yield f"one bit of {full} differs between ranks {held[other][0]} and {held[i][0]} ({whose}): element {few[0]}"


def judge_call(told: Any, at: int, tensors: dict[str, Any], find: Any, double: bool) -> ReplayVerdict:
    """Run one call again, and in float64. Raises an error where it cannot be made from what the pack holds."""
    name, then = told["name"], list(values(told["outputs"], tensors))
    if _of_torch(told["module"]):
        _same_shapes(name, run(told, at, {n: t.to("meta") for n, t in tensors.items()}, find, wide=True), then)
    start = tensors[f"{at}.random.cpu"]
    torch.set_rng_state(start)
    now = run(told, at, tensors, find)
    drew = not torch.equal(torch.get_rng_state(), start)
    _same_shapes(name, now, then)
    differ = [flips(host_bits(a), host_bits(b), str(a.dtype).removeprefix("torch.")) for a, b in zip(then, now, strict=True)]
    count = sum(found[0] for found in differ)
    text = f"{name}: {sum(t.numel() for t in now)} results have the bits of the training"
    if count:
        few = next(found[1] for found in differ if found[0])
        if count == 1 and len(few[0].bits) == 1:
            flip = f"one bit of a result of {name} was flipped in the training: element {few[0]}"
            return _verdict("hardware", flip, False)
        text = f"{name}: {count} results have other bits here than on {told['device']}: element {few[0]}"
    if double and not drew:
        kind, against = _against_double(then, told, at, tensors, find)
        return _verdict(kind, f"{name}: {against}", not count, [text])
    more = ["not compared with float64: it draws random numbers"] if double and not count else []
    return _verdict("unknown" if count else "none", text, not count, more)


def _of_torch(module: Any) -> bool:
    return module["class"].startswith("torch.nn.") and all(map(_of_torch, module["children"].values()))


def _same_shapes(name: str, made: Sequence[Any], then: Sequence[Any]) -> None:
    """Refuse results of other shapes, on the meta device before anything is computed: they might not fit into memory."""
    if [t.shape for t in made] != [t.shape for t in then]:
        raise FormatError(f"{name} makes results of other shapes than the pack holds")


def _against_double(then: Any, told: Any, at: int, tensors: dict[str, Any], find: Any) -> tuple[str, str]:
    """Return the kind of what parts the results from float64, and a sentence."""
    given = {n: t for n, t in tensors.items() if n.startswith((f"{at}.input", f"{at}.state")) and t.is_floating_point()}
    broken = next((n for n, t in given.items() if not bool(t.isfinite().all())), None)
    if broken is not None:
        return "unknown", f"what it was given was not finite already ({broken.partition('.')[2]}): it comes from before"
    exact = run(told, at, tensors, find, wide=True)
    shifted = run(told, at, {**tensors, **{n: nudged(t, 0.5) for n, t in given.items()}}, find, wide=True)
    largest = max((float(t.double().abs().max()) for t in given.values() if t.numel()), default=0.0)
    triples = [one for one in zip(then, exact, shifted, strict=True) if one[0].is_floating_point() and one[0].numel()]
    found = (_of_result(y, r, s, largest) for y, r, s in triples)
    return next(filter(None, found), ("none", "its results are those of float64, within rounding"))


def _of_result(y: Any, exact: Any, shifted: Any, largest: float) -> tuple[str, str] | None:
    """Judge one result against float64. shifted: from nudged inputs. largest: of all that went in, by magnitude."""
    bad, most = ~y.isfinite(), torch.finfo(y.dtype).max
    both = int((bad & ~exact.isfinite()).sum())
    if both:
        return "op", f"{both} results are not finite in float64 either: it is not defined at its inputs"
    if bool(bad.any()):
        top = float(exact[bad].abs().max())
        if max(top, largest**2) >= most:
            return "precision", f"float64 has up to {top:.4g} where {y.dtype} ends at {most:.4g}"
        return "op", f"{int(bad.sum())} results are not finite, and float64 has {top:.4g}, which {y.dtype} holds"
    size, error = float(exact.norm()), float((y.double() - exact).norm())
    own = float((shifted - exact).norm()) + torch.finfo(y.dtype).eps / 2 * size
    if error > MARGIN * own:
        return "op", f"its result is {error / max(own, 1e-300):.3g} times its own rounding away from float64"
    return ("precision", f"rounding alone changes its result by {own / size:.1%}") if own > _LOST * size > 0 else None


def _odd_rows(tensors: dict[str, Any]) -> str:
    """Return which row of the batch is not finite or far larger than the others; empty where none is."""
    for name, t in tensors.items():
        if not name.startswith("batch.") or not t.is_floating_point() or t.ndim < 2 or len(t) < 4:
            continue
        largest = t.reshape(len(t), -1).double().abs().amax(1)
        median = float(largest.nanmedian())
        rows = [i for i, x in enumerate(largest.tolist()) if not x <= _FAR * median]
        if median > 0 and 0 < len(rows) <= len(t) // 4:
            return f"row {rows[0]} of the batch has {largest[rows[0]]:.3g}, the median row {median:.3g}"
    return ""


def judge(packs: Sequence[tuple[dict[str, Any], dict[str, Any]]], find: Any, double: bool) -> ReplayVerdict:
    """Return the answer of all ranks and calls, the first that is wrong; what was not judged is among its details."""
    found: list[ReplayVerdict] = []
    for document, tensors in packs:
        torch.set_num_threads(max(1, min(1024, int(document["threads"]))))  # which decides the order of sums
        row = _odd_rows(tensors) if document["findings"] else ""
        for at, told in enumerate(document["calls"]):
            one = attempt(judge_call, told, at, tensors, find, double, otherwise=partial(_failed, told["name"]))
            if row and one.kind != "hardware":
                one = _verdict("data", row, one.reproduced, [one.sentence, *one.details])
            found.append(one)
    order = ("hardware", "data", "op", "precision", "none", "unknown")
    worst = min(found, key=lambda one: order.index(one.kind), default=_verdict("unknown", "the pack holds no call"))
    kind, text, details = worst.kind, worst.sentence, list(worst.details)
    flip = next(_ranks_differ(packs), None)
    if flip is not None:
        kind, text, details = "hardware", flip, [text]
    elif kind == "none" and len(found) > 1:
        text = f"{sum(one.kind == 'none' for one in found)} of {len(found)} calls were judged; the first: {text}"
    details += [f"not held: {sentence}" for document, _ in packs for sentence in document["left_out"]]
    details += [f"not judged: {one.sentence}" for one in found if one.kind == "unknown" and one.sentence != text]
    known = [one.reproduced for one in found if one.reproduced is not None]
    whole = bool(found) and all(one.kind != "unknown" for one in found)
    return _verdict(kind, text, all(known) if known else None, details, whole)


def _failed(name: str, fault: Exception) -> ReplayVerdict:
    return _verdict("unknown", f"{name} cannot be run again: {fault_text(fault)}")


def replay(
    pack: Annotated[Path, typer.Argument(help="The folder of a step, or of one rank of it.", metavar="PACK")],
    double: Annotated[bool, typer.Option("--double", help="Compare with float64: data, op, precision or hardware.")] = False,
    imports: Annotated[list[str] | None, typer.Option("--import", help="A module of yours whose classes may be used.")] = None,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run what a replay pack holds again, in this process. The pack's own script is not run.

    Exit code: 0 the same bits and nothing wrong, 1 other bits within rounding, 2 something is wrong, 3 no answer, or some calls
    were not judged.
    """
    verdict = judge(read_packs(pack), finder(imports or []), double)
    if verdict.kind not in ("none", "unknown"):
        verdict = replace(verdict, sentence=f"{verdict.kind}: {verdict.sentence}")
    return answered(verdict, "replay", str(pack), json, html)
