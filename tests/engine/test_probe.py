"""The probe: its seven verbs, with a real model, a real tape, and programs that write down what they are called for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.capture.torch_modules import ModuleTap
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Program, Schedule
from trainprobe.engine.stats.partials import STATS
from trainprobe.engine.storage.sinks.memory import MemorySink
from trainprobe.engine.storage.writer import Writer
from trainprobe.engine.tape import Tape
from trainprobe.errors import StopTraining, UsageError


class Diary(Program):
    """Writes down what it is called for; finds and decides what it is told to."""

    def __init__(self, found: Sequence[Finding] = (), stop: bool = False) -> None:
        super().__init__("diary", Schedule(lambda step: True))
        self.told: list[str] = []
        self.found, self.stop = found, stop

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        self.told.append("opened")

    def begins(self, step: int) -> None:
        self.told.append(f"{step} begins")

    def prepare(self, step_data: StepData) -> None:
        self.told.append("prepare")

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        self.told.append("judge")
        return self.found

    def decide(self, found: Sequence[Finding]) -> tuple[int, StopTraining | None]:
        self.told.append("decide")
        return 0, StopTraining("enough") if self.stop else None

    def ended(self, step: int, complete: bool) -> None:
        self.told.append(f"{step} ended {complete}")

    def dropped(self) -> None:
        self.told.append("dropped")

    def closing(self) -> None:
        self.told.append("closing")

    def closed(self) -> None:
        self.told.append("closed")


class Faulty(Program):
    """Fails when it is to judge."""

    def judge(self, step_data: StepData) -> Sequence[Finding]:
        raise ZeroDivisionError("a fault of this program")


OPENED: list[EngineProbe] = []  # by the test that runs


@pytest.fixture(autouse=True)
def closed_probes() -> Iterator[None]:
    """Close what a test opened: a probe that waits for its next step keeps its function in torch."""
    yield
    while OPENED:
        OPENED.pop().close()


class Run:
    """A probe on a small model, with its sink."""

    def __init__(
        self, tmp_path: Any, steps: Sequence[int] = range(100), programs: Sequence[Program] = (), **about: Any
    ) -> None:
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())
        self.sink = MemorySink()
        self.plan = Plan(output=tmp_path, level="L0", console=False, **about)
        guard = Guard("raise" if about.get("on_error") == "raise" else "continue")
        flags = lambda name, module_class="": STATS  # noqa: E731
        tap = ModuleTap(ModuleRequest(flags, lambda name: True, frozenset({"input", "output"})), guard.of("modules"), None)
        wants = set(steps).__contains__
        self.dump = Program("dump", Schedule(wants, ((tap, wants),), asked=(tap,), dumps=True))
        library = TorchLibrary()
        self.probe = EngineProbe(
            self.plan,
            [self.dump, *programs],
            lambda step: Tape(library),
            guard,
            Place,
            lambda place: Writer({"memory": self.sink}, place=place),
        )
        self.probe.open(self.model)
        OPENED.append(self.probe)

    def forward(self) -> None:
        self.model(torch.ones(2, 3))

    @property
    def written(self) -> list[tuple[int, list[str], bool]]:
        """(step, names of its calls, complete) of each step that came to the sink."""
        self.probe.flush()
        return [(s.step, [c.name for c in s.calls], s.complete) for s in self.sink.collected_steps]


NAMES = ["0", "1", "root"]


def test_a_step_that_a_program_wants_is_collected_and_one_that_nobody_wants_installs_nothing(tmp_path: Any) -> None:
    run = Run(tmp_path, steps=[1])
    for wanted in (False, True, False):
        assert run.probe.begin_step() is wanted
        run.forward()
        assert (run.probe.end_step() is not None) is wanted
    assert [(step, sorted(names)) for step, names, _ in run.written] == [(1, NAMES)]
    assert run.probe.collected == 1


def test_steps_have_the_numbers_that_the_framework_gives_or_the_next_one(tmp_path: Any) -> None:
    run = Run(tmp_path)
    for number in (None, 7, None):
        with run.probe.step(number):
            run.forward()
    assert [step for step, _, _ in run.written] == [0, 7, 8]


def test_verbs_out_of_turn_are_errors_that_say_what_to_call(tmp_path: Any) -> None:
    run = Run(tmp_path)
    assert run.probe.end_step() is None
    run.probe.begin_step()
    with pytest.raises(UsageError, match="call end_step"):
        run.probe.begin_step()
    run.probe.close()
    with pytest.raises(UsageError, match="closed"):
        run.probe.open(run.model)


def test_what_an_error_cut_short_is_written_as_incomplete_and_the_error_goes_on(tmp_path: Any) -> None:
    run = Run(tmp_path)
    with pytest.raises(KeyError), run.probe.step():
        run.forward()
        raise KeyError("of the program")
    assert [(step, complete) for step, _, complete in run.written] == [(0, False)] and run.probe.collected == 0


def test_a_step_that_is_dropped_leaves_nothing_and_its_number_is_free_again(tmp_path: Any) -> None:
    run = Run(tmp_path)
    run.probe.begin_step()
    run.forward()
    run.probe.drop_step()
    with run.probe.step():
        run.forward()
    assert [step for step, _, _ in run.written] == [0]


def test_what_is_uninstalled_inside_a_step_collects_nothing_of_it(tmp_path: Any) -> None:
    run = Run(tmp_path)
    plain = torch.nn.Module.__dict__["_call_impl"]
    run.probe.begin_step()
    run.probe.uninstall()
    assert torch.nn.Module.__dict__["_call_impl"] is plain
    run.forward()
    assert run.probe.end_step() is None and run.written == []


def test_a_rule_may_have_the_next_steps_collected_whatever_the_plan_says(tmp_path: Any) -> None:
    run = Run(tmp_path, steps=[])
    for step in range(4):
        if step == 1:
            run.probe.collect_next(2)
        with run.probe.step():
            run.forward()
    assert [step for step, _, _ in run.written] == [1, 2]


def test_scalars_are_kept_in_collected_steps_and_one_that_is_no_number_is_a_finding(tmp_path: Any) -> None:
    run = Run(tmp_path, steps=[1])
    run.probe.note("early", 1.0)
    for _ in range(2):
        with run.probe.step():
            run.forward()
            run.probe.note("loss", 2.0)
            run.probe.note("name", "text")
    run.probe.flush()
    assert [dict(s.scalars) for s in run.sink.collected_steps] == [{"loss": 2.0}]
    assert [f.step for f in run.probe.findings if "'name' was left out" in f.message] == [1]


def test_calls_between_pause_and_resume_are_not_recorded(tmp_path: Any) -> None:
    run = Run(tmp_path)
    with run.probe.step():
        run.probe.pause()
        run.forward()
        run.probe.resume()
        run.model[0](torch.ones(2, 3))
    assert [names for _, names, _ in run.written] == [["0"]]


def test_a_micro_batch_that_is_told_is_that_of_the_calls_and_listeners_hear_moments_of_collected_steps(tmp_path: Any) -> None:
    run, heard = Run(tmp_path, steps=[1]), []
    run.probe.on("micro", heard.append)
    for _ in range(2):
        with run.probe.step():
            run.probe.moment("micro", 5)
            run.forward()
    run.probe.flush()
    assert heard == [5]
    assert {c.micro for c in run.sink.collected_steps[0].calls} == {5}


def test_a_collected_step_in_which_nothing_was_seen_is_told_once(tmp_path: Any) -> None:
    run = Run(tmp_path)
    for _ in range(3):
        with run.probe.step():
            pass
    assert len([f for f in run.probe.findings if "nothing was seen" in f.message]) == 1


def test_programs_are_called_at_the_events_of_a_run_in_their_order(tmp_path: Any) -> None:
    diary = Diary()
    run = Run(tmp_path, programs=[diary])
    with run.probe.step():
        run.forward()
    run.probe.begin_step()
    run.probe.drop_step()
    run.probe.close()
    run.probe.close()
    assert diary.told == ["0 begins", "prepare", "judge", "decide", "0 ended True", "1 begins", "dropped", "closing", "closed"]


def test_a_program_that_stops_the_training_does_so_once_the_step_is_handed_over(tmp_path: Any) -> None:
    found = Finding("diary", "error", "too large", step=0)
    run = Run(tmp_path, programs=[Diary([found], stop=True)])
    run.probe.begin_step()
    run.forward()
    with pytest.raises(StopTraining, match="enough"):
        run.probe.end_step()
    assert [step for step, _, _ in run.written] == [0] and found in run.probe.findings


def test_a_fault_of_a_program_leaves_out_that_program_and_nothing_else(tmp_path: Any) -> None:
    diary = Diary()
    run = Run(tmp_path, programs=[Faulty("faulty", Schedule()), diary])
    for _ in range(2):
        with run.probe.step():
            run.forward()
    assert len(run.written) == 2 and diary.told.count("judge") == 2
    assert len([f for f in run.probe.findings if "the faulty" in f.message]) == 1


def test_what_was_asked_for_and_never_came_is_told_at_the_end(tmp_path: Any) -> None:
    run = Run(tmp_path, step=(50,))
    with run.probe.step():
        run.forward()
    run.probe.close()
    assert any("50" in f.message for f in run.probe.findings)


def test_a_sentence_for_the_end_stands_there_once(tmp_path: Any) -> None:
    run = Run(tmp_path)
    run.probe.at_end("see the page")
    run.probe.at_end("see the page")
    assert run.probe.sentences == ["see the page"]
