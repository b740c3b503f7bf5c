"""Where tensors come out of a training: each file here is one tap, and a tap never reads a value itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from trainprobe.engine.core.records import Call, StepData
from trainprobe.engine.tape import Tape

if TYPE_CHECKING:
    from trainprobe.engine.core.position import Position
    from trainprobe.engine.geometry.shards import ShardOf


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


class ModelTap(Tap):
    """Knows the names of a model's modules and parameters, and records calls of its modules.

    known: id of module → what is known of it, its `name` among it. parameter_names: id of parameter → name. stack: the calls
    that are running, outermost first. notes: what could not be seen, and why. position: notified which module runs.
    """

    known: dict[int, Any]
    parameter_names: dict[int, str]
    stack: list[Call]
    notes: dict[str, None]
    position: Position | None

    def names(self) -> dict[int, str]:
        """Return id of parameter → name, as the model is now."""
        raise NotImplementedError


class StatesTap(Tap):
    """Looks at parameters, their gradients and the state of their optimizer.

    shard_of: returns which part of the whole a plain parameter is. named: id of parameter → its name over all processes,
    where that is another.
    """

    shard_of: ShardOf | None
    named: Mapping[int, str]

    def unscaling(self) -> Callable[[StepData], None] | None:
        """Return what divides the gradients of the step that has ended by the loss scale; None where nothing is scaled."""


AUDIT = "the audit"  # as a part of the tool


def part_of(kind: type) -> str:
    """Return the name that a class of taps has as a part of the tool (see `engine.core.guard.Guard.of`)."""
    return getattr(kind, "part", f"the tap {kind.__name__}")
