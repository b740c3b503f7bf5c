"""Calls of modules that are held for the length of a step: what each was given, had and made, up to a number of bytes.

Of inputs and results references are held, of parameters and buffers copies, because the update writes them. Nothing is read.
A version counter tells what the program has written in place since. Forwards that run again in backward are left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from threading import get_ident
from typing import Any

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id
from torch.utils import _pytree as pytree

from trainprobe.engine.capture.patching import module_calls
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import PartGuard, attempt, fault_text
from trainprobe.engine.core.naming import ROOT
from trainprobe.engine.plan.selection import Names
from trainprobe.errors import FormatError


@dataclass(slots=True)
class HeldTensor:
    """A tensor as it was: a view of its memory, or a copy. version: of the memory, None of a copy."""

    tensor: Any
    version: int | None

    @property
    def stands(self) -> bool:
        """Whether nobody has written it since."""
        return self.version is None or self.tensor._version == self.version


@dataclass(slots=True)
class HeldCall:
    """One call. given: (args, kwargs). given, state and made hold a `HeldTensor` for each tensor; made is None until it ends.

    A tensor that is given several times is held once: attention multiplies one tensor otherwise than three equal ones.

    random: device → state of its generator. autocast: (device, dtype) in force. inner: it called no module that is held.
    """

    name: str
    module: Any
    number: int
    given: Any
    state: dict[str, HeldTensor]
    random: dict[str, Any]
    autocast: list[tuple[str, str]]
    made: Any = None
    inner: bool = True


@dataclass(slots=True)
class HeldStep:
    """What is held of a step. calls: in the order in which they ended. batch: what the model was given first.

    left_out: sentences on what is not held.
    """

    number: int
    calls: list[HeldCall] = field(default_factory=list[HeldCall])
    batch: Any = None
    left_out: dict[str, None] = field(default_factory=dict[str, None])


class HeldCalls:
    """See the module text. names: of the modules that are held. most: bytes that a step may keep alive."""

    def __init__(self, guard: PartGuard, names: Names, most: int) -> None:
        self._guard, self._names, self._most = guard, names, most
        self.paused = 0
        self._step: HeldStep | None = None
        self._replaced: Replaced | None = None
        guard.on_trip(lambda: self.end() and None)

    def begin(self, number: int, roots: Sequence[Any]) -> None:
        """Hold the calls of a step."""
        self.end()
        named = ((name or ROOT, module) for root in roots for name, module in root.named_modules())
        self._known = {id(module): name for name, module in named if name == ROOT or name in self._names}
        self._step, self._thread, self._running = HeldStep(number), get_ident(), list[HeldCall]()
        self._counts, self._size, self._kept = Counter[str](), 0, dict[int, Any]()  # by address; by id of a parameter
        self._replaced = module_calls.through(self._called)

    def end(self) -> HeldStep | None:
        """Hold no more; return what was held."""
        step, self._step = self._step, None
        if self._replaced is not None:
            self._replaced.back()
            self._replaced = None
            self._running, self._kept = [], {}
        return step

    @property
    def step(self) -> HeldStep | None:
        """What is held of the step under way."""
        return self._step

    def _called(self, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        step, name = self._step, self._known.get(id(module))
        if step is None or name is None or self.paused or get_ident() != self._thread or _current_graph_task_id() != -1:
            return original(module, *args, **kwargs)
        running = self._running
        depth, held = len(running), self._guard.run(self._apart, partial(self._before, step, name, module, args, kwargs), name)
        try:
            result = original(module, *args, **kwargs)
            if held is not None:
                self._guard.run(self._apart, partial(self._after, step, held, result), name)
            return result
        finally:
            del running[depth:]

    def _apart(self, look: Callable[[], Any], name: str) -> Any:
        """Look apart from the training; what cannot be held costs that call alone."""
        step = self._step

        def leave_out(fault: Exception) -> None:
            if step is not None:
                step.left_out[f"{name}: {fault_text(fault)}"] = None

        with torch.no_grad(), DisableTorchFunction():
            return attempt(look, otherwise=leave_out)

    def _before(self, step: HeldStep, name: str, module: Any, args: Any, kwargs: Any) -> HeldCall | None:
        writes = bool(getattr(module, "inplace", False))  # its own input
        tensors = {id(x): x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        once = {key: self._reference(t, copied=writes) for key, t in tensors.items()}
        given = pytree.tree_map_only(torch.Tensor, lambda t: once[id(t)], (args, kwargs))
        if name == ROOT and step.batch is None:
            step.batch = given
        if name == ROOT and ROOT not in self._names:
            return None
        state = {n: self._copy(t) for n, t in (*module.named_parameters(), *module.named_buffers())}
        autocast = autocast_now(list(tensors.values()))
        held = HeldCall(name, module, self._counts[name], given, state, random_now(), autocast)
        self._counts[name] += 1
        self._grow(sum(t.nbytes for t in held.random.values()))
        for around in self._running:
            around.inner = False
        self._running.append(held)
        return held

    def _after(self, step: HeldStep, held: HeldCall, result: Any) -> None:
        step.calls.append(held)
        held.made = [self._reference(t) for t in pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]

    def _reference(self, t: Any, copied: bool = False) -> HeldTensor:
        if type(t) not in (torch.Tensor, torch.nn.Parameter) or t.layout is not torch.strided or t.is_meta:
            raise FormatError(f"a {type(t).__name__} is not held")
        if copied:
            self._grow(t.nbytes)
            return HeldTensor(t.detach().clone(), None)
        memory = t.untyped_storage()
        if memory.data_ptr() not in self._kept:
            self._grow(memory.nbytes())
            self._kept[memory.data_ptr()] = t.detach()  # alive: the address is not used again
        return HeldTensor(t.detach(), t._version)

    def _grow(self, size: int) -> None:
        if self._size + size > self._most:
            raise FormatError(f"its {size} bytes are beyond the {self._most // 10**6} MB that a step may hold")
        self._size += size

    def _copy(self, t: Any) -> HeldTensor:
        known = self._kept.get(-id(t)) if isinstance(t, torch.nn.Parameter) else None
        if known is None or known[1] != t._version:
            known = self._kept[-id(t)] = (self._reference(t, copied=True), t._version)
        return known[0]


def random_now() -> dict[str, Any]:
    """Return device → state of torch's generator there (uint8), of the host and of a GPU that is in use."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def autocast_now(tensors: Sequence[Any]) -> list[tuple[str, str]]:
    """Return (device, dtype) of each autocast in force, on the host and on the devices of tensors."""
    kinds = dict.fromkeys(["cpu", *(t.device.type for t in tensors)])
    return [(k, str(torch.get_autocast_dtype(k)).removeprefix("torch.")) for k in kinds if torch.is_autocast_enabled(k)]
