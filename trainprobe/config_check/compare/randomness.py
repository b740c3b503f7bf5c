"""Compares random calls by function, place in the program and count; seeds; generator states; determinism flags.

The place is the call stack of the program alone: what started it (`python -m`, a launcher that runs a path) is left out.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainprobe.config_check.capture.switch_table import switches
from trainprobe.config_check.compare.pair import absent, rank_findings, rank_pairs
from trainprobe.config_check.compare.values import same
from trainprobe.config_check.compare.verdicts import LEVELS, Check, Level, PackFinding, shown, which_ranks
from trainprobe.config_check.names import load_names
from trainprobe.config_check.pack import AT_FIRST_LAYER, AT_MODEL, Pack
from trainprobe.engine.core.words import counted

COLUMNS = ("what", "rank", "bench", "cmp", "bench place", "cmp place", "level")
_SEEDS = ("seed", "manual_seed", "manual_seed_all", "default_rng", "set_seed")
_SHUFFLES = frozenset({"shuffle", "permutation", "permuted", "randperm", "sample", "choice", "choices"})
_COUNTED = ("random calls", "random counts")
_GENERATOR = "torch.Generator."
OWN_GENERATOR = "from a generator of its own"  # the detail of calls that do not draw from a global generator
_NEVER = 10**9  # a window that no capture reaches
_IMPORT = "<frozen importlib"
_RUNPY = frozenset({"<frozen runpy>", "runpy.py"})
# torch calls a module in one function or in two, as there are hooks or not, those of the capture among them
_CALLS_MODULES = "torch/nn/modules/module.py"
# settings of data loading, which decide how many numbers are drawn for it
_LOADING = (
    *("setting micro_batch_size", "setting drop_last", "setting data_workers", "setting shuffle", "setting samples"),
    *("key generator", "key sampler", "key batch_sampler", "key dataset", "source loader"),
)
_ANY_CAUSE = (
    *("random seed", "generator seed", "setting seed", "random calls", "random counts", "model", "setting hidden_dropout"),
    *("setting attention_dropout", *_LOADING, "compile", "mode", "methods", "hooks", "code"),
)
_LEVEL: dict[str, Level] = {"numbers": "error", "rounding": "warning"}


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
    if bench.origin != cmp.origin:
        other = next(pack.origin for pack in (bench, cmp) if pack.origin != "trainprobe")
        text = f"randomness: not compared, as {other} counts fewer functions, over another time, and holds no seeds and states"
        return Check("randomness", COLUMNS, findings=(PackFinding("note", text, "randomness of another tool"),), compared=False)
    pairs = list(rank_pairs(bench, cmp, "randomness"))
    ranks = [rank for rank, _, _ in pairs]
    ranks_of: dict[PackFinding, list[int]] = {}
    rows: list[tuple[Any, ...]] = []
    for rank, a, b in pairs:
        left, right = a.single["randomness"], b.single["randomness"]
        windows = _common_windows(left, right)
        found = _flags(rank, left, right, rows)
        found += _calls(
            rank, _counts(left, windows), _counts(right, windows), rows, (_counted_until(left), _counted_until(right))
        )
        if bench.world_size == cmp.world_size:  # with fewer samples a rank draws fewer numbers
            found += _states(rank, left, right, rows)
        for finding in found:
            ranks_of.setdefault(finding, []).append(rank)
    findings = rank_findings("randomness", bench, cmp)
    for f, where in ranks_of.items():
        findings.append(PackFinding(f.level, f"{f.text}{which_ranks(where, ranks)}", f.topic, f.explained_by))
    findings.sort(key=lambda f: (-LEVELS.index(f.level), not f.topic.startswith("random seed")))
    return Check("randomness", COLUMNS, rows, tuple(findings))


def _common_windows(a: Mapping[str, Any], b: Mapping[str, Any]) -> int:
    """Return the last window that both sides captured in full: that of a program's last micro-step may be cut short."""
    last = [max((int(m) for m in side.get("states", {})), default=10**9) for side in (a, b)]
    return min(last) if last[0] != last[1] else last[0] + 1


def _counts(content: Mapping[str, Any], windows: int) -> Counts:
    whole = [_of_program(stack) for stack in content.get("stacks", [])]
    stacks = [tuple(_frame(f) for f in stack if f.get("file") != _CALLS_MODULES) for stack in whole]
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
        detail = str(call.get("detail", ""))
        if function.startswith(_GENERATOR) and not (frames and _is_own(frames[0])):
            detail = ""  # a library draws such seeds from another generator
        kind = _Call(functions.get(function, function), detail, frames, line)
        counts.setdefault(kind, {})
        counts[kind][window] = counts[kind].get(window, 0) + int(call.get("count", 1))
    return counts


def _counted_until(content: Mapping[str, Any]) -> int:
    """Return the first window whose calls may be missing because the program compiled."""
    until = content.get("counted_until")
    return int(until) if until is not None else _NEVER


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


