"""Which programs and taps run in a step. Taps are installed as the step begins and removed as it ends."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from trainprobe.engine.capture import Tap, part_of
from trainprobe.engine.capture.pauses import Pauses
from trainprobe.engine.core.guard import Guard, all_of
from trainprobe.engine.program import Program, Wants
from trainprobe.engine.tape import Tape


class Scheduled:
    """What runs in a step, worked out once for all steps of which the programs and their taps say the same.

    names: of the programs. level: what a dump of such a step records, where that is not the plan's level. looks: whether any
    program sees calls of the model. dumped: whether any records what the plan's level and task say.
    """

    __slots__ = ("dumped", "level", "looks", "names", "taps")

    def __init__(self, programs: Sequence[Program] = (), taps: Iterable[Tap] = ()) -> None:
        self.taps = tuple(taps)
        self.names = tuple(program.name for program in programs)
        self.level = next((program.schedule.level for program in programs if program.schedule.level), "")
        self.looks = any(program.schedule.looks for program in programs)
        self.dumped = any(program.schedule.dumps for program in programs)


class Scheduler:
    """Follows the schedules of the programs. pauses: knows the taps that are installed. taps: all that any schedule names."""

    def __init__(self, programs: Sequence[Program], guard: Guard, pauses: Pauses) -> None:
        self.programs = tuple(programs)
        self.taps: tuple[Tap, ...] = ()
        self.pauses = pauses
        self._guard = guard
        self._opened: tuple[Any, Callable[[], Any]] | None = None  # model, and what returns its optimizer
        self._extra_steps: set[int] = set()
        self._of_steps: dict[tuple[int, bool], Scheduled] = {}
        self._of_answers: dict[tuple[bool, ...], Scheduled] = {}  # whether extra, then the answer of each who was asked
        self.follow()

    def follow(self) -> None:
        """Follow the schedules of the programs from the next step on; taps that are new learn the model."""
        all_of(partial(tap.end, False) for tap in reversed(self.taps))  # some may wait for a step that no longer comes
        schedules = [program.schedule for program in self.programs]
        known, self.taps = self.taps, tuple(dict.fromkeys(tap for schedule in schedules for tap, _ in schedule.taps))
        for tap in self.taps:
            if tap not in known:
                self._guard.of(part_of(type(tap))).on_trip(partial(self._leave_out, tap))
                if self._opened is not None:
                    self._open(tap, self._opened[0], self._opened[1]())
        self._asked = tuple(dict.fromkeys(wants for s in schedules for wants in (s.wants, *(wants for _, wants in s.taps))))
        self._of_steps.clear()
        self._of_answers.clear()

    def open(self, model: Any, optimizer: Any) -> None:
        """Let the taps learn the model."""
        self._opened = (model, _held_weakly(optimizer))  # an optimizer that the training replaces is not kept
        for tap in self.taps:
            self._open(tap, model, optimizer)

    def collect(self, steps: Iterable[int]) -> None:
        """Have these steps collected in full, whatever the schedules say."""
        self._extra_steps.update(steps)

    def ask_anew(self) -> None:
        """Ask the programs anew what they want of the next step."""
        self._of_steps.clear()

    def at(self, step: int) -> Scheduled:
        """Return the programs that want a step and the taps that run in it; asked once a step, for this one and the next."""
        extra = step in self._extra_steps
        known = self._of_steps.get((step, extra))
        if known is None:
            due = {wants: bool(wants(step)) for wants in self._asked}
            answers = (extra, *due.values())
            known = self._of_answers.get(answers)
            if known is None:
                known = self._of_answers[answers] = self._chosen(extra, due)
            self._of_steps = {key: value for key, value in self._of_steps.items() if key[0] == step - 1}
            self._of_steps[step, extra] = known
        return known

    def install(self, running: Scheduled, tape: Tape) -> None:
        """Install the taps of a step."""
        self.pauses.install(tap for tap in running.taps if not self._left_out(tap))
        for tap in running.taps:
            self._guard.part(part_of(type(tap)), tap.begin, tape)

    def remove(self, staying: Sequence[Tap] = ()) -> None:
        """Remove all taps. staying: taps that the next step wants too."""
        all_of([*(partial(self._end, tap, tap in staying) for tap in reversed(self.taps)), self.pauses.clear])

    def _chosen(self, extra: bool, due: Mapping[Wants, bool]) -> Scheduled:
        """Return what runs in a step of which these are the answers; extra: it is to be collected in full."""
        programs = [p for p in self.programs if due[p.schedule.wants] or (extra and p.schedule.asked)]
        schedules = [program.schedule for program in programs]
        whole = dict.fromkeys(tap for s in schedules for tap in s.asked) if extra else {}
        paused = {tap for s in schedules for tap in s.replaced} if whole else set[Tap]()
        taps = dict.fromkeys(tap for s in schedules for tap, wants in s.taps if due[wants] and tap not in paused)
        return Scheduled(programs, whole | taps)

    def _open(self, tap: Tap, model: Any, optimizer: Any) -> None:
        """Let a tap learn the model. A fault costs this tap alone; an error that the user has to mend is raised."""
        self._guard.of(part_of(type(tap))).set_up(tap.open, model, optimizer)

    def _end(self, tap: Tap, again: bool) -> None:
        self._guard.of(part_of(type(tap))).undo(tap.end, again and not self._left_out(tap))

    def _left_out(self, tap: Tap) -> bool:
        return self._guard.leaves_out(part_of(type(tap)))

    def _leave_out(self, tap: Tap) -> None:
        """Let a tap that has failed listen no more."""
        self.pauses.drop(tap)
        tap.end()


def _held_weakly(x: Any) -> Callable[[], Any]:
    """Return what returns x while it lives; a list of optimizers, say, is held."""
    try:
        return weakref.ref(x)
    except TypeError:
        return lambda: x
