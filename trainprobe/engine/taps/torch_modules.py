"""Level L0: every call of every module, its inputs, outputs and parameters, and the gradients of all of them.

While a step is collected `torch.nn.Module._call_impl` is replaced for the whole class, and put back when the step ends.
No hook is put on a module, so nothing is left on the model that would be pickled, copied or compiled, and on a step
that is not collected there is nothing at all. (`__call__` itself would do as well, but setting a slot makes Python
visit every subclass of Module, twice a step.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from types import NoneType
from typing import Any

import torch
from torch._C import DisableTorchFunction, _current_graph_task_id

from trainprobe.compiled import native
from trainprobe.engine.guard import Guard
from trainprobe.engine.naming import ROOT, Rename, count_outer_wrappers, is_outer_wrapper, logical_name
from trainprobe.engine.records import Call, Value
from trainprobe.engine.stacks import Stacks
from trainprobe.engine.tape import SAVE, Tape
from trainprobe.engine.taps.gradients import Contribution, Edge, Graph, edge_of, sequence_number
from trainprobe.engine.taps.replaced import Replaced

# Dump entries may leave these parts out (a plan's `data`).
INPUTS, KWARGS, OUTPUTS, PARAMETERS, PARAMETER_GRADIENTS = "input", "kwargs", "output", "parameters", "parameter_gradients"


_UNTOUCHED = "handed on untouched, input and output are one tensor: this is that tensor's whole gradient, whoever uses it"


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """A module of the model as it is recorded: logical name, class, own parameters, and what is wanted of it."""

    name: str
    cls: str
    parameters: tuple[tuple[str, Any], ...]
    flags: int
    selected: bool
    compiled: bool


@dataclass(frozen=True, slots=True)
class ModulesWanted:
    """What a plan wants of modules. parameter, micro: whether a parameter of this name, and this micro-batch, is recorded."""

    flags: Callable[[str], int]
    selected: Callable[[str], bool]
    data: frozenset[str]
    forward: bool = True
    backward: bool = True
    recompute: bool = True
    parameter: Callable[[str], bool] = lambda name: True
    micro: Callable[[int], bool] = lambda micro: True


class ModuleTap:
    """See the module text. `stack` holds the calls that are running, outermost first; the op tap reads its top."""

    def __init__(self, wanted: ModulesWanted, guard: Guard, stacks: Stacks | None, rename: Rename | None = None) -> None:
        self.wanted = wanted
        self.stack: list[Call] = []
        self.paused = 0
        self.known: dict[int, ModuleInfo] = {}
        self.parameter_names: dict[int, str] = {}
        self._wrappers: set[int] = set()
        self.notes: dict[str, None] = {}
        self.on_compiled: list[Callable[[bool], None]] = []
        self.code = id(ModuleTap._run.__code__)  # where a call stack enters a module: the op tap stops walking there
        self._guard = guard
        self._stacks = stacks
        self._rename = rename
        self._models: list[Any] = []
        self._tape: Tape | None = None
        self._graph: Any = Graph() if native is None else native.Graph()
        self._node_hooks: list[NodeHook] = []
        self._open_contributions: list[Contribution] = []
        self._thread = 0
        self._original: Replaced | None = None
        self._accumulators: list[tuple[Any, Any]] = []
        self._gradient_calls: dict[tuple[str, int], Call] = {}
        self._arrived: dict[int, int] = {}  # id of parameter → gradients that arrived this step
        self._recomputed: dict[str, int] = {}
        self._forwards: dict[str, int] = {}
        self._micros: dict[int, bool] = {}  # what the plan says of a micro-batch, asked once a step

    # ---- life --------------------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Name the modules of a model, or of a list of model chunks (virtual pipeline stages)."""
        self._models = list(model) if isinstance(model, list | tuple) else [model]
        self.scan()

    def scan(self) -> None:
        """Name all modules anew; called when a model has grown or was wrapped since."""
        self.known.clear()
        self.parameter_names.clear()
        self._wrappers.clear()
        for _, handle in self._accumulators:
            handle.remove()
        self._accumulators.clear()
        for chunk, model in enumerate(self._models):
            prefix = f"{chunk}." if len(self._models) > 1 else ""
            modules = list(model.named_modules())
            outer = count_outer_wrappers(name for name, _ in modules if name)
            for raw, module in modules:
                if is_outer_wrapper(raw, outer):
                    self._wrappers.add(id(module))
                    continue  # the model inside is recorded: the same names and numbers with and without a wrapper
                plain = prefix + logical_name(raw, outer_wrappers=outer)
                name = self._rename(plain) if self._rename is not None else plain  # sees the chunk: it may number over all
                every = [(n, p, f"{name}.{n}" if name else n) for n, p in module._parameters.items() if p is not None]
                for _, p, whole in every:
                    self.parameter_names.setdefault(id(p), whole)
                own = tuple((n, p) for n, p, whole in every if self.wanted.parameter(whole))
                compiled = hasattr(module, "_orig_mod") or module._compiled_call_impl is not None
                shown = name or ROOT
                if compiled:
                    self._note_compiled(shown)
                self.known[id(module)] = ModuleInfo(
                    shown, type(module).__name__, own, self.wanted.flags(shown), self.wanted.selected(shown), compiled
                )

    def begin(self, tape: Tape) -> None:
        """Replace `torch.nn.Module._call_impl` and watch parameter gradients."""
        self._tape = tape
        self.stack.clear()
        self._recomputed.clear()
        self._gradient_calls.clear()
        self._arrived.clear()
        self._thread = get_ident()
        self._forwards.clear()
        self._micros.clear()
        self.install()
        if self.wanted.backward and PARAMETER_GRADIENTS in self.wanted.data:
            self._watch_parameters()

    def install(self) -> None:
        """Put the recording call in place."""
        if self._original is not None:
            return
        original = torch.nn.Module._call_impl
        known, run = self.known, self._run

        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            info = known.get(id(module))
            if info is None or call.ended:  # type: ignore[attr-defined]
                return original(module, *args, **kwargs)
            return run(info, original, module, args, kwargs)

        self._original = Replaced(torch.nn.Module, "_call_impl", call)

    def uninstall(self) -> None:
        """Put the original call back."""
        if self._original is not None:
            self._original.back()
        self._original = None

    def pause(self) -> None:
        """Take no forward calls for a while."""
        self.uninstall()

    def resume(self) -> None:
        """Take forward calls again."""
        self.install()

    def end(self, again: bool = False) -> None:
        """Remove everything; with `again`, the call in place and the hooks on accumulators sleep until the next step.

        (Each change of a class attribute makes Python forget what it has cached for every subclass of Module.)
        """
        if not again:
            self.uninstall()
        for contribution in self._open_contributions:
            self._guard.run(contribution.flush)
        self._open_contributions.clear()
        for hook in self._node_hooks:
            hook.forget()
        self._node_hooks.clear()
        if not again:
            for _, handle in self._accumulators:
                handle.remove()
            self._accumulators.clear()
        self._graph.clear()
        self._tape = None

    # ---- a call ------------------------------------------------------------------------------------------------

    def _run(self, info: ModuleInfo, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        if info.compiled:
            return self._run_compiled(info, original, module, args, kwargs)
        if self._tape is None or self._guard.tripped is not None or torch.compiler.is_compiling():
            return original(module, *args, **kwargs)
        if get_ident() != self._thread and _current_graph_task_id() == -1:
            self.notes[
                "a module was called from another thread than the one that began the step: its calls are not recorded"
            ] = None
            return original(module, *args, **kwargs)
        entered = self._guard.run(self._enter, info, args, kwargs)
        if entered is None:
            return original(module, *args, **kwargs)
        depth = len(self.stack)
        try:
            out = original(module, *args, **kwargs)
            self._guard.run(self._leave, info, entered, out)
            return out
        finally:
            del self.stack[depth - 1 :]
            if depth == 1:
                self._graph.clear()

    def _enter(self, info: ModuleInfo, args: Any, kwargs: Any) -> tuple[Call, int, list[tuple[str, Edge]]]:
        tape, wanted = self._tape, self.wanted
        assert tape is not None
        with DisableTorchFunction():
            again = _current_graph_task_id() != -1
            parent = self.stack[-1] if self.stack else None
            if parent is None and not again:
                tape.forward_begins(info.name)
            call = self._new_call(info, again, parent)
            edges: list[tuple[str, Edge]] = []
            if info.selected and not (again and not wanted.recompute) and self._wants(tape.micro):
                save = info.flags & SAVE
                at = f"Module.{info.name}.{info.cls}.{call.phase}.{call.call}" if save else None
                if wanted.forward:
                    if INPUTS in wanted.data:
                        call.args = tape.tree(args, info.flags, at and f"{at}.input")
                    if kwargs and KWARGS in wanted.data:
                        call.kwargs = tape.tree(kwargs, info.flags, at and f"{at}.kwargs")
                    if info.parameters and PARAMETERS in wanted.data:
                        call.params = {n: tape.tree(p, info.flags, at and f"{at}.parameters.{n}") for n, p in info.parameters}
                if wanted.backward and torch.is_grad_enabled() and INPUTS in wanted.data:
                    _edges(tape, args, "", edges)
                    _edges(tape, kwargs, "", edges)
                tape.calls.append(call)
            self.stack.append(call)
            return call, sequence_number(), edges

    def _wants(self, micro: int) -> bool:
        wanted = self._micros.get(micro)
        if wanted is None:
            wanted = self._micros[micro] = self.wanted.micro(micro)
        return wanted

    def _new_call(self, info: ModuleInfo, again: bool, parent: Call | None) -> Call:
        """Number a call. A recomputed one has the number of the latest forward not recomputed yet: backward is reverse."""
        tape = self._tape
        assert tape is not None
        if again:
            number = self._recomputed.get(info.name, self._forwards.get(info.name, 0)) - 1
            self._recomputed[info.name] = number = max(number, 0)
        else:
            number = self._forwards.get(info.name, 0)
            self._forwards[info.name] = number + 1
        stack = -1
        if self._stacks is not None:
            stack = self._stacks.capture(parent.stack if parent is not None else -1, self.code, 5)
        phase = "recompute" if again else "forward"
        return Call("module", info.name, number, phase, cls=info.cls, micro=tape.micro, parent=parent, stack=stack)

    def _leave(self, info: ModuleInfo, entered: tuple[Call, int, list[tuple[str, Edge]]], out: Any) -> None:
        tape, wanted = self._tape, self.wanted
        call, floor, edges = entered
        if tape is None or not info.selected or not self._wants(call.micro or 0):
            return
        with DisableTorchFunction():
            if wanted.forward and OUTPUTS in wanted.data and not (call.phase == "recompute" and not wanted.recompute):
                at = f"Module.{info.name}.{info.cls}.{call.phase}.{call.call}.output" if info.flags & SAVE else None
                call.out = tape.tree(out, info.flags, at)
            if wanted.backward and torch.is_grad_enabled():
                self._watch_gradients(info, call, floor, edges, out)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _watch_gradients(self, info: ModuleInfo, call: Call, floor: int, edges: list[tuple[str, Edge]], out: Any) -> None:
        tape = self._tape
        assert tape is not None
        found: list[tuple[str, Edge]] = []
        _edges(tape, out, "", found)
        if not found:
            return
        backward = Backward(self, info, call, found, edges)
        hooks: dict[int, NodeHook] = {}
        for i, (_, (node, slot)) in enumerate(found):
            untouched = any(edge[0] is node and edge[1] == slot for _, edge in edges)
            self._hook(hooks, node).received.append((slot, i, _UNTOUCHED if untouched else None))
        if edges:
            self._graph.visit([node for _, (node, _) in found], floor)
        for i, (_, edge) in enumerate(edges):
            consumers = self._graph.consumers(edge, floor)
            contribution = None
            if len(consumers) > 1:
                contribution = Contribution(len(consumers), partial(backward.input, i))
                self._open_contributions.append(contribution)
            for node, slot in consumers:
                self._hook(hooks, node).sent.append((slot, i, contribution))
            if not consumers:
                for _, (node, slot) in found:
                    if node is edge[0] and slot == edge[1]:
                        self._hook(hooks, node).shared.append((slot, i))
        for hook in hooks.values():
            hook.attach(backward)

    def _hook(self, hooks: dict[int, NodeHook], node: Any) -> NodeHook:
        hook = hooks.get(id(node))
        if hook is None:
            hook = hooks[id(node)] = NodeHook(self, node)
            self._node_hooks.append(hook)
        return hook

    def _watch_parameters(self) -> None:
        """Watch what reaches each parameter's gradient accumulator: one gradient a backward, before it is added."""
        if self._accumulators:
            return  # still there from the step before
        seen: set[int] = set()
        for model in self._models:
            for module in model.modules():
                info = self.known.get(id(module))
                if info is None and id(module) not in self._wrappers:
                    self.scan()  # the model has grown since it was opened
                    info = self.known.get(id(module))
                if info is None or not info.selected:
                    continue
                for short, p in info.parameters:
                    if id(p) in seen or not p.requires_grad or not p.is_leaf:
                        continue
                    seen.add(id(p))
                    edge = edge_of(p)
                    if edge is not None:  # the parameter holds its accumulator only weakly, so it is held here
                        handle = edge[0].register_prehook(partial(self._parameter, info, short, id(p)))
                        self._accumulators.append((edge[0], handle))

    def _parameter(self, info: ModuleInfo, short: str, key: int, gradients: Any) -> None:
        if self._tape is not None:
            self._guard.run(self._record_parameter, info, short, key, gradients[0])

    def _record_parameter(self, info: ModuleInfo, short: str, key: int, gradient: Any) -> None:
        tape = self._tape
        if tape is None or gradient is None or not self._wants(tape.micro):
            return
        with DisableTorchFunction():
            number = self._arrived.get(key, 0)
            self._arrived[key] = number + 1
            call = self._gradient_call(info, number)
            at = f"Module.{info.name}.{info.cls}.parameters_grad.{number}.{short}" if info.flags & SAVE else None
            call.params[short] = tape.tree(gradient, info.flags, at)

    def _gradient_call(self, info: ModuleInfo, number: int) -> Call:
        tape = self._tape
        assert tape is not None
        call = self._gradient_calls.get((info.name, number))
        if call is None:
            call = tape.call("parameter", info.name, number, "backward", info.cls)
            call.params = {}
            self._gradient_calls[info.name, number] = call
        return call

    def unwatched_parameters(self) -> None:
        """Record `p.grad` of parameters whose accumulator saw nothing this step: sharded ones are filled by their framework."""
        tape = self._tape
        if tape is None or not (self.wanted.backward and PARAMETER_GRADIENTS in self.wanted.data):
            return
        for model in self._models:
            for module in model.modules():
                info = self.known.get(id(module))
                if info is None or not info.selected:
                    continue
                for short, p in info.parameters:
                    if p.grad is not None and id(p) not in self._arrived:
                        self._record_parameter(info, short, id(p), p.grad)

    # ---- compiled regions --------------------------------------------------------------------------------------

    def _note_compiled(self, name: str) -> None:
        self.notes[
            f"{name} is compiled: what happens inside it cannot be seen. To see it, run the step uncompiled "
            "(torch.compiler.set_stance('force_eager') around the collected step, or compile less of the model)."
        ] = None

    def _run_compiled(self, info: ModuleInfo, original: Any, module: Any, args: Any, kwargs: Any) -> Any:
        """Run a compiled module exactly as it would run without the tool: what it was compiled from must not change."""
        outermost = self.paused == 0
        if outermost:
            for switch in self.on_compiled:
                switch(False)
            self.uninstall()
        self.paused += 1
        try:
            return original(module, *args, **kwargs)
        finally:
            self.paused -= 1
            if outermost and self._tape is not None:
                self.install()
                for switch in reversed(self.on_compiled):
                    switch(True)


class Backward:
    """The backward call of one module call, appended to the tape when its first gradient arrives."""

    __slots__ = ("_call", "_forward", "_info", "_inputs", "_merged", "_outputs", "_tap")

    def __init__(
        self, tap: ModuleTap, info: ModuleInfo, forward: Call, outputs: list[tuple[str, Edge]], inputs: list[tuple[str, Edge]]
    ) -> None:
        self._tap = tap
        self._info = info
        self._forward = forward
        self._outputs = _slots([path.partition("|")[0] for path, _ in outputs])
        self._inputs = _slots([path.partition("|")[0] for path, _ in inputs])
        self._merged: dict[int, tuple[str, list[int]]] = {}
        for i, (path, _) in enumerate(inputs):
            if "|" in path:
                first, *others = path.split("|")
                text = f"inputs {', '.join([first, *others])} are one tensor: at input {first} stands the sum over them"
                self._merged[i] = (text, [int(other) for other in others if other.isdigit()])
        self._call: Call | None = None

    def output(self, i: int, gradient: Any, note: str | None = None) -> None:
        """Take the gradient at output i, with a note where that is not its whole story."""
        self._take("args", self._outputs, i, gradient, note)

    def input(self, i: int, gradient: Any, note: str | None = None) -> None:
        """Take this module's own contribution to the gradient at input i, with a note where that is not its whole story."""
        self._take("out", self._inputs, i, gradient, note)

    def _take(self, side: str, slots: Sequence[tuple[int, str]], i: int, gradient: Any, note: str | None) -> None:
        tape = self._tap._tape
        if tape is None or gradient is None:
            return
        call = self._call
        if call is None:
            call = self._call = self._begin(tape)
        index, path = slots[i]
        where: list[Any] = getattr(call, side)
        if where[index] is not None:
            return
        at = None
        if self._info.flags & SAVE:
            place = "input" if side == "args" else "output"
            at = f"Module.{self._info.name}.{self._info.cls}.backward.{call.call}.{place}.{index}{path and '.' + path}"
        value = tape.tree(gradient, self._info.flags, at)
        if note is not None and isinstance(value, Value):
            value = value.with_note(note)
        if side == "out" and i in self._merged and isinstance(value, Value):
            note, others = self._merged[i]
            value = value.with_note(note)
            for other in others:
                where[other] = Value(-1, value.dtype, value.shape, requires_grad=False, note=note)
        where[index] = {path: value} if path else value

    def _begin(self, tape: Tape) -> Call:
        forward = self._forward
        call = Call(
            "module",
            forward.name,
            forward.call,
            "backward",
            cls=forward.cls,
            micro=forward.micro,
            parent=forward.parent,  # the parent's forward; named as its backward when it is written
        )
        tape.calls.append(call)
        call.args = [None] * len(_slots_taken(self._outputs))
        call.out = [None] * len(_slots_taken(self._inputs, [i for _, others in self._merged.values() for i in others]))
        return call


class NodeHook:
    """One hook on one autograd node: what arrives there, and what the node sends on.

    received: (slot of the node, number of the module's output, note). sent: (slot of the node's own inputs, number of
    the module's input, where to sum when several nodes consume that input). shared: as received, for an input that is
    also an output.
    """

    __slots__ = ("_backward", "_node", "_tap", "received", "sent", "shared")

    def __init__(self, tap: ModuleTap, node: Any) -> None:
        self._tap: ModuleTap | None = tap
        self._node: Any = node
        self._backward: Backward | None = None
        self.received: list[tuple[int, int, str | None]] = []
        self.sent: list[tuple[int, int, Contribution | None]] = []
        self.shared: list[tuple[int, int]] = []

    def attach(self, backward: Backward) -> None:
        """Hook the node: behind it if what it sends is wanted, else before it."""
        self._backward = backward
        if self.sent:
            self._node.register_hook(self._after)
        else:
            self._node.register_prehook(self._before)
        self._node = None

    def forget(self) -> None:
        """Become inert and let go of everything; the hook itself leaves with the graph."""
        self._tap = self._backward = self._node = None

    def _before(self, received: Any) -> None:
        tap = self._tap
        if tap is not None:
            tap._guard.run(self._take, received, ())

    def _after(self, sent: Any, received: Any) -> None:
        tap = self._tap
        if tap is not None:
            tap._guard.run(self._take, received, sent)

    def _take(self, received: Any, sent: Any) -> None:
        backward = self._backward
        if backward is None:
            return
        with DisableTorchFunction():
            for slot, i, note in self.received:
                backward.output(i, received[slot], note)
            for slot, i in self.shared:
                backward.input(i, received[slot], _UNTOUCHED)
            for slot, i, contribution in self.sent:
                if contribution is None:
                    backward.input(i, sent[slot])
                else:
                    contribution.add(sent[slot])


def _slots(paths: list[str]) -> Sequence[tuple[int, str]]:
    """Turn paths into places in a list: `2` is place 2; what is nested or named stands behind them, with its path."""
    if paths == ["0"]:
        return _FIRST
    plain = [int(p) for p in paths if p.isdigit()]
    behind = max(plain, default=-1) + 1
    out: list[tuple[int, str]] = []
    for path in paths:
        if path.isdigit():
            out.append((int(path), ""))
        else:
            out.append((behind, path))
            behind += 1
    return out


def _slots_taken(slots: Sequence[tuple[int, str]], more: Sequence[int] = ()) -> range:
    """Return the places of a list that has room for all of them."""
    if slots is _FIRST and not more:
        return range(1)
    return range(1 + max([index for index, _ in slots] + list(more), default=-1) if slots else 0)


_FIRST = ((0, ""),)
_NO_EDGES = frozenset({int, float, bool, str, NoneType})


def _edges(tape: Tape, x: Any, path: str, found: list[tuple[str, Edge]], depth: int = 0) -> None:
    """Collect the gradient edges of all tensors in a structure, with paths; places of one tensor share one, `0|1`."""
    kind = type(x)
    if kind in _NO_EDGES:
        return
    if kind in tape.library.plain or tape.library.is_tensor(x):
        if x.requires_grad:
            edge = edge_of(x)
            for i, (other, known) in enumerate(found):
                if edge is not None and known[0] is edge[0] and known[1] == edge[1]:
                    found[i] = (f"{other}|{path or '0'}", known)
                    return
            if edge is not None:
                found.append((path or "0", edge))
        return
    if depth > 8:
        return
    if isinstance(x, dict):
        for k, v in x.items():
            _edges(tape, v, f"{path}.{k}" if path else str(k), found, depth + 1)
    elif isinstance(x, list | tuple):
        for i, v in enumerate(x):
            _edges(tape, v, f"{path}.{i}" if path else str(i), found, depth + 1)
    elif hasattr(x, "__dataclass_fields__"):
        for k in x.__dataclass_fields__:
            _edges(tape, getattr(x, k), f"{path}.{k}" if path else str(k), found, depth + 1)