def _calls(rank: int, a: Counts, b: Counts, rows: list[tuple[Any, ...]], until: tuple[int, int]) -> list[PackFinding]:
    found: list[PackFinding] = []
    for left, right in _matched(a, b):
        x, y = a.get(left, {}) if left else {}, b.get(right, {}) if right else {}
        kind = left or right
        assert kind is not None
        equal = x == y and left is not None and right is not None and left.detail == right.detail
        other_detail = left is not None and right is not None and left.detail != right.detail
        # whether a module is imported anew says nothing; what that does to the generators shows in their states
        importing = any(f[0].startswith(_IMPORT) for f in kind.frames)
        unseen = not other_detail and _not_counted(x, y, until)
        ahead = kind.detail == OWN_GENERATOR and bool(x and y)
        level = "pass" if equal else "note" if importing or unseen or ahead else "error"
        rows.append((kind.function, rank, _count_text(left, x), _count_text(right, y), _place(left), _place(right), level))
        if equal or unseen:
            continue
        if importing:
            found.append(PackFinding("note", f"{kind.function} was called while modules were imported, on one side", "imports"))
        elif left and right and other_detail:
            found.append(_other_detail(left, right))
        else:
            found.append(_other_count(kind, x, y))
    return _few(found)


def _not_counted(x: Mapping[int, int], y: Mapping[int, int], until: tuple[int, int]) -> bool:
    """Tell whether calls are missing only where a side had stopped to count."""
    return all(
        (w >= until[0] and x.get(w, 0) <= y.get(w, 0)) or (w >= until[1] and y.get(w, 0) <= x.get(w, 0))
        for w in x.keys() | y.keys()
        if x.get(w) != y.get(w)
    )


def _is_seed(call: _Call) -> bool:
    return call.function.rsplit(".", 1)[-1] in _SEEDS


def _other_detail(left: _Call, right: _Call) -> PackFinding:
    """Word calls in the same place that were made with other values."""
    if _is_seed(left):
        text = f"seed of {left.function} differs: {left.detail} and {right.detail}, at {_place(right)}"
        topic = "generator seed" if left.function.startswith(_GENERATOR) else "random seed"
        return PackFinding(
            "error", text, topic, ("setting seed", "setting data_seed", *(("random seed",) if topic[0] == "g" else ()))
        )
    details = " and ".join(call.detail or "from the global generator" for call in (left, right))
    text = f"{_short(left.function)} differs: {details}, at {_place(right)}"
    return PackFinding(
        "error", text, "random calls", (*_LOADING, "model", "setting hidden_dropout", "setting attention_dropout")
    )


def _other_count(call: _Call, x: Mapping[int, int], y: Mapping[int, int]) -> PackFinding:
    """Word calls that were made another number of times, or on one side only."""
    when = next((w for w in sorted(x.keys() | y.keys()) if x.get(w) != y.get(w)), -1)
    total_a, total_b = sum(x.values()), sum(y.values())
    where = "before the first micro-step" if when < 0 else f"first in micro-step {when}"
    if total_a == total_b:
        total_a, total_b = x.get(when, 0), y.get(when, 0)
        where = where.replace("first in", "in")
    times = f"{counted(total_a, 'time')} and {counted(total_b, 'time')}"
    text = f"{f'{_short(call.function)} {call.detail}'.rstrip()} is called {times}, {where}, at {_place(call)}"
    if _is_seed(call) and not call.function.startswith(_GENERATOR):
        return PackFinding("error", text, "random seed missing", ("setting seed",))
    if x and y and call.detail == OWN_GENERATOR:  # a loader with workers draws ahead
        return PackFinding("note", text, "random counts", ("",), suspect=True)
    if x and y:  # how often both sides call it follows from whatever else differs
        return PackFinding("error", text, "random counts", ("",))
    if call.function.rsplit(".", 1)[-1] in _SHUFFLES:
        return PackFinding("error", text, "random calls", (*_LOADING, "dataset order", "model", "mode"))
    return PackFinding("error", text, "random calls", (*_LOADING, "model", "mode", "methods"))


def _few(found: list[PackFinding]) -> list[PackFinding]:
    """Say the first three of calls that differ, and count the rest."""
    few: list[PackFinding] = [f for f in found if f.topic not in _COUNTED]
    for topic in _COUNTED:
        calls = [f for f in found if f.topic == topic]
        few += calls if len(calls) <= 3 else calls[:2]
        if len(calls) > 3:
            few.append(PackFinding("error", f"{len(calls) - 2} more random calls differ", topic, calls[0].explained_by))
    return few


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
    for fits in (_same_place, _same_own_place, _similar, _similar_place):
        for call in list(rest_a):
            other = next((o for o in rest_b if fits(call, o)), None)
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
    return a.detail == b.detail and _similar_place(a, b)


