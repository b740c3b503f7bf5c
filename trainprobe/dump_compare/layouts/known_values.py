"""Numbers on ranks of which it is known how they lie over the ranks: those of modules, and what operators made of them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainprobe.dump_compare.call_slots import is_result
from trainprobe.dump_compare.layouts.cuts import Cut
from trainprobe.dump_compare.layouts.joined import RankPart
from trainprobe.dump_compare.layouts.sharding_by_numbers import are_samples_of, cut_by_shapes, lay_by_numbers, tell_the_same

Values = Mapping[str, Sequence[RankPart]]  # slot → what the ranks of one side hold of it
Identity = tuple[object, ...]


@dataclass(slots=True)
class KnownValues:
    """Of which numbers on which ranks it is known how they lie: those of modules, and what operators made of them.

    recognises: whether no modules were recorded, so that what begins it all is to be known by its numbers.
    """

    recognises: bool = False
    _seen: dict[Identity, set[int]] = field(default_factory=dict[Identity, set[int]])  # → which values these numbers are
    _cuts: dict[Identity, set[Cut]] = field(default_factory=dict[Identity, set[Cut]])
    _count: int = 0

    def add(self, *sides: Sequence[RankPart], cut: Cut | None = None) -> None:
        """Take in what ranks hold of a value, on one side or both. cut: of the side that holds it in parts."""
        self._count += 1
        for part in (part for parts in sides for part in parts):
            if found := _identity(part):
                self._seen.setdefault(found, set()).add(self._count)
                if cut is not None and math.prod(part.shape) < max(part.size for parts in sides for part in parts):
                    self._cuts.setdefault(found, set()).add(cut)

    def are_one(self, a: Sequence[RankPart], b: Sequence[RankPart]) -> bool:
        """Return whether both sides hold one value here that was seen on both."""
        return bool(set.intersection(*[self._seen.get(_identity(part), set()) for part in (*a, *b)]))

    def recognise(self, a: Sequence[RankPart], b: Sequence[RankPart]) -> None:
        """Take in a value that one rank of one side holds, where the numbers of the other side's ranks are its own."""
        one, several = sorted((a, b), key=len)
        if len(one) != 1 or len(several) == 1 or self.are_one(a, b):
            return
        lay = lay_by_numbers(one[0], several)
        if lay is not None or are_samples_of(one[0], several):
            self.add(one, several, cut=lay if isinstance(lay, Cut) else None)

    def take_weights(self, a: Values, b: Values) -> None:
        """Take in the weights of an operator that is given something known, by their shapes where their numbers are others.

        A weight that is another is then compared, and not left out with all that is made of it.
        """
        given = [slot for slot in a if slot in b and not is_result(slot) and any(part.size for part in a[slot])]
        unknown = [slot for slot in given if not self.are_one(a[slot], b[slot])]
        if len(unknown) == len(given):
            return
        for slot in unknown:
            one, several = sorted((a[slot], b[slot]), key=len)
            trained = all(part.value.requires_grad and not self.all_of([one[0], part]) for part in several)
            if len(one) != 1 or len(several) == 1 or not trained or tell_the_same(one[0], several):
                return
            cut = cut_by_shapes(one[0].shape, several)
            if cut is not None or all(part.shape == one[0].shape for part in several):
                self.add(one, several, cut=cut)

    def cut_of(self, parts: Sequence[RankPart]) -> Cut | None:
        """Return the cut of a value that the ranks of one side hold parts of, None where that is not known."""
        found = set.intersection(*[self._cuts.get(_identity(part), set()) for part in parts])
        return found.pop() if len(found) == 1 else None

    def all_of(self, parts: Sequence[RankPart]) -> bool:
        """Return whether a rank holds the whole, the dump says which part each holds, or all of it was seen."""
        return len(parts) == 1 or has_boxes(parts) or all(_identity(part) in self._seen for part in parts)


def _identity(part: RankPart) -> Identity:
    """Return what tells a value on its rank; nothing where the dump has no fingerprint and no norm of it, as of masks."""
    fingerprint = part.side.bits(part.value) or part.side.numbers(part.value)
    if not part.side.bits(part.value) and "norm" not in fingerprint:
        return ()
    return id(part.side), part.value.dtype, part.size, *sorted(fingerprint.items())


def has_boxes(parts: Sequence[RankPart]) -> bool:
    """Return whether the dump says of each part where in the whole it is."""
    return all(part.box is not None for part in parts)
