"""What a plan asks for becomes taps and schedules: which there are, on which steps they run, and what can change in a run."""

from __future__ import annotations

from typing import Any

import pytest

from trainprobe.engine.capture import AUDIT, Tap, part_of
from trainprobe.engine.capture.features.batches import BatchTap
from trainprobe.engine.capture.parameter_states import ParameterStateTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.program import Schedule
from trainprobe.engine.taps import Taps
from trainprobe.errors import PlanError
from trainprobe.run.composition import changed_plan, compose
from trainprobe.run.probe import Probe
from trainprobe.run.torch_taps import TorchTaps

TAPS = (
    *("modules", "buffers", "ops", "collectives", "watched", "states", "clipping", "unreduced", "scaling", "exchanged"),
    *("batches", "features", "audit"),
)


def composed(**plan: Any) -> tuple[Taps, dict[str, Schedule]]:
    taps = TorchTaps(Guard())
    return taps, compose(load_plan({"output": "unused", **plan}), taps)


def there(taps: Taps) -> set[str]:
    return {name for name in TAPS if taps.get(name, Tap) is not None}


def running(taps: Taps, schedule: Schedule, step: int) -> set[str]:
    names = {id(taps.get(name, Tap)): name for name in ("naming", "saved", "stepping", "awaited", *TAPS)}  # naming may be one
    return {names[id(tap)] for tap, wants in schedule.taps if wants(step)}


MONITORED = {"watched", "states", "scaling"}


@pytest.mark.parametrize(
    ("plan", "taps"),
    [
        ({"level": "L0"}, {"modules", "buffers"}),
        ({"level": "L1"}, {"ops", "collectives"}),
        ({"level": "mix"}, {"modules", "buffers", "ops", "collectives"}),
        ({"level": "off", "monitor": {"gradients": False, "batches": False}}, MONITORED),
        (
            {"level": "off", "monitor": {"gradients": {"unclipped": True, "unreduced": True}}},
            MONITORED | {"clipping", "unreduced"},
        ),
        ({"level": "off", "monitor": {"gradients": False, "batches": False, "collectives": True}}, MONITORED | {"exchanged"}),
        (
            {"level": "off", "monitor": {"gradients": False, "batches": True, "features": {"dead_units": True}}},
            MONITORED | {"batches", "features"},
        ),
        ({"level": "off", "audit": True}, {"states", "scaling", "clipping", "audit"}),
    ],
    ids=lambda given: "-".join(sorted(given)) if isinstance(given, set) else str(given),  # the same in each process
)
def test_a_probe_has_the_taps_of_what_its_plan_asks_for_and_no_others(plan: dict[str, Any], taps: set[str]) -> None:
    assert there(composed(**plan)[0]) == taps


def test_the_dump_runs_on_the_steps_that_its_plan_selects() -> None:
    taps, schedules = composed(level="L0", step=[3])
    assert [schedules["dump"].wants(n) for n in (2, 3, 4)] == [False, True, False]
    assert running(taps, schedules["dump"], 2) == set()
    assert {"modules", "buffers", "stepping", "saved"} <= running(taps, schedules["dump"], 3)


def test_the_monitor_does_not_look_at_modules_that_the_dump_looks_at_in_the_same_step() -> None:
    taps, schedules = composed(level="L0", step=[3], monitor=True)
    assert [("watched" in running(taps, schedules["monitor"], n)) for n in (2, 3)] == [True, False]
    assert schedules["monitor"].replaced == (taps.get("watched", Tap),)


def test_of_a_level_that_is_off_a_rule_may_ask_for_a_dump_of_everything() -> None:
    taps, schedules = composed(level="off", monitor={"rules": {"nonfinite": {"actions": ["dump"]}}})
    assert taps.dumps_when_asked and schedules["dump"].level == "mix"
    assert not schedules["dump"].wants(0) and taps.get("ops", Tap) in schedules["dump"].asked


@pytest.mark.parametrize("every", [1, 3])
def test_the_monitor_looks_as_often_as_its_sections_say(every: int) -> None:
    taps, schedules = composed(level="off", monitor={"activations": {"every": every}, "activation_gradients": False})
    looked = [n for n in range(7) if "watched" in running(taps, schedules["monitor"], n)]
    assert looked == [*range(0, 7, every)]


def changed(taps: Taps, **plan: Any) -> dict[str, Schedule]:
    return compose(load_plan({"output": "unused", "level": "off", **plan}), taps)


def test_in_a_run_the_steps_and_the_sections_of_the_monitor_can_change() -> None:
    taps, before = composed(level="off", monitor={"step": [0], "gradients": False})
    old = {name: taps.get(name, Tap) for name in ("states", "watched", "unreduced", "clipping", "naming")}
    after = changed(taps, monitor={"step": [5], "gradients": {"unreduced": True}, "activation_gradients": True})
    assert [(s["monitor"].wants(0), s["monitor"].wants(5)) for s in (before, after)] == [(True, False), (False, True)]
    assert all(taps.get(name, Tap) is old[name] for name in ("states", "naming"))  # what it has learned of the training stays
    assert taps.get("watched", Tap) is not old["watched"]
    assert [old["unreduced"], old["clipping"]] == [None, None] and {"unreduced", "clipping"} <= there(taps)
    changed(taps, monitor={"gradients": False})
    assert not {"unreduced", "clipping"} & there(taps)  # nobody asks for them any more


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"monitor": False}, "neither begin nor end"),
        ({"monitor": True, "audit": True}, "neither begin nor end"),
        ({"monitor": {"actions": {"dump_steps": 9}}}, "monitor.actions stays what it is"),
    ],
)
def test_what_is_set_up_at_the_start_cannot_change_and_the_error_says_what_to_do(plan: dict[str, Any], says: str) -> None:
    probe = Probe(level="off", monitor=True, output="unused")
    with pytest.raises(PlanError, match=says):
        changed_plan(probe.plan, plan, probe.programs)


def test_where_a_tap_fails_that_the_audit_cannot_do_without_the_audit_is_left_out_with_it() -> None:
    taps, _ = composed(level="off", audit=True, on_error="continue")
    guard = taps.guard
    taps.own(ParameterStateTap).trip(ZeroDivisionError("a fault"))
    assert guard.leaves_out(part_of(ParameterStateTap)) and guard.leaves_out(AUDIT)
    assert not guard.leaves_out(part_of(BatchTap))
