"""What the tap of an audit asks about the run that it listens to."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Protocol

from trainprobe.engine.tape import Tape


class AuditRun(Protocol):
    """Answers for the step that is audited."""

    @property
    def observers(self) -> Collection[str] | None:
        """The observers that the relations of the plan name; None: all."""
        ...

    def observers_due(self) -> Collection[str] | None:
        """Return those that the relations name which are checked at this step; None: all."""
        ...

    def wants(self, kind: str) -> bool:
        """Tell whether a relation of this cost ("fingerprints", "rerun") is checked at this step."""
        ...

    def loaded(self) -> None:
        """Take note that a checkpoint was loaded: what is due at the next step has changed."""
        ...

    def new_tape(self) -> Tape:
        """Return a tape that belongs to no step."""
        ...

    @property
    def folder(self) -> Path | None:
        """Where this rank's log is."""
        ...

    @property
    def continues(self) -> bool:
        """Whether the run goes on with one of an earlier process, which may have left something in `folder`."""
        ...

    @property
    def step(self) -> int:
        """The number of the step."""
        ...

    @property
    def ordinal(self) -> int:
        """How many steps have begun."""
        ...

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        ...
