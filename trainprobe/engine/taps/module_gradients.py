"""The gradients at the outputs and inputs of a module call, by hooks on autograd nodes that exist anyway.

How they are found stands in `gradients.py`. Where the compiled parts are there, `native/module_gradients.c` does what the
classes here do, and `places` and `odd_edges` answer it in the rare cases.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import NoneType
from typing import Any

from torch._C import DisableTorchFunction

from trainprobe.compiled import native
from trainprobe.engine.core.containers import children
from trainprobe.engine.core.guard import Guard, attempt
from trainprobe.engine.core.records import Call, Value
from trainprobe.engine.tape import SAVE, Tape
from trainprobe.engine.taps.gradients import Contribution, Edge, Graph, edge_of

UNTOUCHED = "handed on untouched, input and output are one tensor: this is that tensor's whole gradient, whoever uses it"
Edges = list[tuple[str, Edge]]


class GradientWatch:
    """Watches the gradients of module calls for the length of one step."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.tape: Tape | None = None
        self.micro: int | None = None  # whose gradients passed last: under 1F1B it is not the one that ran forward last
        self.graph: Any = Graph() if native is None else native.Graph()
        self._hooks: list[NodeHook] = []
        self._by_node: dict[int, tuple[Any, NodeHook]] = {}
        self._open: list[Contribution] = []

    def end(self) -> None:
        """Hand on the sums that still wait for a consumer, and let go of everything."""
        for waiting in self._open:
            self.guard.run(waiting.flush)
        self._open.clear()
        for hook in self._hooks:
            hook.forget()
        self._hooks.clear()
        self.returned()
        self.tape = self.micro = None

    def returned(self) -> None:
        """Let go of the nodes; called when the outermost module has returned."""
        self.graph.clear()
        self._by_node.clear()

    def watch(self, call: Call, flags: int, floor: int, inputs: Edges, out: Any) -> None:
        """Watch one call. inputs: the edges of what went in; floor: the sequence number of autograd at its beginning."""
        tape = self.tape
        assert tape is not None
        found: Edges = []
        collect_edges(tape, out, "", found)
        if not found:
            return
        backward = Backward(self, call, flags, found, inputs)
        touched: list[Any] = []
        for i, (_, (node, slot)) in enumerate(found):
            untouched = any(edge[0] is node and edge[1] == slot for _, edge in inputs)
            self._hook(touched, node).received.append((slot, backward, i, UNTOUCHED if untouched else None))
        if inputs:
            self.graph.visit([node for _, (node, _) in found], floor)
        for i, (_, edge) in enumerate(inputs):
            consumers = self.graph.consumers(edge, floor)
            summed = None
            if len(consumers) > 1:
                summed = Contribution(len(consumers), partial(backward.input, i))
                self._open.append(summed)
            for node, slot in consumers:
                self._hook(touched, node).sent.append((slot, backward, i, summed))
            if not consumers:
                for _, (node, slot) in found:
                    if node is edge[0] and slot == edge[1]:
                        self._hook(touched, node).shared.append((slot, backward, i))
        for node in touched:
            self._by_node[id(node)][1].attach(node)

    def _hook(self, touched: list[Any], node: Any) -> NodeHook:
        touched.append(node)
        known = self._by_node.get(id(node))
        if known is None:
            known = self._by_node[id(node)] = (node, NodeHook(self))
            self._hooks.append(known[1])
        return known[1]


class Backward:
    """The backward call of one module call, appended to the tape when its first gradient arrives."""

    __slots__ = ("_call", "_flags", "_forward", "_inputs", "_length", "_merged", "_outputs", "_watch")

    def __init__(self, watch: GradientWatch, forward: Call, flags: int, outputs: Edges, inputs: Edges) -> None:
        self._watch = watch
        self._forward = forward
        self._flags = flags
        self._outputs, _, taken = places([path for path, _ in outputs], False)
        self._inputs, self._merged, given = places([path for path, _ in inputs], True)
        self._length = taken, given
        self._call: Call | None = None

    def output(self, i: int, gradient: Any, note: str | None = None) -> None:
        """Take the gradient at output i, with a note where that is not its whole story."""
        self._take("args", self._outputs, i, gradient, note)

    def input(self, i: int, gradient: Any, note: str | None = None) -> None:
        """Take this module's own contribution to the gradient at input i, with a note where that is not its whole story."""
        self._take("out", self._inputs, i, gradient, note)

    def _take(self, side: str, slots: Sequence[tuple[int, str]], i: int, gradient: Any, note: str | None) -> None:
        tape = self._watch.tape
        if tape is None or gradient is None:
            return
        self._watch.micro = self._forward.micro
        call = self._call
        if call is None:
            call = self._call = self._begin(tape)
        index, path = slots[i]
        where: list[Any] = getattr(call, side)
        if where[index] is not None:
            return
        at = None
        if self._flags & SAVE:
            place = "input" if side == "args" else "output"
            at = f"Module.{call.name}.{call.cls}.backward.{call.call}.{place}.{index}{path and '.' + path}"
        value = tape.tree(gradient, self._flags, at)
        if note is not None and isinstance(value, Value):
            value = tape.noted(value, note)
        if side == "out" and i in self._merged and isinstance(value, Value):
            note, others = self._merged[i]
            value = tape.noted(value, note)
            for other in others:
                where[other] = Value(-1, value.dtype, value.shape, requires_grad=False, note=note)
        where[index] = {path: value} if path else value
        tape.told(call)

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
        call.args, call.out = ([None] * length for length in self._length)
        return call


