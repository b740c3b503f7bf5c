"""`trainprobe nan-trace RUN`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from rich.console import Console

from trainprobe.engine.core.addresses import Address
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.step_data import entry_name
from trainprobe.engine.core.words import counted, numbered
from trainprobe.errors import FormatError
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.nan_trace.steps import RankStep, steps_of
from trainprobe.monitor.nan_trace.trace import RankTrace, RunTrace, reached, trace_run
from trainprobe.monitor.nonfinite_values import is_given
from trainprobe.monitor.rules.nonfinite import describe
from trainprobe.monitor.updates_seen import UpdatesSeen, no_update, steps_without_update

_SHOWN = 3  # results behind the first
_LARGEST = {"float16": 65504.0, "bfloat16": 2.0**127 * (2 - 2.0**-7), "float32": 2.0**127 * (2 - 2.0**-23)}


def nan_trace(
    folder: Annotated[Path, typer.Argument(help="folder that a run wrote to, or a step or rank of it", metavar="RUN")],
    json: Annotated[bool, typer.Option("--json", help="one JSON object with everything")] = False,
) -> int:
    """Find the call, rank and step that made the first NaN or infinity, and how it reached the others.

    Reads dumps (any tool's, and those of an NPU's kernels) and run logs. Exit code: 0 everything is finite, 1 something is
    not or the device reported an overflow, 3 there is nothing to read, or a part could not be read and all else is finite.
    """
    overflows: list[str] = []
    unread: dict[str, None] = {}
    updates: dict[int, UpdatesSeen] = {}
    seen = LookedAt(folder if folder.is_dir() else None)
    found, looked = trace_run(_followed(_with_overflows(steps_of(folder), overflows), updates, seen, unread))
    if not looked and found is None and not overflows:
        raise FormatError(f"{folder} holds no step that could be read: nothing was looked at")
    of_updates = [steps_without_update(updates.values()), no_update(updates.values())]
    not_seen = [*(f"{sentence}." for sentence in seen.lacking()), *filter(None, of_updates)]
    not_seen = not_seen if found is None else []  # of a run that was not read to its end, this is not known
    lacking = [] if found is not None else _not_looked_at(seen, folder, list(unread))
    not_seen = [*lacking[1:], *not_seen]
    if json:
        not_seen = [*lacking[:1], *not_seen]
        more = {name: lines for name, lines in (("overflows", overflows), ("not_seen", not_seen)) if lines}
        typer.echo(orjson.dumps(_as_json(found, looked) | more, default=str).decode())
    else:
        console = Console(highlight=False, soft_wrap=True, markup=False)
        reported = (f"the device reported an overflow: {overflow}" for overflow in overflows)
        for line in (*_lines(found, looked, lacking), *not_seen, *reported):
            console.print(line)
    return 1 if found is not None or overflows else 3 if lacking else 0


_NOTHING = "no value could be looked at"


def _not_looked_at(seen: LookedAt, folder: Path, unread: list[str]) -> list[str]:
    """Return sentences on what the answer that all is finite would not rest on."""
    nothing = "" if seen.values else _NOTHING
    parts = f"{counted(len(unread), 'part')} of the dump could not be read, such as: {unread[0]}" if unread else ""
    return [text for text in (nothing, seen.shortfall(folder), parts) if text]


def _with_overflows(steps: Iterator[list[RankStep]], overflows: list[str]) -> Iterator[list[RankStep]]:
    """Yield the steps as they are, and add what the device reported in them to `overflows`."""
    for ranks in steps:
        overflows += [f"step {here.frame.step}, rank {here.rank}, {overflow}" for here in ranks for overflow in here.overflows]
        yield ranks


def _followed(
    steps: Iterator[list[RankStep]], updates: dict[int, UpdatesSeen], seen: LookedAt, unread: dict[str, None]
) -> Iterator[list[RankStep]]:
    """Yield the steps as they are, and learn which there are of each rank, at which it had an update, and what is unread."""
    for ranks in steps:
        for here in ranks:
            seen.add(here.frame)
            unread.update(dict.fromkeys(here.unread))
            updates.setdefault(here.rank, UpdatesSeen()).add(here.frame)
        yield ranks


def _lines(found: RunTrace | None, looked: int, lacking: list[str]) -> Iterator[str]:
    if found is None:
        where = "what could be looked at" if lacking else counted(looked, "recorded step")
        finite = f"no NaN and no infinity in {where}, beside constants and masks"
        unknown = "whether there is a NaN or an infinity is not known"
        yield ": ".join([*lacking[:1], unknown if _NOTHING in lacking else finite])
        return
    first = found.first
    yield f"the first {first.what} is of step {found.step}, on rank {first.at.rank}: {_name(first)}: {_how(first, found)}"
    yield from (f"  {line}" for line in _about_call(first))
    if first.kind == "made" and first.address.kind == "module" and looked == 1:
        yield "  its weights were not recorded: if an earlier update spoilt them, record earlier steps, with the monitor on"
    went = reached(first)
    if went:
        marks = _landmarks(went)
        more = f" ({len(set(went))} places in all)" if len(set(went)) > len(marks) else ""
        yield f"  from there: {' → '.join(map(describe, marks))}{more}"
    yield from _others(found)


def _landmarks(went: Sequence[Address]) -> list[Address]:
    """Return what to show of the way: the next results, the last of the forward pass, the loss, a gradient, a weight."""
    forward = [address for address in went if address.phase == "forward" and address.kind != "scalar"]
    loss = [address for address in went if address.kind == "scalar"][:1]
    gradients = [address for address in went if address.phase == "backward" and address.kind == "parameter"][:1]
    updated = [address for address in went if address.phase == "optimizer"][:1]
    return list(dict.fromkeys([*forward[:_SHOWN], *forward[-1:], *loss, *gradients, *updated])) or list(went[:_SHOWN])


def _name(trace: RankTrace) -> str:
    call = trace.at.call_at(trace.address)
    if call is None or trace.at.step_data is None or (is_given(trace.address) and trace.address.kind == "parameter"):
        return describe(trace.address)
    parent = call.parent
    within = parent.name if isinstance(parent, Call) and parent.kind == "module" and parent.name != ROOT else ""
    micro = f", micro-batch {call.micro}" if call.micro else ""
    return f"{entry_name(call, trace.at.step_data.framework)}, {trace.address.slot}{f', in {within}' if within else ''}{micro}"


def _how(first: RankTrace, found: RunTrace) -> str:
    if first.kind == "handed":
        return "a collective handed it over, and no rank that was recorded made it: record all ranks"
    also = [
        trace.at.rank for trace in found.ranks if trace is not first and trace.kind == "made" and trace.address == first.address
    ]
    if not also:
        return first.how
    return f"{first.how}; {numbered('rank', also)} made one at the same place"


def _about_call(trace: RankTrace) -> Iterator[str]:
    """Yield a line for each value of the call that made it, and where in the program it was called; only dumps know."""
    call = trace.at.call_at(trace.address)
    if call is None or trace.at.step_data is None:
        return
    for slot, dtype, shape, numbers in trace.at.numbers(call):
        least, most = numbers.get("min"), numbers.get("max")
        between = "no extremes recorded" if least is None or most is None else f"{least:.6g} to {most:.6g}"
        short = dtype.rpartition(".")[2].lower()
        ends = math.inf in (most, -(least or 0.0)) and not math.isnan(most or 0.0) and short in _LARGEST
        yield f"{slot}: {short} {list(shape)}, {between}{f' ({short} ends at {_LARGEST[short]:.6g})' if ends else ''}"
    forward = next((c for c in trace.at.step_data.calls if (c.kind, c.name, c.call) == (call.kind, call.name, call.call)), call)
    frames = trace.at.step_data.stacks[forward.stack] if 0 <= forward.stack < len(trace.at.step_data.stacks) else ()
    frame = next((str(frame) for frame in frames if "/torch/" not in str(frame)), None)
    if frame is not None:
        yield f"called at {' '.join(frame.split())}"


def _others(found: RunTrace) -> Iterator[str]:
    first = found.first
    for trace in sorted((*found.ranks, *found.later), key=lambda trace: trace.at.rank):
        if trace is first or (trace.kind == "made" and trace.address == first.address and trace in found.ranks):
            continue
        step = trace.at.frame.step
        if trace.kind == "handed":
            yield f"  rank {trace.at.rank}: handed over in step {step} by {_name(trace)}"
        elif step > found.step:
            yield f"  rank {trace.at.rank}: from step {step} on, with what step {found.step} left behind: {_name(trace)}"
        else:
            yield f"  rank {trace.at.rank}: step {step}, {_name(trace)}: {trace.how}"


def _as_json(found: RunTrace | None, looked: int) -> dict[str, Any]:
    if found is None:
        return {"found": False, "steps": looked}
    every = [_trace_as_json(trace) for trace in (*found.ranks, *found.later)]
    went = [list(address) for address in reached(found.first)]
    return {
        "found": True,
        "steps": looked,
        "step": found.step,
        "first": _trace_as_json(found.first),
        "reached": went,
        "ranks": every,
    }


def _trace_as_json(trace: RankTrace) -> dict[str, Any]:
    names = ("phase", "kind", "name", "call", "slot")
    return {
        "rank": trace.at.rank,
        "step": trace.at.frame.step,
        "origin": trace.kind,
        "what": trace.what,
        "how": trace.how,
        "at": dict(zip(names, trace.address, strict=True)),
        "entry": _name(trace),
    }
