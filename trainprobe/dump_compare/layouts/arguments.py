"""Plain arguments of an operator that several ranks ran: those that no layout changes, put into the calls of the whole.

Sizes, counts and offsets differ with the parts that a rank holds, so of whole numbers only those that name dimensions count.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from trainprobe.engine.core.records import Call

_DIMENSIONS = ("dim", "dims", "dim0", "dim1", "axis", "axes", "start_dim", "end_dim")
_BY_DIMENSIONS = (  # operators whose whole numbers by place are dimensions
    *(
        "transpose",
        "swapaxes",
        "permute",
        "movedim",
        "softmax",
        "log_softmax",
        "sum",
        "mean",
        "amax",
        "amin",
        "argmax",
        "argmin",
    ),
    *("cumsum", "cumprod", "logsumexp", "norm", "var", "std", "prod", "any", "all", "squeeze", "unsqueeze", "flatten", "cat"),
)


class _OnRank(str):
    """An argument that one rank alone is given, as text."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def add_arguments(made: tuple[Call, Call], ran: tuple[Sequence[tuple[int, Call]], Sequence[tuple[int, Call]]]) -> None:
    """Put the plain arguments of what ranks ran into the calls of the whole. ran: (rank, call) of either side.

    Where a rank is given another than the other side, that one counts.
    """
    arguments = [[(rank, _arguments(call)) for rank, call in of_side] for of_side in ran]
    for call, of_side, others in zip(made, arguments, reversed(arguments), strict=True):
        for key in dict.fromkeys(key for _, one in of_side for key in one):
            expected = others[0][1].get(key)
            rank, item = next(
                ((rank, one[key]) for rank, one in of_side if key in one and one[key] != expected), (-1, expected)
            )
            alike = all(one.get(key) == item for _, one in of_side)
            _put(call, key, item if alike else _OnRank(f"{item!r} on rank {rank}"))


def _arguments(call: Call) -> dict[tuple[str, str], Any]:
    """Return (side, place or keyword) → plain argument."""
    by_place = call.args if isinstance(call.args, list) else []
    by_name = call.kwargs if isinstance(call.kwargs, dict) else {}
    dims = call.name.rpartition(".")[2].rstrip("_") in _BY_DIMENSIONS
    found = {("args", str(i)): item for i, item in enumerate(by_place) if _is_kept(item, dims)}
    return found | {("kwargs", name): item for name, item in by_name.items() if _is_kept(item, name in _DIMENSIONS)}


def _is_kept(item: Any, dims: bool) -> bool:
    if isinstance(item, (bool, float, str)):
        return True
    whole = [item] if isinstance(item, int) else item if isinstance(item, list) else []
    return dims and bool(whole) and all(type(each) is int for each in whole)


def _put(call: Call, key: tuple[str, str], item: Any) -> None:
    side, name = key
    tree = getattr(call, side)
    tree = tree if isinstance(tree, dict) else {}
    tree.setdefault(name, item)
    setattr(call, side, tree)
