"""What a probe needs of PyTorch."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from trainprobe.engine.compiled import recording
from trainprobe.engine.core.gathering import Gathering
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import parameters_in
from trainprobe.engine.core.naming import Rename, chunks_of
from trainprobe.engine.core.records import Place
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.core.topology import axes_of_parameters, place_from_environment
from trainprobe.engine.plan.detail import Detail
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.dumps.tensor_files import SAFETENSORS_NAMES
from trainprobe.engine.tape import Tape
from trainprobe.engine.taps import Taps
from trainprobe.errors import MissingExtra
from trainprobe.run.backend import Backend, Journal, Keep

NO_MODULE = ": give watch, or the callback, the module that trains"


class TorchBackend(Backend):
    """See the module text. torch itself is imported when the first taps are made."""

    name = "pytorch"

    def taps(self, plan: Plan, guard: Guard, stacks: Stacks | None, rename: Rename | None) -> Taps:
        """Return the taps. Raises MissingExtra when torch is not installed."""
        if "torch" not in sys.modules and importlib.util.find_spec("torch") is None:
            raise MissingExtra("torch", "torch", "a probe on a PyTorch training")
        from trainprobe.run.torch_taps import TorchTaps

        return TorchTaps(guard, stacks, rename)

    def tapes(self, plan: Plan, keep: Keep, keep_chunk: Callable[[Any], None], journal: Journal) -> Callable[[int], Tape]:
        """Return what makes the tape of a step."""
        from trainprobe.engine.arrays.torch_library import TorchLibrary

        histogram = plan.histogram
        edges = histogram if histogram is None or isinstance(histogram, str) else histogram.boundaries()
        library = TorchLibrary(native=plan.native, edges=edges, quantiles=plan.quantiles)
        arena = recording.Arena(SAFETENSORS_NAMES, keep_chunk)
        shares = plan.level in ("L0", "L1", "mix") and plan.base_detail.wants_checksum
        return lambda number: Tape(library, keep, plan.reuse, arena, journal(number), shares and plan.wants_step(number))

    def without_dispatch(self) -> AbstractContextManager[Any]:
        """Return a context in which torch's modes do not see what the tool computes."""
        from trainprobe.engine.arrays.without_dispatch import without_dispatch

        return without_dispatch(within_transforms=True)

    def place(self) -> Place:
        """Learn from torch.distributed or the environment where this process stands."""
        return place_from_environment()

    def place_by_model(self, model: Any) -> Place | None:
        """Return where this process stands by the meshes of the model's parameters; None where it is alone."""
        found = self.place()
        if found.world_size == 1:
            return None
        parameters = parameters_in(chunk for chunk in chunks_of(model) if hasattr(chunk, "modules"))
        return replace(found, axes=axes_of_parameters(parameters, found))

    def gathering(self) -> Gathering:
        """Return what brings a few numbers of every rank to every rank."""
        from trainprobe.engine.capture.gathering import gathering

        return gathering()

    def random_state(self) -> Mapping[str, Any]:
        """Return the random state as text."""
        from trainprobe.engine.capture.random_state import random_text

        return random_text()

    def copy(self, t: Any, detail: Detail | None) -> Any:
        """Return a tensor's values, or the part of them that is stored, on the host."""
        from trainprobe.engine.arrays.torch_arrays import copy_out

        return copy_out(t if detail is None else t[detail.index(tuple(t.shape))])

    def not_a_model(self, model: Any) -> str:
        """Return why a model cannot be looked at; empty for modules."""
        other = next((chunk for chunk in chunks_of(model) if not hasattr(chunk, "named_modules")), None)
        return (
            "" if other is None else f"the model that was given is a {type(other).__name__} and no torch.nn.Module{NO_MODULE}"
        )
