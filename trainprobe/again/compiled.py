"""The same step eager and under `torch.compile`: the same bits, rounding, or another step, and which module makes it so.

    trainprobe.compile_check(loss, model, batch)        # loss(model, batch) returns the scalar

Compilation has layers: Dynamo makes graphs, AOTAutograd their backward, decompositions simpler operators, Inductor code. The
first layer with which the step differs is at fault. Then ever longer beginnings of its graphs are compiled, and the rest runs
as it is: the operator whose turn makes the difference is named, with its module and line.
"""

from __future__ import annotations

import operator
import re
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.words import counted
from trainprobe.engine.training_guard import TrainingGuard
from trainprobe.errors import UsageError
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.modes import Reordered
from trainprobe.preflight.subject import differentiate, distance, scalar_of

LAYERS = {  # name → backend that ends with it
    "Dynamo": "eager",
    "AOTAutograd": "aot_eager",
    "a decomposition": "aot_eager_decomp_partition",
    "Inductor": "inductor",
}
MARGIN = 16  # times the measured floor
_UNREPEATABLE = 1e-2  # relative distance of two eager runs above which nothing can be told from another


@dataclass(frozen=True, slots=True)
class CompileVerdict(Verdict):
    """What `compile_check` answers. Codes: 0 the same bits, 1 within rounding, 2 another step, 3 not comparable."""

    layer: str = ""
    """The layer of compilation that changes the step: Dynamo, AOTAutograd, a decomposition or Inductor."""
    module: str = ""
    """The module whose compilation changes it, "" for the model itself."""
    tensor: str = ""
    """What of it is another one: output, gradient or buffer."""
    operator: str = ""
    """The operator, as the graph has it."""
    line: str = ""
    """File, line and text of its call."""


@dataclass(slots=True)
class _Seen:
    """What one run gave: name → tensor (the loss, gradients, buffers); what compiled beginnings of graphs returned."""

    values: dict[str, Tensor]
    handed: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def compile_check(loss: Callable[[Any, Any], Any], model: Any, batch: Any, *, seconds: float = 600.0) -> CompileVerdict:
    """Run one step eager and compiled by Inductor, compare both, and give back every bit of the state of the model.

    loss: `loss(model, batch)` returns the scalar whose gradient is trained, or something with it as `loss`. model: a module in
    the mode in which it is trained; where parts of it are compiled, these are checked, otherwise the whole. batch: tensors in
    dicts, tuples or lists. seconds: after which the search for the place ends. Nothing is trained. Random numbers are those of
    eager mode in both. Raises UsageError for arguments that have no meaning, and what the loss itself raises.
    """
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"the model is a {type(model).__name__} without trained parameters: compile_check(loss, model, batch)")
    with TrainingGuard(model) as guard:
        return _Check(loss, model, batch, guard, time.monotonic() + seconds).verdict()


