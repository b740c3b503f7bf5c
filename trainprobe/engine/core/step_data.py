"""What a collected step says, value by value: the names of its calls as existing tools write them, and its Records."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call, Phase, Record, Site, Step, StepData, Value
from trainprobe.engine.stats.partials import column, known

# side of a call → first part of the slot of the values in it, for each sort of call
FORWARD = (("args", "input"), ("kwargs", "kwargs"), ("params", "parameters"), ("out", "output"))
BACKWARD = (("args", "grad_output"), ("kwargs", "kwargs"), ("out", "grad_input"))
# what `params` of an op holds where values are stored: arguments that it wrote and does not return, as they were after it, by
# position or keyword; and the state of the generator on the host that it drew from, which is no value of the training
WRITTEN, GENERATOR, AFTER = "written", "generator", "after"
BESIDE = (WRITTEN, GENERATOR)


@dataclass(slots=True)
class StoredStepData(StepData):
    """A collected step that was read from a dump, which holds finished numbers and no partials.

    finished: statistic → float64 [rows]. absent: statistic → bool [rows], True where the dump says nothing. states: what was
    seen of parameters and optimizers, as calls of kind "state" whose `node` is the moment; their values may have a `shard`.
    """

    finished: Mapping[str, npt.NDArray[np.float64]] = field(default_factory=dict[str, npt.NDArray[np.float64]])
    absent: Mapping[str, npt.NDArray[np.bool_]] = field(default_factory=dict[str, npt.NDArray[np.bool_]])
    states: Sequence[Call] = ()

    def numbers(self) -> dict[str, npt.NDArray[Any]]:
        """Return statistic name → array [rows]; NaN both where the number is NaN and where it is absent."""
        return dict(self.finished)


class ValuesOfCalls(Sequence[Value]):
    """The values of calls, of which those that are packed are made whenever they are asked for."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls

    def __iter__(self) -> Iterator[Value]:
        """Yield the values of each call in turn."""
        return (value for call in self._calls for _, value in slots(call))

    def __len__(self) -> int:
        """Return how many values the calls have."""
        return sum(1 for _ in self)

    def __getitem__(self, place: Any) -> Any:
        """Return a value, or a list of some."""
        return list(self)[place]


def entry_name(call: Call, framework: str = "pytorch", phase: Phase | None = None) -> str:
    """Return the key of a call in a dump: `Module.layers.0.Block.forward.1`, `Functional.linear.0.backward`, `loss.0.debug`.

    phase: name the call as if it were of this phase (the parent of a backward call comes from its forward). A recomputed
    forward has the name of the forward that it repeats; an op of the optimizer is a forward.
    """
    side = "backward" if (phase or call.phase) == "backward" else "forward"
    if call.kind == "module":
        return f"{'Cell' if framework == 'mindspore' else 'Module'}.{call.name}.{call.cls}.{side}.{call.call}"
    if call.kind == "parameter":
        return f"{'Cell' if framework == 'mindspore' else 'Module'}.{call.name}.{call.cls}.parameters_grad.{call.call}"
    if call.kind == "state":
        return f"Parameter.{call.name}{'.grad' if side == 'backward' else ''}"
    if call.kind == "saved":
        return f"{call.name}{'_grad' if side == 'backward' else ''}.{call.call}.debug"
    return f"{call.name}.{call.call}.{side}"


def parent_name(call: Call, framework: str = "pytorch") -> str | None:
    """Return the entry that encloses a call, or "optimizer" or "clip_grad", or None at the outermost level.

    A backward call encloses and is enclosed by backward calls, whichever phase its parent was recorded with.
    """
    parent = call.parent
    if parent is None or isinstance(parent, str):
        return parent
    return entry_name(parent, framework, "backward" if call.phase == "backward" else parent.phase)


def parameter_name(call: Call, short: str) -> str:
    """Return the whole name of a parameter that a call of its module shows."""
    return f"{call.name}.{short}" if call.name not in ("", ROOT) else short


def owner(call: Call) -> str:
    """Return the module whose parameters a call of kind "parameter" or "state" is about."""
    return call.name if call.kind != "state" else call.name.rpartition(".")[0] or ROOT


def slots(call: Call) -> list[tuple[str, Value]]:
    """Return (slot, value) of each tensor value of a call, in order. The only element of a list of outputs has no number."""
    found: list[tuple[str, Value]] = []
    if call.kind == "saved":
        _add_leaves(call.args, "grad" if call.phase == "backward" else "value", found)
    elif call.kind in ("parameter", "state"):
        for short, tree in (call.params or {}).items():
            _add_leaves(unwrap(tree), short, found)
    else:
        for side, first in BACKWARD if call.phase == "backward" else FORWARD:
            tree = getattr(call, side)
            if side == "params" and call.kind == "op":
                _add_leaves((tree or {}).get(WRITTEN), WRITTEN, found)
            elif tree is not None:
                whole = unwrap(tree) if first == "output" else tree if isinstance(tree, (list, dict)) else [tree]
                _add_leaves(whole, first, found)
    return found


