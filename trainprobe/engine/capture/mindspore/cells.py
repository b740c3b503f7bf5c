"""What goes in and out of each MindSpore cell, and the gradients there, in PyNative mode.

While a step is collected, `mindspore.nn.Cell.__call__` is replaced for the class. No hook is put on a cell: it would be parsed
and compiled with the cell. A gradient is taken by a hook on the tensor, which leaves with the tensor; it is the whole gradient
that arrives there: at an input that of everything that used the tensor, the cell among others, and a note says so. What
MindSpore compiles, it does not call from Python: those cells are seen from outside only, and a note says so.

MindSpore raises errors of its kernels later, at whatever waits for them next. Before this tap reads a value it waits in the
training's own place, so that such an error is raised in the training and not inside the tool.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mindspore
from mindspore.experimental.optim import Optimizer as ListedOptimizer
from mindspore.nn import Cell, Optimizer

from trainprobe.engine.capture import ModelTap
from trainprobe.engine.capture.mindspore.tensor_hooks import compile_without_hooks, hooked, wait
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import ROOT, chunks_of
from trainprobe.engine.core.position import AFTER_FORWARD, Position
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.tape import SAVE, Tape

COMPILED = (
    "MindSpore compiles this model into a graph (GRAPH_MODE, or ms.jit), and Python sees nothing inside one: inputs and "
    "outputs of cells and operators, their gradients and the gradients of parameters are not recorded; parameters, optimizer "
    "state and what the framework reports are. To see the rest, run with mindspore.set_context(mode=mindspore.PYNATIVE_MODE) "
    "and the environment variable MS_JIT=0"
)

INPUTS = (
    "under MindSpore the gradient at an input is taken at the tensor: it is that of everything that used the tensor, and the "
    "share of one cell or operator only where nothing else did"
)
UNCALLED = (
    "not called from Python in this step: nothing used them, or `ms.jit` compiles them. Of what is compiled neither cells "
    "nor operators are seen; MS_JIT=0 in the environment runs it uncompiled"
)
_CONTAINERS = ("CellList", "CellDict", "SequentialCell")
RECOMPUTING = "_recompute_cell"  # the name under which a cell that is recomputed holds what does it


def is_graph_mode() -> bool:
    """Tell whether a cell that is called now is compiled as a whole."""
    import os

    return mindspore.get_context("mode") == mindspore.GRAPH_MODE and os.environ.get("MS_JIT") != "0"


def is_optimizer(cell: Any) -> bool:
    """Tell whether a cell is an optimizer."""
    return isinstance(cell, Optimizer | ListedOptimizer)


def cells_of(models: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield (recorded name, cell) of models; the name of a model itself is empty, or its number where there are several.

    Left out are the optimizers that a cell holds which trains, and what MindSpore puts around a cell that is recomputed.
    """
    for i, model in enumerate(models):
        optimizers = [f"{raw}." for raw, cell in model.cells_and_names() if is_optimizer(cell)]
        for raw, cell in model.cells_and_names():
            if RECOMPUTING not in raw.split(".") and not f"{raw}.".startswith(tuple(optimizers)):
                yield ".".join(filter(None, (str(i) if len(models) > 1 else "", raw))), cell


def parameters_in(cell: Any) -> dict[str, Any]:
    """Return the parameters of a cell itself, by their short names.

    A cell that holds an optimizer has those alone that this updates and no cell inside of it holds: the others are no weights
    of a model but a list of them, a loss scale, sums of gradients. Nor are copies, which a cell makes of the weights that it
    holds (`ParameterTuple.clone("ema")`): moving averages of a training, which no optimizer steps.
    """
    own = {short: p for short, p in cell._params.items() if p is not None}
    own = {short: p for short, p in own.items() if not _is_copy(p, own.values())}
    optimizers = [inner for inner in cell.cells() if is_optimizer(inner)]
    if not optimizers:
        return own
    updated = {id(p) for optimizer in optimizers for p in optimizer.parameters}
    inside = {id(p) for name, inner in cells_of([cell]) if name for p in inner._params.values()}
    return {short: p for short, p in own.items() if id(p) in updated - inside}


