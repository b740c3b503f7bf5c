"""What a plan means that leaves things out: nothing is dumped that was not asked for, and no plan at all watches and judges."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.plan.subplans import sections
from trainprobe.errors import PlanError

# fields that say where and how, not what: none of them asks for a dump
HOW = frozenset(
    {
        *("output", "on_existing", "rank", "sinks", "csv_layout", "csv_steps", "nan_tokens", "console", "on_error"),
        *("reuse", "native", "control", "told", "join_runs"),
    }
)
LEVELS = {"nothing": "off", "L0": "L0", "L1": "L1", "mix": "mix", "debug": "debug"}  # word of `record` → of `level`


def default_plan() -> dict[str, Any]:
    """Return the fields of no plan: gradients, parameters and scalars of each step are judged, and nothing is dumped.

    The audit looks at one of ten steps on average, two in a row. Tables and findings go to `./probe_out`.
    """
    return {
        "level": "off",
        "sinks": ["parquet", "csv"],
        "monitor": {"gradients": True, "parameters": True, "scalars": True, "activations": False},
        "audit": True,
    }


def one_level(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return fields in which `record` and its older name `level` say the same, where one of them is given.

    A word that neither has stays where it is. Raises PlanError where they say different things.
    """
    told = {name: _word(fields[name]) for name in ("record", "level") if name in fields}
    if not told or not all(isinstance(word, str) and word in LEVELS for word in told.values()):
        return dict(fields)
    word, *other = dict.fromkeys(told.values())
    if other:
        raise PlanError(f"record: {word!r} and level: {other[0]!r} cannot both be: leave `level`, its older name, out")
    return {**fields, "record": word, "level": LEVELS[word]}


def filled(fields: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the fields of a plan with what follows where it says nothing of recording, or nothing at all."""
    told = one_level(fields)
    if "level" in told or "record" in told:
        return told
    if set(told) - HOW - sections().keys():
        return one_level({"level": "L0", **told})
    programs = any(told.get(name) for name in sections())
    return one_level({**({} if programs else default_plan()), "level": "off", **told})


def _word(level: Any) -> Any:
    return "nothing" if level == "off" else level