class _Check:
    def __init__(self, loss: Any, model: nn.Module, batch: Any, guard: TrainingGuard, deadline: float) -> None:
        self._loss, self._model, self._batch, self._guard, self._deadline = loss, model, Batch(batch), guard, deadline
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._owners = {id(p): name.rpartition(".")[0] for name, p in model.named_parameters()}
        self._names = {id(module): name for name, module in model.named_modules()}
        self._optimized = [m for m in model.modules() if isinstance(m, torch._dynamo.OptimizedModule)]
        self._targets = _targets(model)
        self._floors: dict[str, float] = {}

    def verdict(self) -> CompileVerdict:
        """Compare, and where the step differs find the layer and the place."""
        self._base = base = self._run()
        if not all(bool(torch.isfinite(x).all()) for x in base.values.values()):
            return CompileVerdict(3, "not comparable: the loss or a gradient of the eager step is not finite")
        others = [self._run(), attempt(lambda: self._run(modes=Reordered()), otherwise=lambda _: base), self._run(nudged=True)]
        self._floors = {
            name: max([_eps(x), *(distance(x, other.values[name]) for other in others if name in other.values)])
            for name, x in base.values.items()
        }
        if (again := max(_apart(base, others[0]).values(), default=0.0)) > _UNREPEATABLE:
            return CompileVerdict(3, f"not comparable: two eager runs of this step differ by {again:.1%}")
        whole = _Prefix("inductor")
        seen = attempt(lambda: self._run(whole), otherwise=fault_text)
        if isinstance(seen, str):
            return CompileVerdict(3, f"not comparable: compilation failed, {seen}")
        return self._judged(seen, whole)

    def _judged(self, seen: _Seen, whole: _Prefix) -> CompileVerdict:
        what = f"the loss, {counted(len(self._parameters), 'gradient')} and all buffers; {counted(whole.graphs, 'graph')}"
        what += f" of {counted(len(whole.nodes), 'operator')}"
        if not whole.graphs:
            return CompileVerdict(3, "not comparable: nothing of this step could be compiled")
        apart = _apart(self._base, seen)
        if not any(apart.values()):
            return CompileVerdict(0, f"identical: the same bits eager and compiled ({what})")
        worst = max(apart, key=lambda name: apart[name] / self._floors.get(name, 1e-30))
        if not self._differs(seen):
            ratio = apart[worst] / self._floors[worst]
            return CompileVerdict(1, f"equal within rounding: at most {ratio:.2g} floors apart, {worst} ({what})")
        text = f"{worst} is {apart[worst]:.3g} apart, {apart[worst] / self._floors.get(worst, 1e-30):.3g} measured floors"
        return self._placed(text, seen, whole)

    def _placed(self, text: str, seen: _Seen, whole: _Prefix) -> CompileVerdict:
        for layer, backend in LAYERS.items():
            tried = _Prefix(backend)
            found = seen if backend == "inductor" else self._tried(tried)
            if self._differs(found):
                break
        else:
            raise AssertionError("the last layer differs")
        if backend == "eager":
            module = self._module_of_dynamo()
            return _told(layer, module, self._side(found), "", "", text)
        tried = whole if backend == "inductor" else tried
        low, high = 0, len(tried.nodes)
        while high - low > 1 and time.monotonic() < self._deadline:
            middle = (low + high) // 2
            found = self._tried(_Prefix(backend, middle))
            low, high = (low, middle) if self._differs(found) else (middle, high)
        last = _Prefix(backend, high)
        found, right = self._tried(last), self._tried(_Prefix("eager", high))
        module, name, line = self._place(last, high - 1)
        tensor = self._side(found)
        if tensor == "gradient" and any(
            distance(x, right.handed[name]) > MARGIN * _eps(x)
            for name, x in found.handed.items()
            if name in right.handed and x.shape == right.handed[name].shape
        ):
            tensor = "output"
        more = () if high - low == 1 else (f"the time was over: it is one of the {high - low} operators up to this one",)
        return _told(layer, module, tensor, name, line, text, more)

    def _side(self, seen: _Seen) -> str:
        apart = {name for name, gap in _apart(self._base, seen).items() if gap > MARGIN * self._floors.get(name, 0.0)}
        return (
            "output"
            if "the loss" in apart
            else "gradient"
            if any(name.startswith("gradient") for name in apart)
            else "buffer"
        )

    def _differs(self, seen: _Seen) -> bool:
        return any(gap > MARGIN * self._floors.get(name, 0.0) for name, gap in _apart(self._base, seen).items())

    def _tried(self, backend: Any, targets: list[nn.Module] | None = None) -> _Seen:
        """Return what a run gives; what the eager one gave where this beginning cannot be compiled."""
        return attempt(lambda: self._run(backend, targets=targets), otherwise=self._refused)

    def _refused(self, fault: Exception) -> _Seen:
        import traceback; traceback.print_exception(fault)
        return self._base

    def _module_of_dynamo(self) -> str:
        """Return the innermost module that differs where Dynamo makes a graph of it alone."""
        at, inner = "", list[nn.Module](self._targets)
        while inner and time.monotonic() < self._deadline:
            wrong = next((m for m in inner if self._differs(self._tried(_Prefix("eager"), [m]))), None)
            if wrong is None:
                break
            at, inner = self._names[id(wrong)], _called(wrong)
        return at

    def _place(self, prefix: _Prefix, index: int) -> tuple[str, str, str]:
        node, arguments = prefix.nodes[index]
        stack = list((node.meta.get("nn_module_stack") or {}).values())
        inner = _within(stack[-1][0]) if stack else ""
        known = [
            (_within(list(given.meta["nn_module_stack"].values())[-1][0]), self._owners[id(x)])
            for given, x in arguments
            if id(x) in self._owners and given.meta.get("nn_module_stack")
        ]
        before = next((full.removesuffix(part) for part, full in known if part and full.endswith(part)), "")
        trace = re.findall(r'File "(.+?)", line (\d+), in .+\n\s*(.+)', node.meta.get("stack_trace") or "")
        line = "{}:{}: {}".format(*trace[-1]) if trace else ""
        return (before + inner).strip("."), str(getattr(node.target, "__name__", node.target)), line

    def _run(
        self, prefix: Any = None, *, modes: Any = None, nudged: bool = False, targets: list[nn.Module] | None = None
    ) -> _Seen:
        self._guard.rewind()
        self._guard.clear_gradients()
        torch._dynamo.reset()
        if nudged:
            _nudge(self._parameters.values())
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager" if prefix is None else "default"))
            stack.enter_context(torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False))
            stack.enter_context(torch._functorch.config.patch(enable_autograd_cache=False))
            stack.enter_context(_compiled(self._optimized, self._targets if targets is None else targets, prefix))
            stack.enter_context(torch.enable_grad())
            if modes is not None:
                stack.enter_context(modes)
            loss = scalar_of(self._loss(self._model, self._batch.tree()))
            if not loss.requires_grad:
                raise UsageError("the loss has no graph: it depends on no parameter that is trained")
            differentiate(loss, self._parameters.values())
        values = {"the loss": loss.detach().clone()}
        values |= {f"gradient of {name}": p.grad for name, p in self._parameters.items() if p.grad is not None}
        values |= {f"buffer {name}": b.detach().clone() for name, b in self._model.named_buffers()}
        self._guard.clear_gradients()
        return _Seen(values, {} if prefix is None else prefix.handed)