def _is_copy(parameter: Any, others: Collection[Any]) -> bool:
    """Tell whether a parameter is the clone of one of the others: `ema.up.weight` of `up.weight`."""
    rest = str(parameter.name).partition(".")[2]
    return "." in rest and any(rest == other.name and parameter.shape == other.shape for other in others)


def parameters_of(models: Sequence[Any]) -> dict[int, tuple[str, Any]]:
    """Return id → (path, parameter) of the parameters of models, each with its first path."""
    found: dict[int, tuple[str, Any]] = {}
    for name, cell in cells_of(models):
        for short, p in parameters_in(cell).items():
            found.setdefault(id(p), (f"{name}.{short}" if name else short, p))
    return found


@dataclass(frozen=True, slots=True)
class CellInfo:
    """A cell of the model as it is recorded."""

    name: str
    cls: str
    parameters: tuple[tuple[str, Any], ...]
    flags: int
    selected: bool
    repeats: bool  # a cell around it, or itself, is recomputed in backward


class CellStructure:
    """Remembers what models are made of: cells and parameters, by identity and by name, and which cells are recomputed."""

    def __init__(self, models: Sequence[Any]) -> None:
        cells = [cell for model in models for _, cell in model.cells_and_names()]
        self._held = [(cell, dict(cell._cells), dict(cell._params), getattr(cell, RECOMPUTING, None)) for cell in cells]
        self._names = [(p, str(p.name)) for cell in cells for p in cell._params.values() if p is not None]

    def holds(self) -> bool:
        """Tell whether the models are still made of the same."""
        return all(
            _same(cell._cells, cells) and _same(cell._params, parameters) and getattr(cell, RECOMPUTING, None) is again
            for cell, cells, parameters, again in self._held
        ) and all(p.name == name for p, name in self._names)


def _same(members: Mapping[str, Any], before: Mapping[str, Any]) -> bool:
    return len(members) == len(before) and all(
        name == was and member is held for (name, member), (was, held) in zip(members.items(), before.items(), strict=True)
    )


