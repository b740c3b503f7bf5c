"""A rank of a dump of which some values are seen otherwise: transposed, in another shape, or several of them as one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from trainprobe.dump_compare.dump_side import STATISTICS, Columns, Side
from trainprobe.dump_compare.layouts.joined import together
from trainprobe.dump_compare.renamed.fused_rows import Laid
from trainprobe.engine.core.records import Value

How = Literal["transposed", "reshaped", "side by side", "added"]


@dataclass(frozen=True, slots=True)
class _ComposedValue:
    how: How
    parts: tuple[Value, ...]
    shape: tuple[int, ...]
    laid: Laid | None = None


class Composed(Side):
    """A side with values that are made of those of the dump: rows behind its own, which have no fingerprints."""

    def __init__(self, side: Side) -> None:
        self.folder, self.step_data, self.unread = side.folder, side.step_data, side.unread
        self._side = side
        self._made: list[_ComposedValue] = []
        self._count = len(side.step_data.partials)

    def make(self, how: How, parts: Sequence[Value], shape: tuple[int, ...], laid: Laid | None = None) -> Value:
        """Return a value made of others. All values must be made before one is asked for its columns."""
        first = parts[0]
        self.adds_up = self.adds_up or len(parts) > 1
        self._made.append(_ComposedValue(how, tuple(parts), shape, laid))
        in_order = how in ("transposed", "added") or laid is not None
        tensor = first.tensor if in_order and all(part.tensor for part in parts) else None
        return Value(self._count + len(self._made) - 1, first.dtype, shape, type=first.type, tensor=tensor)

    def numbers(self, value: Value) -> Mapping[str, float]:
        """Return the statistics of a value by name; those of a made one follow from those of its parts."""
        if value.row < self._count:
            return self._side.numbers(value)
        made = self._made[value.row - self._count]
        statistics = [self.numbers(part) for part in made.parts]
        sizes = [math.prod(part.shape) for part in made.parts]
        names = [name for name in STATISTICS if all(name in each for each in statistics)]
        if made.how == "added" and len(statistics) > 1:
            return {"mean": math.fsum(each["mean"] for each in statistics)} if "mean" in names else {}
        return {name: together(name, [each[name] for each in statistics], sizes) for name in names}

    def bits(self, value: Value) -> Mapping[str, int]:
        """Return the fingerprints of a value of the dump; of a made one none are known."""
        return self._side.bits(value) if value.row < self._count else {}

    @cached_property
    def _columns(self) -> Columns:
        return self._side._columns.and_made([self.numbers(Value(self._count + i, "", ())) for i in range(len(self._made))])

    def array(self, value: Value) -> npt.NDArray[Any] | None:
        """Return the elements of a value where the dump stores them and their order is known."""
        if value.row < self._count:
            return self._side.array(value)
        made = self._made[value.row - self._count]
        if made.how not in ("transposed", "added") and made.laid is None:
            return None
        arrays = [array for part in made.parts if (array := self.array(part)) is not None]
        if len(arrays) < len(made.parts):
            return None
        if made.laid is not None:
            whole = made.laid.together(arrays)
        else:
            whole = arrays[0].T if made.how == "transposed" else np.sum([np.asarray(each, np.float64) for each in arrays], 0)
        return whole if whole is not None and whole.shape == made.shape else None

    def place_of(self, value: Value, at: Sequence[int]) -> str:
        """Return which element of which of several modules an element of theirs is."""
        if value.row < self._count:
            return self._side.place_of(value, at)
        made = self._made[value.row - self._count]
        return "" if made.laid is None else made.laid.place(at)
