"""Judges torch's own CPU kernels on torch's own sample inputs: none of them may be called a bug."""

from __future__ import annotations

import re
import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from trainprobe.op_check.cases import Case, flat, mapped
from trainprobe.op_check.check import Checked, check

_ANY_NUMBER = re.compile(r"\d+%")  # in a reason that is else the same
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def op_infos() -> list[Any]:
    """Return torch's descriptions of its operators. Raises SystemExit where their requirement is not installed."""
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as missing:
        text = f"torch's sample inputs need {missing.name}, which is not installed: pip install expecttest"
        raise SystemExit(text) from None
    return list(op_db)


def cases(info: Any, dtype: torch.dtype, most: int, device: str = "cpu") -> Iterator[Case]:
    """Yield up to `most` calls of an operator as a dump of the device would hold them, with their backward; on the host."""
    torch.manual_seed(0)
    able = dtype in info.supported_backward_dtypes(device) if info.supports_autograd else False
    for i, sample in enumerate(info.sample_inputs(device, dtype, requires_grad=able)):
        if i == most:
            return
        if any(t.layout != torch.strided for t in flat((sample.input, sample.args, sample.kwargs))):
            continue
        args = (sample.input, *sample.args)
        given = [*flat((args, sample.kwargs))]
        before = Case(
            entry(info.name),
            _copied(args),
            _copied(sample.kwargs),
            requires_grad=[t.requires_grad for t in given],
            function=info.op,
        )
        try:
            out = [*flat(info.op(*args, **sample.kwargs))]
        except (
            RuntimeError,
            TypeError,
            ValueError,
            IndexError,
            AssertionError,
        ):  # a sample that this kernel refuses is torch's own affair
            continue
        before.outputs = [_on_host(o) for o in out]
        node: Any = next((o.grad_fn for o in out if o.grad_fn is not None), None)
        if able and node is not None and all(o.layout == torch.strided for o in out):
            made = [o for o in out if o.grad_fn is node]
            given_back = [torch.randn_like(o) if o.is_floating_point() else None for o in made]
            before.gradients = [None if g is None else _on_host(g) for g in given_back]
            slots = max(1, len(node._input_metadata))
            try:
                with torch.no_grad():
                    results: Any = node(*[*given_back, *[None] * slots][:slots])
            except (RuntimeError, TypeError):
                before.gradients = None
            else:
                told = [*results] if isinstance(results, tuple) else [results]
                before.results = [None if t is None else _on_host(t) for t in told]
        yield before


def entry(name: str) -> str:
    """Return what a dump calls an operator that torch's list calls `nn.functional.linear`, `linalg.norm` or `__getitem__`."""
    if name.startswith("nn.functional."):
        return f"Functional.{name.removeprefix('nn.functional.')}"
    return f"Tensor.{name}" if name.startswith("__") else f"Torch.{name.replace('.', '_')}"


def _copied(tree: Any) -> Any:
    return mapped(tree, _on_host)


def _on_host(t: torch.Tensor) -> torch.Tensor:
    return t.detach().clone().cpu()  # a copy, with the strides that it has


@dataclass
class Calibration:
    """What became of all entries. entries: of torch's list, in all. done: those that were judged.

    counts: (dtype, direction) → outcome → calls. judged: dtype → entries with a call that was judged. skipped: reason → entries
    with a call that was not checked. wrong: (entry, dtype, direction and reference, verdict, bounds) of bugs and suspicions.
    """

    entries: int = 0
    done: int = 0
    counts: dict[tuple[str, str], Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    judged: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    able: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    skipped: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    wrong: list[tuple[str, str, str, str, float]] = field(default_factory=list)

    def add(self, label: str, dtype: str, one: Checked) -> None:
        """Count one judged direction of a call."""
        worst = one.worst
        self.counts[dtype, one.direction][worst.outcome] += 1
        if worst.outcome == "not checked":
            self.skipped[_ANY_NUMBER.sub("…%", worst.reason)].add(label)
            return
        self.judged[dtype].add(label)
        if worst.outcome in ("bug", "suspicious"):
            self.wrong.append((label, dtype, f"{one.direction} {one.source}", f"{worst.outcome}: {worst.reason}", worst.worst))
            print(*self.wrong[-1], flush=True)


def calibrate(most: int = 8, only: str = "") -> Calibration:
    """Judge up to `most` samples of each entry; an interrupt ends it and keeps what was judged until then."""
    infos = [(label_of(info), info) for info in op_infos()]
    infos = [(label, info) for label, info in infos if only in label]
    found = Calibration(entries=len(infos))
    try:
        for label, info in infos:
            print(label, file=sys.stderr, flush=True)
            judge_entry(found, label, info, most)
            found.done += 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
    return found


def label_of(info: Any) -> str:
    """Return the name of an entry of torch's list with its variant."""
    return f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name


def judge_entry(
    found: Calibration, label: str, info: Any, most: int, device: str = "cpu", dtypes: Sequence[torch.dtype] = DTYPES
) -> None:
    """Judge up to `most` samples of an entry in each dtype, as the device computes them."""
    for dtype in dtypes:
        if dtype not in info.supported_dtypes(device):
            continue
        short = str(dtype).removeprefix("torch.")
        found.able[short].add(label)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for case in cases(info, dtype, most, device):
                found.add(label, short, check(case))
                if case.gradients is not None:
                    found.add(label, short, check(case, backward=True))
