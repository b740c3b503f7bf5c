"""What goes in and out of each MindSpore cell inside a compiled graph, on a CPU (`graph_callbacks` of a plan).

Callbacks are compiled into the graph (see `graph_callback`), so they have to stand there before the first step, and stay in the
graph; they do nothing in a step that is not collected. They come in the order in which the graph runs, on a thread of
MindSpore; the probe waits for the graph before it does anything with the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

from trainprobe.engine.arrays.mindspore_library import HostArray
from trainprobe.engine.capture.mindspore.assignments import assigning_cell
from trainprobe.engine.capture.mindspore.cells import CellInfo, CellTap, is_graph_mode
from trainprobe.engine.capture.mindspore.graph_callback import ALONE, UNKNOWN, GraphCallbacks, RecordedParts
from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import LEFT_OUT, ROOT
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.tape import Tape

IN_A_GRAPH = (
    "inside the graph cells are seen and operators are not; keyword arguments of cells, tensors inside containers of their "
    "arguments and results, results beyond the eighth and the gradients at inputs and at one of several results are not "
    "recorded; `parameters_grad` is what the optimizer is handed; "
    "calls of one cell are numbered in the order in which the graph runs them"
)
LEFT_OUT_OF_GRAPH = (
    f"{LEFT_OUT} the order of a sum and so the bits of the training: {{what}}; `graph_callbacks: all` records them too"
)
CHANGES_BITS = (
    "`graph_callbacks: all` also looks where that can change the order in which MindSpore adds up gradients, so that the last "
    "bits of this training may differ from those without it; `graph_callbacks: true` keeps them"
)
ASSIGNED = (
    f"{LEFT_OUT} the last bits of the training: all cells, as {{kind}}.construct assigns to a parameter: once MindSpore has "
    "compiled that, it compiles later graphs of the process another way. Use ops.assign there, or look in a process without "
    "that cell; `graph_callbacks: all` records them all the same"
)
TOO_LATE = (
    "no callback of the graph was called: MindSpore had compiled the model before the probe was opened. "
    "Open the probe before the first step"
)
_NAMED = 5  # names that a sentence holds
_PLACES = {"input": "args", "output": "out", "grad_output": "args"}  # of a forward or backward call


class GraphCellTap(CellTap):
    """See the module text. In PyNative mode it is a CellTap.

    callbacks: what stands in the cells, for this tap and others. handed: gets (optimizer, number of parameter, gradient).
    """

    handed: Callable[[Any, int, HostArray], None] | None = None

    def __init__(
        self, request: ModuleRequest, guard: Guard, stacks: Stacks | None = None, *, callbacks: GraphCallbacks
    ) -> None:
        super().__init__(request, guard, stacks)
        self.callbacks = callbacks
        self._fired: Counter[tuple[str, str, int]] = Counter()
        self._calls: dict[tuple[str, int, str], Call] = {}
        self._numbers: dict[tuple[str, int], int] = {}  # cell, number of the call since it is watched → in this step
        self._recorded: set[str] = set()  # names of cells with callbacks
        self._held: dict[str, dict[str, Any]] = {}  # name of cell → its parameters' values in this step
        self._about_bits = CHANGES_BITS if callbacks.everything else ""

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Name the cells, and put callbacks into those that are recorded, and into the optimizers."""
        super().open(model, optimizer)
        if is_graph_mode():
            given = optimizer if isinstance(optimizer, list | tuple) else [] if optimizer is None else [optimizer]
            self._guard.run(self._insert, given)

    def _insert(self, optimizers: list[Any]) -> None:
        cells = {id(cell): cell for model in self._models for _, cell in model.cells_and_names()}
        self.callbacks.recomputed = any(info.repeats for info in self.known.values())
        selected = [(info, cells[key]) for key, info in self.known.items() if info.selected and key in cells]
        kind = "" if self.callbacks.everything else assigning_cell()
        if kind:
            self._about_bits = ASSIGNED.format(kind=kind)
            return
        if not self.callbacks.everything:
            self._about_bits = _left_out([(info.name, self.callbacks.parts(cell)) for info, cell in selected])
        self._recorded = {info.name for info, cell in selected if self.callbacks.parts(cell).result}
        for info, cell in selected:
            self.callbacks.cell(cell, partial(self._guard.run, self._arrives, info))
        for one in optimizers:
            if self.handed is not None or self._wants_gradients:
                self.callbacks.optimizer(one, partial(self._guard.run, self._handed, one))

    @property
    def left_out(self) -> str:
        """Which cells are not recorded as a whole, as a sentence; empty where all are."""
        return "" if self.callbacks.everything else self._about_bits

    def limits(self) -> list[str]:
        """Return what is not recorded in the graph, and what that does to the bits of the training, as sentences."""
        return [text for text in (IN_A_GRAPH, self._about_bits) if text]

    @property
    def _wants_gradients(self) -> bool:
        return self.request.backward and "parameter_gradients" in self.request.data

    def begin(self, tape: Tape) -> None:
        """Take what the graph tells."""
        super().begin(tape)
        for kept in (self._fired, self._calls, self._numbers, self._held):
            kept.clear()
        if is_graph_mode():
            self.notes |= dict.fromkeys(self.limits())
        if self.callbacks:
            self._guard.run(self._hold_parameters)

    def end(self, again: bool = False) -> None:
        """Take nothing more; the graph has run, as MindSporeProbe.end_step waits for it."""
        if self._tape is not None and self.callbacks and not self._called and any(i.selected for i in self.known.values()):
            self.notes[TOO_LATE] = None
        self._guard.run(self._order)
        super().end(again)

    def _hold_parameters(self) -> None:
        """Look at the parameters now: a graph that runs holds them."""
        tape, request = self._tape, self.request
        if tape is None or not request.forward or "parameters" not in request.data or not is_graph_mode():
            return
        for info in self.known.values():
            if info.selected and info.parameters:
                at = self._path(info, Call("module", info.name, 0, "forward"))
                self._held[info.name] = {n: tape.tree(p, info.flags, at and f"{at}.parameters.{n}") for n, p in info.parameters}

    def _arrives(self, info: CellInfo, part: str, i: int, number_of_call: int, array: HostArray) -> None:
        """Record a tensor of a cell's call. number_of_call: counted since the cell is watched."""
        tape = self._tape
        backward = part.startswith("grad")
        if tape is None or (not self.request.backward if backward else self._paused):
            return
        key = (info.name, part.removeprefix("grad_"), i)
        if backward:
            number, i = self._number_of_gradient(key, number_of_call), max(i, 0)
            if number is None:
                return  # its forward was not collected
        else:
            number = self._numbers.setdefault((info.name, number_of_call), self._forwards.get(info.name, 0))
            self._fired[key] += 1
        call = self._calls.get((info.name, number, "backward" if backward else "forward"))
        if call is None:
            call = self._begins(info, number, backward)
        what = "input" if _PLACES[part] == "args" else "output"
        if what not in self.request.data or not (backward or self.request.forward):
            return
        at = self._path(info, call)
        if i == ALONE:
            call.out = tape.tree(array, info.flags, at and f"{at}.output")
            tape.more_known(call)
            return
        places = getattr(call, _PLACES[part])
        if places is None:
            places = []
            setattr(call, _PLACES[part], places)
        places += [None] * (i + 1 - len(places))
        places[i] = tape.tree(array, info.flags, at and f"{at}.{what}.{i}")
        tape.more_known(call)

    def _number_of_gradient(self, key: tuple[str, str, int], number_of_call: int) -> int | None:
        """Return the number of the call that a gradient is of; where it is UNKNOWN, backward runs in reverse order."""
        if number_of_call != UNKNOWN:
            return self._numbers.get((key[0], number_of_call))
        back = (key[0], f"grad_{key[1]}", key[2])
        self._fired[back] += 1
        return max(self._fired[key] - self._fired[back], 0)

    def _begins(self, info: CellInfo, number: int, backward: bool) -> Call:
        tape = self._tape
        assert tape is not None
        if not backward:
            self._called += 1
            self._forwards[info.name] = number + 1
            if self._holder(info.name) is None:
                tape.forward_begins(info.name)
        call = Call("module", info.name, number, "backward" if backward else "forward", cls=info.cls, micro=tape.micro)
        self._calls[info.name, number, call.phase] = call
        if not backward and info.name in self._held:
            call.params = self._held[info.name]
        tape.calls.append(call)
        tape.more_known(call)
        return call

    def _holder(self, name: str) -> str | None:
        """Return the nearest recorded cell that holds this one."""
        while name and name != ROOT:
            name = name.rpartition(".")[0] or ROOT
            if name in self._recorded:
                return name
        return None

    def _order(self) -> None:
        """Set in which call each call ran, and put that one first: a graph may hand over the tensors of a cell last."""
        tape = self._tape
        if tape is None:
            return
        for call in self._calls.values():
            call.parent = self._around(call)
        own = {id(call) for call in self._calls.values()}
        places = [i for i, call in enumerate(tape.calls) if id(call) in own]
        calls = [tape.calls[i] for i in places]
        first = {id(call): (i, 0) for i, call in enumerate(calls)}
        for i, call in enumerate(calls):
            above, up = call.parent, 1
            while isinstance(above, Call) and call.phase == "forward":
                first[id(above)] = min(first[id(above)], (i, -up))
                above, up = above.parent, up + 1
        for i, call in zip(places, sorted(calls, key=lambda call: first[id(call)]), strict=True):
            tape.calls[i] = call
        if not tape.micro_given:
            for call in calls:
                call.micro = _outermost(call).call
        left_out = {id(call) for call in calls if not self.request.micro(call.micro or 0)}
        tape.calls[:] = [call for call in tape.calls if id(call) not in left_out]

    def _around(self, call: Call) -> Call | None:
        """Return the call in which a call ran: the calls of a cell are shared out over those of the cell that holds it."""
        holder = self._holder(call.name)
        if holder is None or holder not in self._forwards:
            return None
        number = call.call * self._forwards[holder] // max(self._forwards.get(call.name, 1), 1)
        return self._calls.get((holder, number, "forward"))

    def _handed(self, optimizer: Any, part: str, i: int, number_of_call: int, gradient: HostArray) -> None:
        """Record a gradient that an optimizer is handed, as the parameter's."""
        if self.handed is not None:
            self.handed(optimizer, i, gradient)
        p = optimizer.parameters[i]
        for info in self.known.values() if self._wants_gradients else ():
            for short, own in info.parameters if info.selected else ():
                if own is p:
                    self._parameter(info, short, id(p), gradient)
                    return


def _left_out(cells: list[tuple[str, RecordedParts]]) -> str:
    """Return a sentence that names the cells of which something is not recorded."""
    nothing = [name for name, parts in cells if not parts.result]
    inputs = [name for name, parts in cells if parts.result and len(parts.inputs) < parts.arguments]
    kinds = [("all of {} cells ({})", nothing), ("inputs of {} cells ({})", inputs)]
    what = [text.format(len(names), _some(names)) for text, names in kinds if names]
    return LEFT_OUT_OF_GRAPH.format(what=", ".join(what)) if what else ""


def _some(names: list[str]) -> str:
    return ", ".join([*names[:_NAMED], *(["…"] if len(names) > _NAMED else [])])


def _outermost(call: Call) -> Call:
    while isinstance(call.parent, Call):
        call = call.parent
    return call
