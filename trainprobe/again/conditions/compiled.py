"""Compiled instead of eager: the same bits, rounding, or another step, and which module makes it so.

    trainprobe.compile_check(loss, model, batch)        # loss(model, batch) returns the scalar

Compilation has layers: Dynamo makes graphs, AOTAutograd their backward, decompositions simpler operators, Inductor code. The
first layer with which the step differs is at fault. Then ever longer beginnings of its graphs are compiled, and the rest runs
as it is: the operator whose turn makes the difference is named, with its module and line.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn
from torch._dynamo.external_utils import wrap_inline
from torch._functorch import config as aot
from torch._inductor import config as inductor

from trainprobe.again.floors import MARGIN, nudged, verdict_of
from trainprobe.again.graph_beginning import Beginning, module_and_line
from trainprobe.again.script_runs import Script, of_a_script, script_of
from trainprobe.comparison.answers import Html, Json, answered
from trainprobe.comparison.verdict import Verdict
from trainprobe.engine.capture.gathering import ranks
from trainprobe.engine.capture.step_gradients import differentiate, distance
from trainprobe.engine.capture.step_modes import Reordered
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.words import counted
from trainprobe.engine.training_guard import TrainingGuard
from trainprobe.errors import UsageError
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.script.command import Learnt, at_first_update
from trainprobe.preflight.subject import scalar_of

LAYERS = {  # name → backend that ends with it
    "Dynamo": "eager",
    "AOTAutograd": "aot_eager",
    "a decomposition": "aot_eager_decomp_partition",
    "Inductor": "inductor",
}
_UNREPEATABLE = 1e-2  # relative distance of two eager runs above which nothing can be told from another
_LEAST = 1e-30  # floor of whole numbers
Values = dict[str, Tensor]  # "the loss", "gradient of …", "buffer …" → what a run left


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

    def to_json(self) -> dict[str, Any]:
        """Return the answer as JSON values."""
        return asdict(self)


def compile_check(loss: Callable[[Any, Any], Any], model: Any, batch: Any, *, seconds: float = 600.0) -> CompileVerdict:
    """Run one step eager and compiled by Inductor, compare both, and give back every bit of the state of the model.

    loss: `loss(model, batch)` returns the scalar whose gradient is trained, or something with it as `loss`. model: a module in
    the mode in which it is trained; where parts of it are compiled, these are checked, otherwise the whole. batch: tensors in
    dicts, tuples or lists. seconds: after which the search for the place ends. Nothing is trained. Random numbers are those of
    eager mode in both. Raises UsageError for arguments that have no meaning, and what the loss itself raises.
    """
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        raise UsageError(f"the model is a {type(model).__name__} without trained parameters: compile_check(loss, model, batch)")
    try:
        with TrainingGuard(model, compiles=True) as guard:
            return _Check(loss, model, batch, guard, time.monotonic() + seconds).verdict()
    finally:
        torch._dynamo.reset()  # it holds what was compiled here


class _Check:
    def __init__(self, loss: Any, model: nn.Module, batch: Any, guard: TrainingGuard, deadline: float) -> None:
        self._loss, self._model, self._batch, self._guard, self._deadline = loss, model, Batch(batch), guard, deadline
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names = {id(module): name.replace("_orig_mod.", "") for name, module in model.named_modules()}
        self._targets = _targets(model)
        self._base: Values = {}
        self._floors: dict[str, float] = {}

    def verdict(self) -> CompileVerdict:
        """Compare, and where the step differs find the layer and the place."""
        base = self._base = self._run()
        if not all(bool(torch.isfinite(x).all()) for x in base.values()):
            return CompileVerdict(3, "not comparable: the loss, a gradient or a buffer of the eager step is not finite")
        again = self._run()
        if (gap := max(_apart(base, again).values())) > _UNREPEATABLE:
            return CompileVerdict(3, f"not comparable: two eager runs of this step differ by {gap:.1%}")
        others = [again, attempt(lambda: self._run(modes=Reordered()), otherwise=lambda _: base), self._run(moved=True)]
        gaps = [_apart(base, other) for other in others]
        self._floors = {name: max(_eps(x), *(gap[name] for gap in gaps)) for name, x in base.items()}
        whole = Beginning("inductor")
        seen = attempt(lambda: self._run(whole), otherwise=fault_text)
        if isinstance(seen, str):
            return CompileVerdict(3, f"not comparable: the compiled step failed, {seen}")
        return self._judged(seen, whole)

    def _judged(self, seen: Values, whole: Beginning) -> CompileVerdict:
        if not whole.nodes:
            return CompileVerdict(3, "not comparable: nothing of this step could be compiled")
        what = f"the loss, {counted(len(self._parameters), 'gradient')} and all buffers"
        what += f"; {counted(whole.graphs, 'graph')} of {counted(len(whole.nodes), 'operator')}"
        ratios = self._ratios(seen)
        blind = {name: floor for name, floor in self._floors.items() if floor * MARGIN >= 1 and ratios.get(name)}
        what += f"; {len(blind)} not judged, as rounding alone moves them far" if blind else ""
        worst = max(ratios, key=lambda name: ratios[name])
        verdict = verdict_of(list(ratios.values()), lambda: worst, f" ({what})")
        if verdict.code < 2:
            more = [f"not judged: {name}, which rounding alone moves by {floor:.0%}" for name, floor in blind.items()]
            return CompileVerdict(verdict.code, verdict.sentence, more)
        text = f"{worst} is {_apart(self._base, seen)[worst]:.3g} apart, {ratios[worst]:.3g} measured floors"
        return self._placed(text, seen, whole)

    def _placed(self, text: str, seen: Values, whole: Beginning) -> CompileVerdict:
        for layer in ("Dynamo", "AOTAutograd", "a decomposition"):
            tried = Beginning(LAYERS[layer])
            found = self._tried(tried)
            if self._differs(found):
                return self._placed_in(layer, tried, found, text)
        return self._placed_in("Inductor", whole, seen, text)

    def _placed_in(self, layer: str, tried: Beginning, found: Values, text: str) -> CompileVerdict:
        backend = LAYERS[layer]
        if backend == "eager":
            return _told(layer, (self._module_of_dynamo(), "", ""), self._side(found), text)
        low, high = 0, len(tried.nodes)
        while high - low > 1 and time.monotonic() < self._deadline:
            middle = (low + high) // 2
            low, high = (low, middle) if self._differs(self._tried(Beginning(backend, middle))) else (middle, high)
        last, right = Beginning(backend, high), Beginning("eager", high)
        found, _ = self._tried(last), self._tried(right)
        tensor = self._side(found)
        handed = ((x, right.handed[name]) for name, x in last.handed.items() if name in right.handed)
        if tensor == "gradient" and any(a.shape == b.shape and distance(a, b) > MARGIN * _eps(a) for a, b in handed):
            tensor = "output"
        place = module_and_line(tried.nodes[high - 1], self._owners())
        if high - low > 1:  # the time was over
            place = "", f"one of {high - low} operators up to {place[1]} of {place[0] or 'the model'}", place[2]
        return _told(layer, place, tensor, text)

    def _owners(self) -> dict[int, str]:
        named = self._model.named_parameters()
        return {id(p): name.replace("_orig_mod.", "").rpartition(".")[0] for name, p in named}

    def _ratios(self, seen: Values) -> dict[str, float]:
        """Return name → measured floors by which a value is apart, 0 where its bits are the same."""
        return {name: gap / self._floors.get(name, _LEAST) for name, gap in _apart(self._base, seen).items()}

    def _differs(self, seen: Values) -> bool:
        return any(ratio > MARGIN for ratio in self._ratios(seen).values())

    def _side(self, seen: Values) -> str:
        """Return what shows the difference: an output, which the loss follows, a gradient or a buffer."""
        kinds = {name.partition(" ")[0] for name, ratio in self._ratios(seen).items() if ratio > MARGIN}
        return "output" if "the" in kinds else "gradient" if "gradient" in kinds else "buffer"

    def _tried(self, backend: Beginning, targets: list[nn.Module] | None = None) -> Values:
        """Return what a run gives; what the eager one gave where this beginning cannot be compiled."""
        return attempt(lambda: self._run(backend, targets=targets), otherwise=lambda _: self._base)

    def _module_of_dynamo(self) -> str:
        """Return the innermost module that differs where Dynamo makes graphs of it alone."""
        at, inner = "", list(self._targets)
        while time.monotonic() < self._deadline:
            wrong = next((m for m in inner if self._differs(self._tried(Beginning("eager"), [m]))), None)
            if wrong is None:
                break
            at, inner = self._names[id(wrong)], _called(wrong)
        return at

    def _compile(self, backend: Beginning, targets: list[nn.Module]) -> None:
        """Let modules be compiled by a backend and by nothing else, until the guard rewinds."""
        for module in self._model.modules():
            vars(module).pop("_compiled_call_impl", None)
            if (inner := getattr(module, "_orig_mod", None)) is not None:
                vars(module)["forward"] = inner
        for module in targets:
            call = wrap_inline(module._call_impl)  # which Dynamo would leave out where the module is one of torch
            module._compiled_call_impl = torch.compile(call, backend=backend, dynamic=False)

    def _run(
        self, backend: Any = None, *, modes: Any = None, moved: bool = False, targets: list[nn.Module] | None = None
    ) -> Values:
        self._guard.rewind()
        self._guard.clear_gradients()
        torch._dynamo.reset()
        if moved:
            with torch.no_grad():
                for p in self._parameters.values():
                    p.copy_(nudged(p, 1.0))
        if backend is not None:
            self._compile(backend, self._targets if targets is None else targets)
        with ExitStack() as stack:
            stack.enter_context(torch.compiler.set_stance("force_eager" if backend is None else "default"))
            stack.enter_context(inductor.patch(fallback_random=True, fx_graph_cache=False))
            stack.enter_context(aot.patch(enable_autograd_cache=False))
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
        return values


def _targets(model: nn.Module) -> list[nn.Module]:
    """Return what is compiled: the outermost parts that the program compiles itself, else the modules that are called."""
    if not any(map(_is_compiled, model.modules())):
        return _called(model) if isinstance(model, nn.ModuleList | nn.ModuleDict) else [model]
    if _is_compiled(model):
        return [getattr(model, "_orig_mod", model)]
    return [found for m in model.children() if any(map(_is_compiled, m.modules())) for found in _targets(m)]


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or module._compiled_call_impl is not None


def _called(module: nn.Module) -> list[nn.Module]:
    """Return the modules in one that are called: those in lists in place of the lists."""
    lists = (nn.ModuleList, nn.ModuleDict)
    return [m for child in module.children() for m in (_called(child) if isinstance(child, lists) else [child])]


def _apart(a: Values, b: Values) -> dict[str, float]:
    """Return name → relative distance; infinite where one has it alone, or in another shape."""
    both = {name for name in a.keys() & b.keys() if a[name].shape == b[name].shape}
    return {name: distance(a[name], b[name]) if name in both else float("inf") for name in a | b}


def _eps(x: Tensor) -> float:
    return torch.finfo(x.dtype).eps / 2 if x.is_floating_point() else _LEAST


def _told(layer: str, place: tuple[str, str, str], tensor: str, text: str) -> CompileVerdict:
    module, operator, line = place
    where = f"{module or 'the model'}{f' ({operator})' if operator else ''}, {tensor}"
    details = [f"called at {line}"] if line else []
    return CompileVerdict(2, f"not the same: {layer} changes {where}; {text}", details, layer, module, tensor, operator, line)


@of_a_script
def compile_check_script(
    words: Script = None,
    seconds: Annotated[float, typer.Option(help="After which the search for the place ends.")] = 600.0,
    json: Json = None,
    html: Html = None,
) -> int:
    """Run a script up to its first update, compare its step eager and compiled by Inductor, and end the script there.

    Nothing is trained. Exit code: 0 the same bits, 1 within rounding, 2 another step: the layer of compilation, the module and
    the operator are named, 3 not comparable.
    """
    script = script_of(words, "compile-check -- train.py --lr 3e-4")

    def answer(learnt: Learnt) -> int:
        if ranks() > 1:
            raise UsageError("compile-check runs the step of one rank: start the script without a launcher")
        training, _ = learnt()
        verdict = compile_check(training.loss, training.model, training.micros[0], seconds=seconds)
        return answered(verdict, "compile-check", script[0], json, html)

    with torch.compiler.set_stance("force_eager"):  # the step is learnt from what the script calls
        return at_first_update(script, answer)
