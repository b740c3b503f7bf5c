"""Where tensors come out of a training: each file here is one tap, and a tap never reads a value itself."""

from __future__ import annotations

from typing import Any

from trainprobe.engine.tape import Tape


class Tap:
    """Attaches to a model while a step is collected and hands what passes to the tape.

    `begin` installs and `end` removes everything; between `end` and the next `begin` nothing of the tap is installed. A tap
    defines what it does something at.
    """

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Learn the names of the model's parts; install nothing that costs."""

    def begin(self, tape: Tape) -> None:
        """Install hooks or patches; hand everything to `tape` from now on."""

    def pause(self) -> None:
        """Take no forward calls until `resume`; gradients of what was recorded still arrive."""

    def resume(self) -> None:
        """Take forward calls again."""

    def end(self, again: bool = False) -> None:
        """Remove everything that `begin` installed; safe to call twice and at any moment.

        again: the next step is collected too, so what is dear to install may stay, asleep, until the next `begin` or `end`.
        """


AUDIT = "the audit"  # as a part of the tool


def part_of(kind: type) -> str:
    """Return the name that a class of taps has as a part of the tool (see `engine.core.guard.Guard.of`)."""
    return getattr(kind, "part", f"the tap {kind.__name__}")
