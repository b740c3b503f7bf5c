"""Compares distributions, what stands beside them, and the training code."""

from __future__ import annotations

from typing import Any

from trainprobe.config_check.compare.code import code_finding, code_rows, without_packages
from trainprobe.config_check.compare.pair import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.verdicts import LEVELS, Check, Level, PackFinding, which_ranks
from trainprobe.config_check.names import load_names
from trainprobe.config_check.pack import Pack

COLUMNS = ("package", "bench", "cmp", "kind", "level")
_COMMIT = "commit of the training code"
_ABSENT = "(not installed)"
_UNKNOWN = "(not known: no git repository)"
_LEVEL: dict[str, Level] = {"numeric": "error", "platform": "warning", "other": "warning", "tooling": "note"}
_ORDER = ("numeric", "platform", "code", "other", "tooling")
_MOST_REPORTED = 6


def compare_packages(bench: Pack, cmp: Pack) -> Check:
    """Compare versions as texts: a build tag is part of a version."""
    if (early := absent("packages", COLUMNS, bench, cmp)) is not None:
        return early
    pairs = list(rank_pairs(bench, cmp, "packages"))
    ranks = [rank for rank, _, _ in pairs]
    different: dict[tuple[str, str, str, str], list[int]] = {}
    code: dict[tuple[str, str, str, str], list[int]] = {}
    for rank, a, b in pairs:
        left, right = a.single["packages"], b.single["packages"]
        differences = _differences(left, right)
        for row in differences:
            different.setdefault(row, []).append(rank)
        known = [name for kind, name, *_ in differences if kind == "numeric"]  # and not a program's own, installed editable
        for row in without_packages(code_rows(left, right), known):
            code.setdefault(row, []).append(rank)
    rows: list[tuple[Any, ...]] = []
    findings = rank_findings("packages", bench, cmp)
    for (kind, name, left, right), where in sorted(different.items(), key=lambda item: (_ORDER.index(item[0][0]), item[0][1])):
        hashed = name == _COMMIT and all(r.single["packages"].get("sources") for _, *sides in pairs for r in sides)
        level = "note" if hashed else _LEVEL.get(kind, "warning")  # the hashes of the sources say it better
        rows.append((name, left, right, kind, level))
        findings.append(PackFinding(level, f"{name} differs: {left} and {right}{which_ranks(where, ranks)}", f"package {name}"))
    findings = _shortened(findings)
    if code:
        rows += [(name, left, right, kind, "warning") for kind, name, left, right in code]
        where = which_ranks(sorted({r for rs in code.values() for r in rs}), ranks)
        findings = (*findings, code_finding([row[1:] for row in code], where))
    return Check("packages", COLUMNS, rows, findings)


def _shortened(findings: list[PackFinding]) -> tuple[PackFinding, ...]:
    """Say the first few and count the rest."""
    reported, rest = findings[:_MOST_REPORTED], findings[_MOST_REPORTED:]
    if rest:
        worst = max(rest, key=lambda f: LEVELS.index(f.level))
        reported.append(PackFinding(worst.level, f"{len(rest)} more packages differ", "packages"))
    return tuple(reported)


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    names = load_names()
    left, right = dict(a.get("distributions", {})), dict(b.get("distributions", {}))
    found = [(names.package_kind(n), n, *versions) for n, versions in _unequal(left, right, _ABSENT)]
    left, right = dict(a.get("platform", {})), dict(b.get("platform", {}))
    if left and right:
        found += [("platform", name, *texts) for name, texts in _unequal(left, right, "(none)")]
    mine, theirs = _code(a), _code(b)
    if "code" in a and "code" in b and mine != theirs:
        found.append(("code", _COMMIT, mine or _UNKNOWN, theirs or _UNKNOWN))
    return found


def _unequal(left: dict[str, str], right: dict[str, str], absent_text: str) -> list[tuple[str, tuple[str, str]]]:
    names = sorted(left.keys() | right.keys())
    return [(n, (left.get(n, absent_text), right.get(n, absent_text))) for n in names if left.get(n) != right.get(n)]


def _code(content: dict[str, Any]) -> str:
    code = content.get("code") or {}
    changes = f" with uncommitted changes {code.get('changes', '')}".rstrip() if code.get("dirty") else ""
    return f"{str(code['commit'])[:12]}{changes}" if code.get("commit") else ""
