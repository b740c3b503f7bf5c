"""Compares random calls by function, place in the program and count; seeds; generator states; determinism flags.

The place is the call stack of the program alone: what started it (`python -m`, a launcher that runs a path) is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainprobe.config_check.compare.sides import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.values import same
from trainprobe.config_check.compare.verdicts import Check, Finding, counted, shown, which_ranks
from trainprobe.config_check.names import load_names
from trainprobe.config_check.pack import Pack

COLUMNS = ("what", "rank", "bench", "cmp", "bench place", "cmp place", "level")
_SEEDS = ("seed", "manual_seed", "manual_seed_all", "default_rng", "set_seed")
_NUMBERS = frozenset(
    {"deterministic_algorithms", "default_dtype", "float32_matmul_precision", "cudnn.deterministic", "python_optimize"}
)
_RUNPY = frozenset({"<frozen runpy>", "runpy.py"})
_ANY_CAUSE = ("random seed", "setting seed", "random calls", "model", "setting hidden_dropout", "setting attention_dropout")


@dataclass(frozen=True, slots=True)
class _Call:
    """One kind of call: what was called, how, and where; frames innermost first as (file, function, source)."""

    function: str
    detail: str
    frames: tuple[tuple[str, str, str], ...]
    line: int


Counts = dict[_Call, dict[int, int]]


def compare_randomness(bench: Pack, cmp: Pack) -> Check:
    """Compare all that random numbers depend on."""
    if (early := absent("randomness", COLUMNS, bench, cmp)) is not None:
        return early
    pairs = list(rank_pairs(bench, cmp, "randomness"))
    ranks = [rank for rank, _, _ in pairs]
    told: dict[Finding, list[int]] = {}
    rows: list[tuple[Any, ...]] = []
    for rank, a, b in pairs:
        left, right = a.single["randomness"], b.single["randomness"]
        windows = _common_windows(left, right)
        found = _flags(rank, left, right, rows)
        found += _calls(rank, _counts(left, windows), _counts(right, windows), rows)
        if bench.world_size == cmp.world_size:  # with fewer samples a rank draws fewer numbers
            found += _states(rank, left, right, rows)
        for finding in found:
            told.setdefault(finding, []).append(rank)
    findings = rank_findings("randomness", bench, cmp)
    for f, where in told.items():
        findings.append(Finding(f.level, f"{f.text}{which_ranks(where, ranks)}", f.topic, f.explained_by))
    findings.sort(key=lambda f: (("error", "warning", "note").index(f.level), f.topic != "random seed"))
    return Check("randomness", COLUMNS, rows, tuple(findings))


def _common_windows(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Return the last window that both sides captured in full: that of a program's last micro-step may be cut short."""
    last = [max((int(m) for m in side.get("states", {})), default=10**9) for side in (a, b)]
    return min(last) if last[0] != last[1] else last[0] + 1


def _counts(content: Mapping[str, Any], windows: int) -> Counts:
    whole = [_of_program(stack) for stack in content.get("stacks", [])]
    stacks = [tuple(_frame(f) for f in stack) for stack in whole]
    lines = [int(stack[_own(stack)].get("line") or 0) if stack else 0 for stack in whole]
    functions = load_names().random_functions
    counts: Counts = {}
    for call in content.get("calls", []):
        window = int(call.get("window", -1))
        if window >= windows:
            continue
        number = int(call.get("stack", -1))
        frames, line = (stacks[number], lines[number]) if 0 <= number < len(stacks) else ((), 0)
        function = str(call.get("function"))
        kind = _Call(functions.get(function, function), str(call.get("detail", "")), frames, line)
        counts.setdefault(kind, {})
        counts[kind][window] = counts[kind].get(window, 0) + int(call.get("count", 1))
    return counts