class NodeHook:
    """One hook on one autograd node, for all modules that want what arrives there or what the node sends on.

    received: (slot of the node, backward call, number of the module's output, note). sent: (slot of the node's own inputs,
    backward call, number of the module's input, where to sum when several nodes consume that input). shared: as
    received, for an input that is also an output.
    """

    __slots__ = ("_before", "_behind", "_watch", "received", "sent", "shared")

    def __init__(self, watch: GradientWatch) -> None:
        self._watch: GradientWatch | None = watch
        self._before = self._behind = False  # how the node is hooked
        self.received: list[tuple[int, Backward, int, str | None]] = []
        self.sent: list[tuple[int, Backward, int, Contribution | None]] = []
        self.shared: list[tuple[int, Backward, int]] = []

    def attach(self, node: Any) -> None:
        """Hook the node: behind it if what it sends is wanted, else before it, and once is enough."""
        if self._behind or (self._before and not self.sent):
            return
        if self.sent:
            node.register_hook(self._after)
            self._behind = True
        else:
            node.register_prehook(self._arrived)
            self._before = True

    def forget(self) -> None:
        """Become inert and let go of everything; the hook itself leaves with the graph."""
        self._watch = None
        self.received, self.sent, self.shared = [], [], []

    def _arrived(self, received: Any) -> None:
        if self._watch is not None:
            self._watch.guard.run(self._take, received, None)

    def _after(self, sent: Any, received: Any) -> None:
        if self._watch is not None:
            self._watch.guard.run(self._take, received, sent)

    def _take(self, received: Any, sent: Any) -> None:
        with DisableTorchFunction():
            if sent is None or not self._before:
                for slot, backward, i, note in reversed(self.received):  # the module that returned last is the outermost
                    backward.output(i, received[slot], note)
                for slot, backward, i in self.shared:
                    backward.input(i, received[slot], UNTOUCHED)
            if sent is None:
                return
            for slot, backward, i, summed in self.sent:
                if summed is None:
                    backward.input(i, sent[slot])
                else:
                    summed.add(sent[slot])


def places(paths: list[str], inputs: bool) -> tuple[list[tuple[int, str]], dict[int, tuple[str, list[int]]], int]:
    """Turn paths into places in a list: `2` is place 2; what is nested or named stands behind them, with its path.

    Of places that share one tensor (`0|2`) the first counts. Returns (place, path) of each, then, for inputs, number of the
    path → (note, other places of its tensor), and how long the list is.
    """
    merged: dict[int, tuple[str, list[int]]] = {}
    slots: list[tuple[int, str]] = []
    firsts = [path.partition("|")[0] for path in paths]
    behind = max([int(p) for p in firsts if p.isdigit()], default=-1) + 1
    for i, (whole, path) in enumerate(zip(paths, firsts, strict=True)):
        if path.isdigit():
            slots.append((int(path), ""))
        else:
            slots.append((behind, path))
            behind += 1
        if inputs and whole != path:
            first, *others = whole.split("|")
            text = f"inputs {', '.join([first, *others])} are one tensor: at input {first} stands the sum over them"
            merged[i] = (text, [int(other) for other in others if other.isdigit()])
    taken = [place for place, _ in slots] + [place for _, others in merged.values() for place in others]
    return slots, merged, 1 + max(taken, default=-1)


_NO_EDGES = frozenset({int, float, bool, str, NoneType})


def odd_edges(tape: Tape, x: Any, path: str) -> Edges:
    """Return the edges of all tensors in something that the compiled parts do not look into."""
    found: Edges = []
    collect_edges(tape, x, path, found)
    return found


def _add_edge(x: Any, path: str, found: Edges) -> None:
    edge = edge_of(x)
    for i, (other, known) in enumerate(found):
        if edge is not None and known[0] is edge[0] and known[1] == edge[1]:
            found[i] = (f"{other}|{path or '0'}", known)
            return
    if edge is not None:
        found.append((path or "0", edge))


def _nothing(_: Exception) -> Any:
    return None


def collect_edges(tape: Tape, x: Any, path: str, found: Edges, depth: int = 0) -> None:
    """Collect the gradient edges of all tensors in a structure, with paths; places of one tensor share one, `0|1`."""
    kind = type(x)
    if kind in _NO_EDGES:
        return
    if kind in tape.library.plain or attempt(tape.library.is_tensor, x, otherwise=_nothing):
        attempt(_add_edge, x, path, found, otherwise=_nothing)
        return
    if depth > 8 or issubclass(kind, set | frozenset):
        return
    inside = (
        [(str(i), item) for i, item in enumerate(tuple.__iter__(x))]
        if issubclass(kind, tuple)
        else attempt(children, x, otherwise=_nothing)
    )
    for name, item in inside or ():
        collect_edges(tape, item, f"{path}.{name}" if path else name, found, depth + 1)
