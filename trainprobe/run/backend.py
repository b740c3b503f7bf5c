"""What a probe needs of a framework. PyTorch's is `torch_backend.py`, MindSpore's is in `integrations/mindspore_probe.py`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from trainprobe.engine.core.gathering import Gathering
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import Rename
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.step_journal import StepJournal
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps import Taps

Keep = Callable[[str, Any, Any, int], None]
Journal = Callable[[int], StepJournal | None]


class Backend(ABC):
    """One framework. name: as dumps have it ("pytorch", "mindspore")."""

    name: str

    @abstractmethod
    def taps(self, plan: Plan, guard: Guard, stacks: Stacks | None, rename: Rename | None) -> Taps:
        """Return the taps, none of which is made yet. Raises PlanError for what this framework does not show."""

    @abstractmethod
    def tapes(self, plan: Plan, keep: Keep, keep_chunk: Callable[[Any], None], journal: Journal) -> Callable[[int], Tape]:
        """Return what makes the tape of a step. keep: is given each value to store; keep_chunk: many values in one memory."""

    @abstractmethod
    def without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context in which the modes of the program do not see what the tool computes."""

    @abstractmethod
    def place(self) -> Place:
        """Learn where this process stands."""

    def place_by_model(self, model: Any) -> Place | None:
        """Return where this process stands by the meshes of a model's parameters; None where they do not say."""
        return None

    @abstractmethod
    def gathering(self) -> Gathering:
        """Return what brings a few numbers of every rank to every rank."""

    @abstractmethod
    def random_state(self) -> Mapping[str, Any]:
        """Return the random state as text."""

    @abstractmethod
    def copy(self, t: Any, detail: Detail | None) -> Any:
        """Return a tensor's values on the host. detail: says which part of it is stored; None: all."""

    def not_a_model(self, model: Any) -> str:
        """Return why a model cannot be looked at; empty for one that can."""
        return ""