def _of_program(stack: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the frames within the innermost one of `runpy`, through which Python and launchers run a module or a path."""
    return next((stack[:i] for i, frame in enumerate(stack) if i and frame.get("file") in _RUNPY), stack)


def _frame(frame: Mapping[str, Any]) -> tuple[str, str, str]:
    file = str(frame.get("file", ""))
    return (
        file if frame.get("installed") else file.rsplit("/", 1)[-1],
        str(frame.get("function", "")),
        str(frame.get("source", "")),
    )


def _is_own(frame: tuple[str, str, str]) -> bool:
    """Tell whether a frame is the program's own and not that of something installed."""
    return "/" not in frame[0] and not frame[0].startswith("<")


def _own(stack: Sequence[Mapping[str, Any]]) -> int:
    """Return the index of the innermost frame of the program itself, or of the innermost frame where there is none."""
    return next((i for i, f in enumerate(stack) if not f.get("installed")), 0)


def _calls(rank: int, a: Counts, b: Counts, rows: list[tuple[Any, ...]]) -> list[Finding]:
    found: list[Finding] = []
    for left, right in _matched(a, b):
        x, y = a.get(left, {}) if left else {}, b.get(right, {}) if right else {}
        kind = left or right
        assert kind is not None
        equal = x == y and left is not None and right is not None and left.detail == right.detail
        # whether a module is imported anew says nothing; what that does to the generators shows in their states
        importing = any(f[0].startswith("<frozen importlib") for f in kind.frames)
        level = "pass" if equal else "note" if importing else "error"
        rows.append((kind.function, rank, _count_text(left, x), _count_text(right, y), _place(left), _place(right), level))
        if equal:
            continue
        if importing:
            found.append(Finding("note", f"{kind.function} was called while modules were imported, on one side", "imports"))
        elif left and right and left.detail != right.detail:
            found.append(_other_detail(left, right))
        else:
            found.append(_other_count(kind, x, y))
    return _few(found)


def _is_seed(call: _Call) -> bool:
    return call.function.rsplit(".", 1)[-1] in _SEEDS


def _other_detail(left: _Call, right: _Call) -> Finding:
    """Word calls in the same place that were made with other values."""
    if _is_seed(left):
        text = f"seed of {left.function} differs: {left.detail} and {right.detail}, at {_place(right)}"
        return Finding("error", text, "random seed", ("setting seed", "setting data_seed"))
    text = f"{_short(left.function)} {left.detail} and {right.detail} at {_place(right)}"
    return Finding("error", text, "random calls", ("model", "setting hidden_dropout", "setting attention_dropout"))


def _other_count(call: _Call, x: Mapping[int, int], y: Mapping[int, int]) -> Finding:
    """Word calls that were made another number of times, or on one side only."""
    when = next((w for w in sorted(x.keys() | y.keys()) if x.get(w) != y.get(w)), -1)
    where = "before the first micro-step" if when < 0 else f"first in micro-step {when}"
    times = f"{counted(sum(x.values()), 'time')} and {counted(sum(y.values()), 'time')}"
    text = f"{f'{_short(call.function)} {call.detail}'.rstrip()} is called {times}, {where}, at {_place(call)}"
    topic, explained_by = ("random seed", ("setting seed",)) if _is_seed(call) else ("random calls", ("model",))
    return Finding("error", text, topic, explained_by)


def _few(found: list[Finding]) -> list[Finding]:
    """Say the first three of calls that differ, and count the rest."""
    calls = [f for f in found if f.topic == "random calls"]
    if len(calls) <= 3:
        return found
    rest = Finding("error", f"{len(calls) - 2} more random calls differ", "random calls", calls[0].explained_by)
    return [f for f in found if f not in calls[2:]] + [rest]


def _matched(a: Counts, b: Counts) -> list[tuple[_Call | None, _Call | None]]:
    """Pair calls: equal ones, then those that differ in detail, then those whose stacks are alike."""
    rest_a, rest_b = list(a), list(b)
    pairs: list[tuple[_Call | None, _Call | None]] = []
    same_key = {(c.function, c.detail, c.frames): c for c in rest_b}
    for call in list(rest_a):
        other = same_key.pop((call.function, call.detail, call.frames), None)
        if other is not None:
            pairs.append((call, other))
            rest_a.remove(call)
            rest_b.remove(other)
    for alike in (_same_place, _same_own_place, _similar):
        for call in list(rest_a):
            other = next((o for o in rest_b if alike(call, o)), None)
            if other is not None:
                pairs.append((call, other))
                rest_a.remove(call)
                rest_b.remove(other)
    return pairs + [(c, None) for c in rest_a] + [(None, c) for c in rest_b]


def _same_place(a: _Call, b: _Call) -> bool:
    return a.function == b.function and a.frames == b.frames


def _same_own_place(a: _Call, b: _Call) -> bool:
    """Tell whether the program's own frames are the same, as inside another wrapper or framework version."""
    own = [tuple(f for f in call.frames if _is_own(f)) for call in (a, b)]
    return a.function == b.function and a.detail == b.detail and bool(own[0]) and own[0] == own[1]


def _similar(a: _Call, b: _Call) -> bool:
    """Tell whether two stacks are the same place in a program that was edited: nine tenths of function names alike."""
    if a.function != b.function:
        return False
    if _is_seed(a) and (a.frames[:1] or b.frames[:1]) and a.frames[0][:2] == b.frames[0][:2]:
        return True
    left, right = [f[:2] for f in a.frames], [f[:2] for f in b.frames]
    sources = [f[2] for f in a.frames], [f[2] for f in b.frames]
    alike = difflib.SequenceMatcher(None, sources[0], sources[1], autojunk=False).ratio()
    return left == right and alike >= 0.5 and a.detail == b.detail


def _count_text(call: _Call | None, counts: Mapping[int, int]) -> str:
    if call is None:
        return "(not called)"
    windows = ", ".join(f"{'setup' if w < 0 else f'micro-step {w}'}: {n}" for w, n in sorted(counts.items()))
    return f"{call.detail + ' ' if call.detail else ''}{sum(counts.values())} × ({windows})"


def _place(call: _Call | None) -> str:
    """Return `model.py:31 in Block.forward` of the innermost frame of the program itself."""
    if call is None or not call.frames:
        return "an unknown place"
    own = next((f for f in call.frames if _is_own(f)), call.frames[0])
    return f"{own[0]}:{call.line} in {own[1]}" if call.line else f"{own[0]} in {own[1]}"


def _short(function: str) -> str:
    return function.removeprefix("torch.nn.functional.").removeprefix("torch.")


def _flags(rank: int, a: Mapping[str, Any], b: Mapping[str, Any], rows: list[tuple[Any, ...]]) -> list[Finding]:
    left, right = dict(a.get("flags", {})), dict(b.get("flags", {}))
    found: list[Finding] = []
    for name in [*left, *(n for n in right if n not in left)] if left and right else ():
        x, y = left.get(name), right.get(name)
        equal = same(x, y)
        level = "error" if name in _NUMBERS or name == "initial_seed" else "warning"
        rows.append((f"flag {name}", rank, shown(x), shown(y), "", "", "pass" if equal else level))
        if equal:
            continue
        if name == "initial_seed":
            text = f"seed of torch differs: {shown(x)} and {shown(y)}"
            found.append(Finding("error", text, "random seed", ("setting seed", "random calls")))
        else:
            text = f"{name.replace('_', ' ')} differs: {shown(x)} and {shown(y)}"
            explained = ("variable OMP_NUM_THREADS", "variable MKL") if name == "threads" else ()
            found.append(Finding(level, text, f"flag {name}", explained))
    return found


_CALLS = {"python": "random", "numpy": "numpy.random"}  # where the functions of the hidden global generators are


def _called(module: str, content: Mapping[str, Any]) -> bool:
    """Tell whether a function of the global generator was called; methods of other generators stand a level deeper."""
    return any(str(call.get("function")).rpartition(".")[0] == module for call in content.get("calls", []))


def _states(rank: int, a: Mapping[str, Any], b: Mapping[str, Any], rows: list[tuple[Any, ...]]) -> list[Finding]:
    left, right = a.get("states", {}), b.get("states", {})
    first: dict[str, str] = {}
    for micro in sorted(left.keys() & right.keys(), key=int):
        for name in sorted(left[micro].keys() | right[micro].keys()):
            x, y = left[micro].get(name, "(none)"), right[micro].get(name, "(none)")
            rows.append((f"state of {name} at micro-step {micro}", rank, x, y, "", "", "pass" if x == y else "error"))
            if x != y:
                first.setdefault(name, micro)
    idle = [n for n in first if n in _CALLS and not _called(_CALLS[n], a) and not _called(_CALLS[n], b)]
    found: list[Finding] = []
    if idle:
        found.append(
            Finding("note", f"{' and '.join(idle)} random numbers were never seeded, and never drawn", "unused random state")
        )
    for micro in sorted({m for n, m in first.items() if n not in idle}, key=int):
        names = [n for n, m in first.items() if m == micro and n not in idle]
        text = f"random state of {' and '.join(names)} differs from micro-step {micro} on"
        found.append(Finding("error", text, "random state", (*_ANY_CAUSE, "dataset")))
    return found
