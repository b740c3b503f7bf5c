"""Collectives issued from Python, whichever way they were imported: what goes in, and what has come out once it is waited for.

torch.distributed hands every call to a method of the process group; those methods of the class are replaced while a step is
collected, and so are the operators of functional collectives (see functional_collectives). Nothing is waited for that the
training does not wait for: the output is looked at inside the training's own `Work.wait` or `wait_tensor`, and a collective
that is not waited for before the step ends is recorded as pending. Collectives that C++ issues by itself (the buckets of
DistributedDataParallel) do not pass here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.distributed as dist
from torch._C import DisableTorchFunction

from trainprobe.engine.capture import Tap
from trainprobe.engine.capture.awaited import replaced_op
from trainprobe.engine.capture.functional_collectives import OPERATORS, group_in, operation_in, operators
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import Call, Opaque, ToBeWritten
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.tape import SAVE, Tape

# method of ProcessGroup → (name of the public function, which argument goes in, which comes out)
METHODS: dict[str, tuple[str, int | None, int | None]] = {
    "allreduce": ("all_reduce", 0, 0),
    "allreduce_coalesced": ("all_reduce_coalesced", 0, 0),
    "broadcast": ("broadcast", 0, 0),
    "reduce": ("reduce", 0, 0),
    "allgather": ("all_gather", 1, 0),
    "_allgather_base": ("all_gather_into_tensor", 1, 0),
    "all_gather_single": ("all_gather_into_tensor", 1, 0),
    "allgather_into_tensor_coalesced": ("all_gather_into_tensor_coalesced", 1, 0),
    "gather": ("gather", 1, 0),
    "scatter": ("scatter", 1, 0),
    "reduce_scatter": ("reduce_scatter", 1, 0),
    "_reduce_scatter_base": ("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_single": ("reduce_scatter_tensor", 1, 0),
    "reduce_scatter_tensor_coalesced": ("reduce_scatter_tensor_coalesced", 1, 0),
    "alltoall": ("all_to_all", 1, 0),
    "alltoall_base": ("all_to_all_single", 1, 0),
    "all_to_all_single": ("all_to_all_single", 1, 0),
    "send": ("send", 0, None),
    "recv": ("recv", None, 0),
    "barrier": ("barrier", None, None),
}


_NATIVE = (
    "DistributedDataParallel joins gradients in C++, where collectives cannot be seen: `gradients: {unreduced: true}` of the "
    "monitor shows them before and after"
)


class CollectiveTap(Tap):
    """See the module text. Does nothing where torch.distributed is not initialised.

    chosen: which public names (`all_reduce`, `Distributed.all_reduce`) are recorded.
    """

    def __init__(
        self,
        flags: int,
        guard: Guard,
        stacks: Stacks | None,
        inside: list[Call],
        chosen: Callable[[str], bool] = lambda name: True,
    ) -> None:
        self.notes: dict[str, None] = {}
        self._chosen = chosen
        self._flags = flags
        self._guard = guard
        self._stacks = stacks
        self._inside = inside
        self._tape: Tape | None = None
        self._replaced: list[Replaced] = []
        self._wait: Replaced | None = None
        self._pending: dict[int, tuple[Any, Call, Any, Any]] = {}
        self._unwritten: dict[int, Call] = {}  # functional collectives that nobody has waited for yet, by the id of the call

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Look for a wrapper whose collectives do not pass here; each call names its process group."""
        for chunk in chunks_of(model):
            if type(chunk).__name__ == "DistributedDataParallel":
                self.notes[_NATIVE] = None

    def begin(self, tape: Tape) -> None:
        """Replace the methods of the process-group class and `Work.wait`."""
        self._tape = tape
        self.resume()

    def pause(self) -> None:
        """Put the methods back; what is pending is still looked at when it is waited for."""
        for replaced in self._replaced:
            replaced.back()
        self._replaced.clear()

    def resume(self) -> None:
        """Replace the methods."""
        if self._replaced or not dist.is_available() or not dist.is_initialized():
            return
        for method in METHODS:
            original = getattr(dist.ProcessGroup, method, None)
            if original is not None and self._is_chosen(METHODS[method][0]):
                self._replaced.append(Replaced(dist.ProcessGroup, method, self._recording(method, original)))
        for space, name in operators():
            if self._is_chosen(OPERATORS[name]):
                self._replaced.append(replaced_op(space, name, partial(self._recording_op, name)))
        if self._wait is None:
            self._wait = Replaced(dist.Work, "wait", self._recording_wait(dist.Work.wait))

    def end(self, again: bool = False) -> None:
        """Put everything back; collectives that were not waited for are recorded as pending."""
        self.pause()
        if self._wait is not None:
            self._wait.back()
            self._wait = None
        for call in (*(call for _, call, *_ in self._pending.values()), *self._unwritten.values()):
            call.out = Opaque("pending", "not waited for before the step ended")
        self._pending.clear()
        self._unwritten.clear()
        self._tape = None

    def _is_chosen(self, name: str) -> bool:
        return self._chosen(name) or self._chosen(f"Distributed.{name}")

    def _recording(self, method: str, original: Any) -> Any:
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            asleep = self._tape is None or collective.ended  # type: ignore[attr-defined]
            call = None if asleep else self._guard.run(self._before, method, group, args)
            work = original(group, *args, **kwargs)
            if call is not None and work is not None:
                self._pending[id(work)] = (work, call, group, args)
            return work

        return collective

    def _recording_wait(self, original: Any) -> Any:
        def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
            result = original(work, *args, **kwargs)
            pending = self._pending.pop(id(work), None)
            if pending is not None and self._tape is not None:
                self._guard.run(self._after, *pending[1:])
            return result

        return wait

    def _recording_op(self, name: str, original: Any) -> Any:
        def collective(*args: Any, **kwargs: Any) -> Any:
            call = None if self._tape is None else self._guard.run(self._before_op, name, args, kwargs)
            result = original(*args, **kwargs)
            if call is not None:
                self._guard.run(self._issued, call, result)
            return result

        return collective

    def _before(self, method: str, group: Any, args: Any) -> Call:
        name, given, _ = METHODS[method]
        with DisableTorchFunction():
            sent = _listed(args[given]) if given is not None and len(args) > given else []
            if name == "broadcast" and _is_not_the_root(group, args):
                sent = [ToBeWritten(t) for t in _flat(sent)]
            operation = getattr(args[-1] if args else None, "reduceOp", None)
            said = None if operation is None else str(getattr(operation, "op", operation))
            call = self._made(name, sent, group, said)
            if name in ("send", "recv") and len(args) > 1:
                call.kwargs["peer"] = args[1]
            call.node = method
            return self._known(call)

    def _before_op(self, name: str, args: Any, kwargs: Any) -> Call:
        with DisableTorchFunction():
            given = args[0] if args else kwargs.get("input", kwargs.get("inputs", []))
            call = self._made(OPERATORS[name], _listed(given), group_in(args, kwargs), operation_in(args, kwargs))
            call.node = name
            return self._known(call)

    def _made(self, name: str, given: Any, group: Any, operation: str | None) -> Call:
        tape = self._tape
        assert tape is not None
        entry = f"Distributed.{name}"
        parent = self._inside[-1] if self._inside else None
        call = tape.call("collective", entry, tape.count(entry, "forward"), "forward", parent=parent)
        if self._stacks is not None:
            call.stack = self._stacks.capture(-1, 0, 4)
        call.args = tape.tree(given, self._flags, self._path(call, "input"))
        ranks = dist.get_process_group_ranks(group) if hasattr(group, "group_name") else []
        call.kwargs = {"group": Opaque("torch.distributed.ProcessGroup", None, {"group_ranks": ranks})}
        if operation is not None:
            call.kwargs["op"] = Opaque("torch.distributed.ReduceOp", operation)
        return call

    def _path(self, call: Call, side: str) -> str | None:
        return f"{call.name}.{call.call}.forward.{side}" if self._flags & SAVE else None

    def keep_no_values(self) -> None:
        """Store no values, whatever the plan says of them."""
        self._flags &= ~SAVE

    def _known(self, call: Call) -> Call:
        if self._tape is not None:
            self._tape.more_known(call)
        return call

    def _issued(self, call: Call, result: Any) -> None:
        """Have the results of a functional collective looked at one by one, as they are waited for."""
        tape = self._tape
        if tape is None or tape.awaits is None:
            return
        results = _listed(result)
        found: list[Any] = [None] * len(results)
        self._unwritten[id(call)] = call

        def look(place: int, t: Any) -> None:
            tape.touched(t)  # a collective writes without a trace in the version counter
            found[place] = tape.tree(t, self._flags, self._path(call, f"output.{place}"))
            if None not in found:
                call.out = found
                self._unwritten.pop(id(call), None)
                tape.more_known(call)

        for place, t in enumerate(results):
            tape.awaits(t, partial(look, place))

    def _after(self, call: Call, group: Any, args: Any) -> None:
        tape = self._tape
        assert tape is not None
        name, _, out = METHODS[call.node or ""]
        if out is None or len(args) <= out:
            return
        with DisableTorchFunction():
            written = _listed(args[out])
            for t in _flat(written):
                tape.touched(t)  # a collective writes without a trace in the version counter
                tape.written(t)
            if name == "reduce" and _is_not_the_root(group, args):
                written = [ToBeWritten(t) for t in _flat(written)]
            call.out = tape.tree(written, self._flags, self._path(call, "output"))
            tape.more_known(call)


def _is_not_the_root(group: Any, args: Any) -> bool:
    """Return whether a rank is given nothing by its tensors, or gets nothing there: it is not the one that its options name."""
    root = getattr(args[-1] if args else None, "rootRank", None)
    return root is not None and root != group.rank()


def _listed(x: Any) -> Any:
    return x if isinstance(x, list | tuple) else [x]


def _flat(x: Any) -> list[Any]:
    return [leaf for item in x for leaf in _flat(item)] if isinstance(x, list | tuple) else [x]