class _Prefix:
    """A backend that compiles so many operators of all graphs, and runs the others as they are.

    nodes: (operator, [(input of its graph, what was given)]); handed: name → what the cut graph's beginning returned.
    """

    def __init__(self, backend: str, most: int = 10**9) -> None:
        self._backend = torch._dynamo.backends.registry.lookup_backend(backend)
        self._left, self.graphs = most, 0
        self.nodes: list[tuple[Any, list[tuple[Any, Any]]]] = []
        self.handed: dict[str, Tensor] = {}

    def __call__(self, graph: Any, inputs: list[Any]) -> Any:
        from torch.fx.passes.split_module import split_module

        given: list[tuple[Any, Any]] = []
        nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
        holders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self.nodes += [(node, given) for node in nodes]
        self.graphs += bool(nodes)
        taken, self._left = min(self._left, len(nodes)), max(self._left - len(nodes), 0)
        while 0 < taken < len(nodes) and nodes[taken].target is operator.getitem:  # what unpacks a result stays with it
            taken += 1
        if taken == len(nodes):
            run = self._backend(graph, inputs)
        elif taken:
            first = set(nodes[:taken])
            run = split_module(graph, None, lambda node: int(node not in first), keep_original_order=True)  # pyright: ignore
            run.submod_0 = _Begun(run.submod_0, self._backend, self.handed)
        else:
            run = graph.forward

        def noted(*args: Any) -> Any:
            given[:] = zip(holders, args, strict=False)
            return run(*args)

        return noted


class _Begun(nn.Module):
    """The beginning of a graph, compiled at its first call."""

    def __init__(self, part: Any, backend: Any, handed: dict[str, Tensor]) -> None:
        super().__init__()
        self._backend, self._handed, self._run = backend, handed, None
        end = next(node for node in part.graph.nodes if node.op == "output")
        self._alone = not isinstance(end.args[0], tuple)
        self._ends = [end.args[0]] if self._alone else list(end.args[0])
        end.args = (tuple(self._ends),)
        part.recompile()
        self.part = part

    def forward(self, *args: Any) -> Any:
        if self._run is None:
            self._run = self._backend(self.part, list(args))
        out = self._run(*args)
        for node, x in zip(self._ends, out, strict=True):
            if isinstance(x, Tensor) and x.is_floating_point():
                self._handed[str(node)] = x.detach().clone()
        return out[0] if self._alone else out


@contextmanager
def _compiled(optimized: list[Any], targets: list[nn.Module], backend: Any) -> Generator[None]:
    """Let modules be compiled by a backend, and by nothing else."""
    kept = [(module, dict(vars(module))) for module in (*optimized, *targets)]
    try:
        for module in optimized:
            vars(module)["forward"] = module._orig_mod
        for module in targets:
            vars(module).pop("_compiled_call_impl", None)
            if backend is not None:
                module.compile(backend=backend, dynamic=False)
        yield
    finally:
        for module, attributes in kept:
            vars(module).clear()
            vars(module).update(attributes)


def _targets(model: nn.Module) -> list[nn.Module]:
    """Return what is compiled: the outermost parts that the program compiles itself, else the modules that are called."""
    inner: Any = getattr(model, "_orig_mod", None)
    if inner is not None or model._compiled_call_impl is not None:
        return [inner if inner is not None else model]
    parts = [found for child in model.children() for found in _targets(child)] if _compiles(model) else []
    return parts or ([model] if type(model).forward is not nn.Module.forward else _called(model)) if parts or True else []


def _compiles(model: nn.Module) -> bool:
    return any(m._compiled_call_impl is not None or hasattr(m, "_orig_mod") for m in model.modules())


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the modules in one that are called: those in lists in place of the lists."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return [m for child in module.children() for m in (_called(child) if isinstance(child, lists) else [child])]


def _within(path: str) -> str:
    """Return the name of a module below the one whose frame was compiled: L['self'].layers.0 gives layers.0."""
    return re.sub(r"^\w+\[.*?\]\.?", "", path).replace("_modules.", "")


def _apart(a: _Seen, b: _Seen) -> dict[str, float]:
    """Return name → relative distance; infinite where one has it alone."""
    return {
        name: distance(a.values[name], b.values[name]) if name in a.values and name in b.values else float("inf")
        for name in a.values | b.values
    }


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps / 2 if x.is_floating_point() else 0.0


def _nudge(parameters: Any) -> None:
    """Move every weight up or down by its last bit."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in parameters:
            sign = torch.randint(0, 2, p.shape, generator=generator).to(p.device, p.dtype) * 2 - 1
            p.mul_(1 + sign * torch.finfo(p.dtype).eps)


def _told(layer: str, module: str, tensor: str, operator: str, line: str, text: str, more: Any = ()) -> CompileVerdict:
    where = f"{module or 'the model'}{f' ({operator})' if operator else ''}, {tensor}"
    details = [f"called at {line}"] if line else []
    return CompileVerdict(
        2, f"not the same: {layer} changes {where}; {text}", [*details, *more], layer, module, tensor, operator, line
    )