def unwrap(tree: Any) -> Any:
    """Return the only element of a list of one, and anything else as it is."""
    return tree[0] if isinstance(tree, list) and len(tree) == 1 else tree  # pyright: ignore[reportUnknownVariableType]


def leaves(tree: Any, path: str) -> list[tuple[str, Value]]:
    """Return (path, value) of each Value in a tree of lists and dicts, depth first."""
    found: list[tuple[str, Value]] = []
    _add_leaves(tree, path, found)
    return found


def _add_leaves(tree: Any, path: str, found: list[tuple[str, Value]]) -> None:
    if isinstance(tree, Value):
        found.append((path, tree))
    elif isinstance(tree, list):
        for i, item in enumerate(tree):
            if isinstance(item, Value):
                found.append((_within(path, i), item))
            elif isinstance(item, (list, dict)):
                _add_leaves(item, _within(path, i), found)
    elif isinstance(tree, dict):
        for key, item in tree.items():
            _add_leaves(item, f"{path}.{key}", found)


@lru_cache(maxsize=4096)
def _within(path: str, place: int) -> str:
    """Return the slot of an element of a list, as one object for all calls."""
    return f"{path}.{place}"


def iterate_records(step_data: StepData) -> Iterator[Record]:
    """Yield a Record for each value at each place it was seen, in execution order, then one for each feature and scalar.

    A scalar of the step (loss, learning rate) has kind "scalar", slot "value" and the single statistic "value". A feature has
    kind "feature" and the same statistic. The fingerprint of a batch is the feature "fingerprint" of "batch", a checksum.
    """
    columns = numbers_of_rows(step_data)
    for call in step_data.calls:
        step = Step(step_data.step, call.micro, call.phase)
        for slot, value in slots(call):
            values: dict[str, float | int] = {}
            if value.row >= 0:
                values = {name: numbers[value.row] for name, numbers in columns.items() if numbers[value.row] is not None}
            yield Record(step, step_data.place, _site(call, slot), value.dtype, value.shape, values, value.tensor, value.note)
    for feature in step_data.features:
        step = Step(step_data.step, feature.micro, "forward")
        for slot, number in feature.each():
            site = Site("feature", feature.name, slot, feature.call)
            yield Record(step, step_data.place, site, "float64", (), {"value": number})
    for i, fingerprint in enumerate(step_data.batches):
        site = Site("feature", "batch", "fingerprint", i)
        yield Record(Step(step_data.step, i, "forward"), step_data.place, site, "uint64", (), {"checksum": fingerprint})
    for name, number in step_data.scalars.items():
        site = Site("scalar", name, "value")
        yield Record(Step(step_data.step, None, "step"), step_data.place, site, "float64", (), {"value": number})


def numbers_of_rows(step_data: StepData) -> dict[str, list[Any]]:
    """Return statistic → number of each row, None where there is none: nothing was reduced, or not to this.

    "checksum" is the 64-bit fingerprint and "crc32" what existing files call md5, both whole numbers.
    """
    columns: dict[str, list[Any]] = {}
    for name, array in step_data.numbers().items():
        columns[name] = array.tolist()
        for row in np.flatnonzero(unknown(step_data, name)).tolist():
            columns[name][row] = None
    if step_data.checksums is not None:
        columns["checksum"] = step_data.checksums.tolist()
        for row in np.flatnonzero(~fingerprinted(step_data)).tolist():
            columns["checksum"][row] = None
    if step_data.crc32:
        columns["crc32"] = [None] * len(step_data.partials)
        for row, text in step_data.crc32.items():
            columns["crc32"][row] = int(text, 16)
    return columns


def unknown(step_data: StepData, statistic: str) -> npt.NDArray[np.bool_]:
    """Tell the rows of which a statistic is not known: nothing was reduced, not to this, or nothing is there."""
    if isinstance(step_data, StoredStepData):
        return step_data.absent[statistic]
    return ~known(step_data.partials, statistic) | (column(step_data.partials, "count") == 0)


def fingerprinted(step_data: StepData) -> npt.NDArray[np.bool_]:
    """Tell the rows of which a fingerprint is known: it was taken, or there are no elements, whose fingerprint is 0."""
    if step_data.checksums is None:
        return np.zeros(len(step_data.partials), bool)
    if isinstance(step_data, StoredStepData):
        return ~step_data.absent["checksum"]
    return (step_data.checksums != 0) | (column(step_data.partials, "count") == 0)


def _site(call: Call, slot: str) -> Site:
    if call.kind == "state":
        return Site("parameter", call.name, slot)
    if call.kind != "parameter":
        return Site(call.kind, call.name, slot, call.call, call.cls)
    short, _, rest = slot.partition(".")
    return Site("parameter", parameter_name(call, short), f"grad.{rest}" if rest else "grad", call.call, call.cls)
