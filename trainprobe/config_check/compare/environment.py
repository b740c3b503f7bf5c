"""Compares environment variables: by the table, by the name on the other device, across ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.config_check.capture.environment import OWN, effect_of, what_it_does
from trainprobe.config_check.compare.pair import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.values import same
from trainprobe.config_check.compare.verdicts import LEVELS, Check, Level, PackFinding, shown, which_ranks
from trainprobe.config_check.names import load_names
from trainprobe.config_check.pack import Pack

COLUMNS = ("variable", "bench", "cmp", "what it does", "ranks", "level")
_LEVEL: dict[str, Level] = {"numbers": "error", "rounding": "warning", "speed": "warning", "place": "note"}
_UNSET = "(not set)"
_MOST_NAMED = 5
# beginnings of variables that a library sets for itself → the packages whose other version may set others
_SET_BY = {
    "CUBLAS_WORKSPACE_CONFIG": ("flag deterministic_algorithms",),
    "ACCELERATE_": ("package accelerate", "package transformers"),
}


def compare_environment(bench: Pack, cmp: Pack) -> Check:
    """Compare the variables of the table; of all others only names are known: those that one side lacks are one note."""
    if (early := absent("environment", COLUMNS, bench, cmp)) is not None:
        return early
    different: dict[tuple[str, str, str], list[int]] = {}
    others: set[str] = set()
    ranks: list[int] = []
    for rank, a, b in rank_pairs(bench, cmp, "environment"):
        ranks.append(rank)
        mine, theirs = _by_name(a.single["environment"]), _by_name(b.single["environment"])
        for name in sorted(mine.keys() | theirs.keys()):
            left, right = mine.get(name, (name, _UNSET)), theirs.get(name, (name, _UNSET))
            if not same(left[1], right[1]):
                label = left[0] if name in mine else right[0]
                different.setdefault((label, left[1], right[1]), []).append(rank)
        others |= _differing_others(a.single["environment"], b.single["environment"])
    rows: list[tuple[Any, ...]] = []
    findings = rank_findings("environment", bench, cmp)
    for (name, left, right), where in different.items():
        effect = effect_of(name) or "place"
        level, kind = _LEVEL[effect], "speed variable" if effect == "speed" else "variable"
        rows.append((name, left, right, what_it_does(name), _rank_text(where, ranks), level))
        text = f"{name} differs: {shown(left)} and {shown(right)}{which_ranks(where, ranks)}"
        findings.append(PackFinding(level, text, f"{kind} {name}", _setters(name) if _UNSET in (left, right) else ()))
    rows += [(name, "(not kept)", "(not kept)", "not in the table of variables", "", "note") for name in sorted(others)]
    findings += [_others_finding(sorted(others))] if others else []
    findings.sort(key=lambda f: -LEVELS.index(f.level))
    return Check("environment", COLUMNS, rows, tuple(findings))


def _setters(name: str) -> tuple[str, ...]:
    return next((packages for beginning, packages in _SET_BY.items() if name.startswith(beginning)), ())


def _by_name(content: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Return comparable name → (name as it is, value)."""
    names = load_names()
    return {names.variable(n)[0]: (n, str(v)) for n, v in dict(content.get("variables", {})).items()}


def _differing_others(a: Mapping[str, Any], b: Mapping[str, Any]) -> set[str]:
    left, right = dict(a.get("others", {})), dict(b.get("others", {}))
    names = load_names()
    unequal = {name for name in left.keys() | right.keys() if left.get(name) != right.get(name)}
    unequal -= {name for name in left.keys() & right.keys() if "" in (left[name], right[name])}  # packs of this release
    return {name for name in unequal if not name.startswith(OWN) and not names.is_variable_of_place(name)}


def _others_finding(others: list[str]) -> PackFinding:
    """Name the variables that the table does not know; a program may read them."""
    rest = f" and {len(others) - _MOST_NAMED} more" if len(others) > _MOST_NAMED else ""
    verb = "variable differs" if len(others) == 1 else "variables differ"
    text = f"{len(others)} other {verb}: {', '.join(others[:_MOST_NAMED])}{rest}"
    return PackFinding("note", text, "variables", suspect=True)


def _rank_text(where: list[int], ranks: list[int]) -> str:
    return which_ranks(where, ranks).removeprefix(" on ") or ("all" if len(ranks) > 1 else str(ranks[0]))