def _similar_place(a: _Call, b: _Call) -> bool:
    """Tell whether two calls of a function are in the same functions, on lines of which at least half is alike."""
    if a.function != b.function:
        return False
    left, right = [f[:2] for f in a.frames], [f[:2] for f in b.frames]
    sources = [f[2] for f in a.frames], [f[2] for f in b.frames]
    similarity = difflib.SequenceMatcher(None, sources[0], sources[1], autojunk=False).ratio()
    return left == right and similarity >= 0.5


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


def _flags(rank: int, a: Mapping[str, Any], b: Mapping[str, Any], rows: list[tuple[Any, ...]]) -> list[PackFinding]:
    left, right = dict(a.get("flags", {})), dict(b.get("flags", {}))
    elsewhere = _read_elsewhere(a, b)
    found: list[PackFinding] = []
    for name in [n for n in left if n in right]:  # another version of torch, or of this tool, has others
        x, y = left[name], right[name]
        row = switches().get(name, {})
        equal = same(x, y)
        level = _LEVEL.get(row.get("effect", ""), "warning")
        if elsewhere and "around" in row and not equal:
            rows.append((f"flag {name}", rank, shown(x), shown(y), "", "", "note"))
            found.append(PackFinding("note", f"{name} was captured {elsewhere}: not compared", f"flag {name}"))
            continue
        rows.append((f"flag {name}", rank, shown(x), shown(y), "", "", "pass" if equal else level))
        if equal:
            continue
        if name == "initial_seed":
            text = f"seed of torch differs: {shown(x)} and {shown(y)}"
            found.append(PackFinding("error", text, "random seed", ("setting seed", "random calls", "random seed missing")))
        else:
            text = f"{name if '.' in name else name.replace('_', ' ')} differs: {shown(x)} and {shown(y)}"
            explained = ("variable OMP_NUM_THREADS", "variable MKL") if name == "threads" else ()
            explained = (*explained, f"flag {row['follows']}") if "follows" in row else explained
            explained = (*explained, "mode") if name == "autocast" else explained  # there was no forward in training mode
            found.append(PackFinding(level, text, f"flag {name}", explained))
    return found


def _read_elsewhere(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Say which side's switches were read before a wrapper could set them for the forward, where only one side's were."""
    early = [side for side, content in (("bench", a), ("cmp", b)) if content.get("flags_at", AT_MODEL) != AT_FIRST_LAYER]
    if len(early) != 1:
        return ""
    older = "flags_at" not in (a if early == ["bench"] else b)
    return f"{'by an older version ' if older else ''}before the first layer in {early[0]}"


_CALLS = {"python": "random", "numpy": "numpy.random"}  # where the functions of the hidden global generators are


def _drawn(module: str, content: Mapping[str, Any]) -> bool:
    """Tell whether the program called a function of the global generator; methods of other generators stand a level deeper.

    Draws of installed modules that are just imported are not the program's (rich draws one number for its links).
    """
    stacks = content.get("stacks", [])
    calls = [c for c in content.get("calls", []) if str(c.get("function")).rpartition(".")[0] == module]
    return any(not _of_installed_import(stacks[c["stack"]] if 0 <= c.get("stack", -1) < len(stacks) else ()) for c in calls)


def _of_installed_import(stack: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether an installed module is executed as it is imported, and nothing of the program within."""
    within = next((i for i, frame in enumerate(stack) if str(frame.get("file")).startswith(_IMPORT)), None)
    return within is not None and within > 0 and all(frame.get("installed") for frame in stack[:within])


def _states(rank: int, a: Mapping[str, Any], b: Mapping[str, Any], rows: list[tuple[Any, ...]]) -> list[PackFinding]:
    left, right = a.get("states", {}), b.get("states", {})
    first: dict[str, str] = {}
    for micro in sorted(left.keys() & right.keys(), key=int):
        for name in sorted(left[micro].keys() | right[micro].keys()):
            x, y = left[micro].get(name, "(none)"), right[micro].get(name, "(none)")
            rows.append((f"state of {name} at micro-step {micro}", rank, x, y, "", "", "pass" if x == y else "error"))
            if x != y:
                first.setdefault(name, micro)
    idle = [n for n in first if n in _CALLS and not _drawn(_CALLS[n], a) and not _drawn(_CALLS[n], b)]
    found: list[PackFinding] = []
    if idle:
        found.append(
            PackFinding(
                "note",
                f"{' and '.join(idle)} random numbers were never seeded, and the program drew none",
                "unused random state",
            )
        )
    for micro in sorted({m for n, m in first.items() if n not in idle}, key=int):
        names = [n for n, m in first.items() if m == micro and n not in idle]
        text = f"random state of {' and '.join(names)} differs from micro-step {micro} on"
        found.append(PackFinding("error", text, "random state", (*_ANY_CAUSE, "dataset")))
    return found
