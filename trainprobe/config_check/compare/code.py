"""Compares the sources of two programs, function by function, by hashes that layout and comments do not change."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from trainprobe.config_check.compare.headline import CODE
from trainprobe.config_check.compare.pair import BENCH, CMP
from trainprobe.config_check.compare.verdicts import PackFinding

Functions = Mapping[str, str]
_TOP = "(top level)"
_MOST_REPORTED = 3
# other findings that say themselves what in the code differs
EXPLAINED_BY = (
    *("setting ", "key ", "lone ", "source ", "flag ", "model", "optimizer", "rates", "random seed", "requires_grad"),
    *("mode", "hooks", "methods", "compile", "step schedule"),
)


def code_rows(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str, str]]:
    """Return ("code", "function in file", hash or absence on each side) of all that differs; [] where a side has no sources."""
    left, right = a.get("sources"), b.get("sources")
    if not left or not right:
        return []
    return [("code", name, x, y) for name, x, y in _differing(dict(left), dict(right))]


def without_packages(rows: list[tuple[str, str, str, str]], names: Iterable[str]) -> list[tuple[str, str, str, str]]:
    """Leave out rows of the sources of packages that differ by their versions, which says it all.

    A distribution is named as its folder is, or longer: `megatron-core` is imported from `megatron`.
    """
    packages = tuple(f"{re.sub(r'[-_.]+', '_', name).lower()}_" for name in names)
    return [row for row in rows if not any(p.startswith(f"{_folder(row[1])}_") for p in packages)]


def _folder(name: str) -> str:
    """Return the first folder of the file in `function in folder/file.py`."""
    return name.rpartition(" in ")[2].partition("/")[0].lower()


def _differing(left: dict[str, Functions], right: dict[str, Functions]) -> Iterator[tuple[str, str, str]]:
    for file, other in _pairs(left, right):
        mine, theirs = left.get(file or "", {}), right.get(other or "", {})
        if file is None or other is None:
            yield f"{file or other}", "(loaded)" if file else "(not loaded)", "(loaded)" if other else "(not loaded)"
            continue
        for name in [*mine, *(n for n in theirs if n not in mine)]:
            x, y = mine.get(name, "(none)"), theirs.get(name, "(none)")
            if x != y:
                yield f"{name} in {file}", x, y


def _pairs(left: dict[str, Functions], right: dict[str, Functions]) -> list[tuple[str | None, str | None]]:
    """Pair files by name, then by equal content, then the two scripts, which may be called something else."""
    pairs: list[tuple[str | None, str | None]] = [(n, n) for n in left if n in right]
    only_a, only_b = [n for n in left if n not in right], [n for n in right if n not in left]
    scripts = next(iter(left)), next(iter(right))
    for name in list(only_a):
        other = next((n for n in only_b if right[n] == left[name]), None)
        if other is None and name == scripts[0] and scripts[1] in only_b:
            other = scripts[1]
        if other is not None:
            pairs.append((name, other))
            only_a.remove(name)
            only_b.remove(other)
    return [*pairs, *((n, None) for n in only_a), *((None, n) for n in only_b)]


def code_finding(rows: list[tuple[str, str, str]], where: str) -> PackFinding:
    """Return the one finding that names what differs. rows: name and both sides. where: the ranks, as a text."""
    names = [_words(*row) for row in rows]
    rest = f" and {len(names) - _MOST_REPORTED} more places" if len(names) > _MOST_REPORTED + 1 else ""
    reported = names[: _MOST_REPORTED if rest else None]
    return PackFinding("warning", f"the code differs: {', '.join(reported)}{rest}{where}", CODE, EXPLAINED_BY)


def _words(name: str, left: str, right: str) -> str:
    if "(not loaded)" in (left, right):
        return f"{name}, loaded only in {BENCH if left == '(loaded)' else CMP}"
    return name.replace(f"{_TOP} in ", "top level of ").replace("(bytes) in ", "")