class CellTap(ModelTap):
    """See the module text. `parameter_names`: id of parameter → MindSpore's own name, or its path where several have that."""

    def __init__(self, request: ModuleRequest, guard: Guard, stacks: Stacks | None = None) -> None:
        self.request = request
        self._stacks = stacks
        self.known: dict[int, CellInfo] = {}
        self.parameter_names: dict[int, str] = {}
        self.notes: dict[str, None] = {}
        self._guard = guard
        self._models: list[Any] = []
        self._structure: CellStructure | None = None
        self.stack: list[Call] = []  # the calls that are running, outermost first
        self._tape: Tape | None = None
        self._original: Replaced | None = None
        self._compiling: Replaced | None = None
        self._handles: list[Any] = []
        self._forwards: dict[str, int] = {}  # name → calls of this step
        self._recomputed: dict[str, int] = {}
        self._called = 0
        self._paused = False
        self.position: Position | None = None  # notified which cell runs
        self._arrived: Counter[int] = Counter()  # id of parameter → gradients of this step
        self._gradient_calls: dict[tuple[str, int], Call] = {}

    # ---- life --------------------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Name the cells and parameters of a model, or of a list of models."""
        self._models = chunks_of(model)
        self._scan()

    def names(self) -> dict[int, str]:
        """Return id of parameter → name, as the model is now: another dict where it is made of something else than before."""
        if self._structure is not None and not self._structure.holds():
            self._scan()
        return self.parameter_names

    def _scan(self) -> None:
        self.known.clear()
        self._structure = CellStructure(self._models)
        found = parameters_of(self._models)
        often = Counter(p.name for _, p in found.values())
        self.parameter_names = {key: path if often[p.name] > 1 else str(p.name) for key, (path, p) in found.items()}
        named = list(cells_of(self._models))
        repeated = [name for name, cell in named if getattr(cell, RECOMPUTING, None) is not None]
        request, names = self.request, self.parameter_names
        for path, cell in named:
            name = path or ROOT
            own = tuple((n, p) for n, p in parameters_in(cell).items() if request.parameter(names[id(p)]))
            again = any(not outer or f"{name}.".startswith(f"{outer}.") for outer in repeated)
            kind = type(cell).__name__
            flags = request.flags(name, kind)
            self.known.setdefault(id(cell), CellInfo(name, kind, own, flags, request.selected(name), again))

    def begin(self, tape: Tape) -> None:
        """Replace `Cell.__call__`."""
        self.names()
        self._tape = tape
        self.stack.clear()
        self._forwards.clear()
        self._recomputed.clear()
        self._called, self._paused = 0, False
        self._arrived.clear()
        self._gradient_calls.clear()
        if self.request.backward and "parameter_gradients" in self.request.data and not is_graph_mode():
            self._guard.run(self._watch_parameters)
        if self._original is not None:
            return
        original: Any = Cell.__call__
        known = self.known
        run = self._run if self.position is None else self.position.around(self._run)

        def call(cell: Any, *args: Any, **kwargs: Any) -> Any:
            info = known.get(id(cell))
            if info is None or call.ended:  # type: ignore[attr-defined]
                return original(cell, *args, **kwargs)
            return run(info, original, cell, args, kwargs)

        self._original = Replaced(Cell, "__call__", call)
        self._compiling = compile_without_hooks()

    def _uncalled(self) -> list[str]:
        """Return the selected cells that Python did not call in this step, without those that hold others for the program."""
        cells = [info for info in self.known.values() if info.selected and info.cls not in _CONTAINERS]
        return [info.name for info in cells if info.name not in self._forwards]

    def pause(self) -> None:
        """Take no forward calls for a while."""
        self._paused = True

    def resume(self) -> None:
        """Take forward calls again."""
        self._paused = False

    def end(self, again: bool = False) -> None:
        """Put `Cell.__call__` back, and take the hooks off tensors; with `again` the call stays in place, asleep."""
        if self._tape is not None and self._called <= 1 < len(self.known):
            self.notes[COMPILED] = None
        elif self._tape is not None and not is_graph_mode() and not any(note.endswith(UNCALLED) for note in self.notes):
            uncalled = self._uncalled()
            if uncalled:
                several = f"{len(uncalled)} cells, the first of which is {uncalled[0]}, were"
                which = several if len(uncalled) > 1 else f"the cell {uncalled[0]} was"
                self.notes[f"{which} {UNCALLED}"] = None
        if not again and self._original is not None:
            self._original.back()
            self._original = None
            if self._compiling is not None:
                self._compiling.back()
                self._compiling = None
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.stack.clear()
        self._tape = None

    # ---- a call ------------------------------------------------------------------------------------------------

    def _run(self, info: CellInfo, original: Any, cell: Any, args: Any, kwargs: Any) -> Any:
        if self._tape is None or self._paused or self._guard.tripped is not None or is_graph_mode():
            return original(cell, *args, **kwargs)
        wait()
        depth = len(self.stack)
        call = self._guard.run(self._enter, info, args, kwargs)
        try:
            out = original(cell, *args, **kwargs)
            if call is not None:
                wait()
                self._guard.run(self._leave, info, call, args, out)
            if self.position is not None and not depth:
                self.position.is_in(AFTER_FORWARD)
            return out
        finally:
            del self.stack[depth:]

    def _enter(self, info: CellInfo, args: Any, kwargs: Any) -> Call:
        tape, request = self._tape, self.request
        assert tape is not None
        self._called += 1
        parent = self.stack[-1] if self.stack else None
        again = info.repeats and (parent.phase == "recompute" if parent is not None else info.name in self._forwards)
        if parent is None and not again:
            tape.forward_begins(info.name)
            if self.position is not None:
                self.position.forward(tape.micro or 0)
        phase = "recompute" if again else "forward"
        stack = self._stacks.capture(-1, 0) if self._stacks is not None else -1
        number = self._number(info.name, again)
        call = Call("module", info.name, number, phase, cls=info.cls, micro=tape.micro, parent=parent, stack=stack)
        if info.selected and request.micro(tape.micro) and (request.recompute or not again):
            at = self._path(info, call)
            if request.forward:
                if "input" in request.data:
                    call.args = tape.tree(args, info.flags, at and f"{at}.input")
                if kwargs and "kwargs" in request.data:
                    call.kwargs = tape.tree(kwargs, info.flags, at and f"{at}.kwargs")
                if info.parameters and "parameters" in request.data:
                    call.params = {n: tape.tree(p, info.flags, at and f"{at}.parameters.{n}") for n, p in info.parameters}
            tape.calls.append(call)
            tape.more_known(call)
        self.stack.append(call)
        return call

    def _number(self, name: str, again: bool) -> int:
        """Number a call. A recomputed one has the number of the latest forward not recomputed yet: backward is reverse."""
        if again:
            number = self._recomputed[name] = max(self._recomputed.get(name, self._forwards.get(name, 0)) - 1, 0)
            return number
        number = self._forwards.get(name, 0)
        self._forwards[name] = number + 1
        return number

    def _leave(self, info: CellInfo, call: Call, args: Any, out: Any) -> None:
        tape, request = self._tape, self.request
        if tape is None or not info.selected or not request.micro(call.micro or 0):
            return
        if request.forward and "output" in request.data and (request.recompute or call.phase != "recompute"):
            at = self._path(info, call)
            call.out = tape.tree(out, info.flags, at and f"{at}.output")
            tape.more_known(call)
        if request.backward:
            back = Call("module", info.name, call.call, "backward", cls=info.cls, micro=call.micro, parent=call.parent)
            tensors = {"input": out, "output": args}  # of backward: what goes into it arrives at the outputs
            for part in ("input", "output"):
                if part in request.data:
                    for i, t in enumerate(tensors[part] if isinstance(tensors[part], tuple | list) else [tensors[part]]):
                        if isinstance(t, mindspore.Tensor):
                            self._watch(info, back, part, i, t)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def _watch(self, info: CellInfo, back: Call, part: str, i: int, t: Any) -> None:
        """Take the gradient at a tensor when it arrives."""
        arrive = partial(self._arrive, info, back, part, i)

        handle = hooked(t, lambda gradient: self._guard.run(arrive, gradient))
        if handle is not None:
            self._handles.append(handle)

    def _arrive(self, info: CellInfo, back: Call, part: str, i: int, gradient: Any) -> None:
        tape = self._tape
        if tape is None:
            return
        if back.args is None:
            back.args, back.out = [], []
            tape.calls.append(back)
        places = back.args if part == "input" else back.out
        if i < len(places) and places[i] is not None:
            return  # a tensor that lives on, such as a parameter, is reached by the micro-steps behind too
        at = self._path(info, back)
        value = tape.tree(gradient, info.flags, at and f"{at}.{part}.{i}")
        if part == "output":
            self.notes[INPUTS] = None
        places += [None] * (i + 1 - len(places))
        places[i] = value
        tape.more_known(back)

    def _watch_parameters(self) -> None:
        """Take the gradient of each selected parameter when it arrives: one a backward, of all that used the parameter."""
        seen: set[int] = set()
        for info in self.known.values():
            for short, p in info.parameters if info.selected else ():
                if id(p) not in seen and p.requires_grad:
                    seen.add(id(p))
                    handle = hooked(p, partial(self._guard.run, self._parameter, info, short, id(p)))
                    if handle is not None:
                        self._handles.append(handle)

    def _parameter(self, info: CellInfo, short: str, key: int, gradient: Any) -> None:
        tape = self._tape
        if tape is None or not self.request.micro(tape.micro):
            return
        number = self._arrived[key]
        self._arrived[key] += 1
        call = self._gradient_calls.get((info.name, number))
        if call is None:
            call = self._gradient_calls[info.name, number] = tape.call("parameter", info.name, number, "backward", info.cls)
            call.params = {}
        at = f"Cell.{info.name}.{info.cls}.parameters_grad.{number}.{short}" if info.flags & SAVE else None
        call.params[short] = tape.tree(gradient, info.flags, at)
        tape.more_known(call)

    def _path(self, info: CellInfo, call: Call) -> str | None:
        return f"Cell.{info.name}.{info.cls}.{call.phase}.{call.call}" if info.flags & SAVE else None
