"""Level L0: every call of every module, its inputs, outputs and parameters, and the gradients of all of them.

While a step is collected `torch.nn.Module._call_impl` is replaced for the whole class, and put back when the step ends.
No hook is put on a module, so nothing is left on the model that would be pickled, copied or compiled, and on a step
that is not collected there is nothing at all. (`__call__` itself would do as well, but setting a slot makes Python
visit every subclass of Module, twice a step.)
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch._C import DisableTorchFunction
from torch.compiler import is_dynamo_compiling

from trainprobe.engine.capture import ModelTap
from trainprobe.engine.capture.gradients import edge_of, plus
from trainprobe.engine.capture.module_gradients import UNTOUCHED, Edges, edges_of_other, places
from trainprobe.engine.capture.native_torch import learned
from trainprobe.engine.capture.patching import functional_call
from trainprobe.engine.capture.patching.model_structure import ModelStructure
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.requests import ModuleRequest
from trainprobe.engine.compiled import recording
from trainprobe.engine.core.flat_parameters import is_flattened
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.held_parameters import members, shards_of
from trainprobe.engine.core.naming import INNER, ROOT, Rename, chunks_of, count_outer_wrappers, is_outer_wrapper, logical_name
from trainprobe.engine.core.position import Position
from trainprobe.engine.core.records import Call
from trainprobe.engine.core.stacks import Stacks
from trainprobe.engine.tape import SAVE, Tape

if TYPE_CHECKING:
    from trainprobe import _native

    ModuleInfo = _native.ModuleInfo
else:
    ModuleInfo = recording.ModuleInfo

# Dump entries may leave these parts out (a plan's `data`).
INPUTS, KWARGS, OUTPUTS, PARAMETERS, PARAMETER_GRADIENTS = "input", "kwargs", "output", "parameters", "parameter_gradients"


def _shim(known: dict[int, ModuleInfo], original: Any, run: Any) -> Any:
    """Return what stands for `Module._call_impl` while a step is collected."""

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        info = known.get(id(module))
        if info is None or call.ended or is_dynamo_compiling():  # type: ignore[attr-defined]
            return original(module, *args, **kwargs)
        return run(info, original, module, args, kwargs)  # which asks whether anything else compiles

    return call


def _as_it_runs(info: ModuleInfo, module: Any) -> ModuleInfo | None:
    """Return what is known of a module with the parameters that it has now; None where they are the same."""
    now = tuple((short, module._parameters[short]) for short, _ in info.parameters if short in module._parameters)
    if all(new is old for (_, new), (_, old) in zip(now, info.parameters, strict=False)):
        return None
    return ModuleInfo(info.name, info.cls, now, info.flags, info.selected)


_CALL_CODE = id(_shim({}, None, None).__code__)  # where a call stack enters a module


class ModuleTap(ModelTap):
    """See the module text. `stack` holds the calls that are running, outermost first; the op tap reads its top.

    The compiled `ModuleWatch` (`native/modules.c`) records the calls and the gradients; here modules are named, and everything
    is put in place and taken away.
    """

    def __init__(self, request: ModuleRequest, guard: Guard, stacks: Stacks | None, rename: Rename | None = None) -> None:
        self.request = request
        self.stack: list[Call] = []
        self.position: Position | None = None  # notified which module runs
        self.known: dict[int, ModuleInfo] = {}
        self.parameter_names: dict[int, str] = {}
        self.notes: dict[str, None] = {}
        self.code = _CALL_CODE  # the op tap stops walking there
        self._guard = guard
        self._stacks = stacks
        self._rename = rename
        self._models: list[Any] = []
        self._tape: Tape | None = None
        self._original: Replaced | None = None
        self._functional_call: Replaced | None = None
        self._structure: ModelStructure | None = None
        self._saves = False  # whether values of modules are saved
        self._accumulators: list[tuple[Any, Any]] = []
        self._arrived: dict[int, int] = {}  # id of parameter → gradients that arrived this step
        self._watch: Any = self._recorder()

    def _recorder(self) -> Any:
        """Return what records calls, in compiled code."""
        request = self.request
        return learned(recording).ModuleWatch(
            guard=self._guard,
            fault=self._guard.take,
            other_thread=self._note_other_thread,
            odd_edges=self._odd_edges,
            edge_of=edge_of,
            places=places,
            plus=plus,
            micro=request.micro,
            grad_enabled=torch.is_grad_enabled,
            stacks=self._stacks,
            stack=self.stack,
            plain=(torch.Tensor, torch.nn.Parameter),
            untouched=UNTOUCHED,
            stop=self.code,
            forward=request.forward,
            backward=request.backward,
            inputs=INPUTS in request.data,
            kwargs=KWARGS in request.data,
            parameters=PARAMETERS in request.data,
            outputs=OUTPUTS in request.data,
            recompute=request.recompute,
        )

    # ---- life --------------------------------------------------------------------------------------------------

    def open(self, model: Any, optimizer: Any = None) -> None:
        """Name the modules of a model, or of a list of model chunks (virtual pipeline stages)."""
        self._models = chunks_of(model)
        self.scan()

    def scan(self) -> None:
        """Name all modules anew; called when a model is made of something else than before, or was wrapped since."""
        self.known.clear()
        self.parameter_names = {}
        for _, handle in self._accumulators:
            handle.remove()
        self._accumulators.clear()
        self._saves = False
        every_module = [module for model in self._models for module in model.modules()]
        shards = shards_of(every_module)
        self._structure = ModelStructure(every_module, shards)
        for chunk, model in enumerate(self._models):
            prefix = str(chunk) if len(self._models) > 1 else ""
            modules = list(model.named_modules())
            outer = count_outer_wrappers(name for name, _ in modules if name)
            for raw, module in modules:
                if is_outer_wrapper(raw, outer) or not INNER.isdisjoint(module._modules.keys()):
                    continue  # the model inside is recorded: the same names and numbers with and without a wrapper
                plain = ".".join(filter(None, (prefix, logical_name(raw, outer_wrappers=outer))))
                name = self._rename(plain) if self._rename is not None else plain  # sees the chunk: it may number over all
                every = [(n, p, f"{name}.{n}" if name else n) for n, p in members(module, shards)]
                for _, p, whole in every:
                    self.parameter_names.setdefault(id(p), whole)
                own = tuple((n, p) for n, p, whole in every if self.request.parameter(whole))
                shown = name or ROOT
                if hasattr(module, "_orig_mod") or module._compiled_call_impl is not None:
                    self._note_compiled(shown)
                flags = self.request.flags(shown, type(module).__name__)
                self._saves = self._saves or bool(flags & SAVE)
                self.known[id(module)] = ModuleInfo(shown, type(module).__name__, own, flags, self.request.selected(shown))

    def names(self) -> dict[int, str]:
        """Return id of parameter → name, as the model is now: another dict where it is made of something else than before."""
        if self._structure is not None and not self._structure.holds():
            self.scan()
        return self.parameter_names

    def with_buffers(self) -> Iterator[tuple[Any, ModuleInfo]]:
        """Yield the modules that are recorded and hold buffers of their own."""
        for model in self._models:
            for module in model.modules():
                info = self.known.get(id(module))
                if info is not None and info.selected and module._buffers:
                    yield module, info

    def begin(self, tape: Tape) -> None:
        """Replace `torch.nn.Module._call_impl` and watch parameter gradients."""
        self.names()
        self._tape = tape
        self.stack.clear()
        self._arrived.clear()
        tape.looks_again = not self._saves  # where values are saved, each parameter would be saved once a micro-batch
        self._watch.begin(tape, tape.native, tape.calls, self._arrived)
        self.install()
        if self.request.backward and PARAMETER_GRADIENTS in self.request.data:
            self._watch_parameters()

    def install(self) -> None:
        """Put the recording call in place."""
        if self._original is not None and self._original.wake():
            return
        run = self._watch.run
        run = run if self.position is None else self.position.around(run)
        self._original = Replaced(
            torch.nn.Module, "_call_impl", _shim(self.known, torch.nn.Module._call_impl, run), traced=True
        )
        if self._functional_call is None:
            self._functional_call = functional_call.follow(self.known, _as_it_runs, self._guard)

    def uninstall(self) -> None:
        """Put the original call back."""
        for replaced in (self._original, self._functional_call):
            if replaced is not None:
                replaced.back()
        self._original = self._functional_call = None

    def pause(self) -> None:
        """Take no forward calls for a while."""
        if self._original is not None:
            self._original.back()

    def resume(self) -> None:
        """Take forward calls again."""
        self.install()

    def end(self, again: bool = False) -> None:
        """Remove everything; with `again`, the call in place and the hooks on accumulators sleep until the next step.

        (Each change of a class attribute makes Python forget what it has cached for every subclass of Module.)
        """
        if not again:
            self.uninstall()
        self._watch.end()
        if not again:
            for _, handle in self._accumulators:
                handle.remove()
            self._accumulators.clear()
        self._tape = None

    # ---- a call ------------------------------------------------------------------------------------------------

    def _note_other_thread(self) -> None:
        self.notes["a module was called from another thread than the one that began the step: its calls are not recorded"] = (
            None
        )

    def _odd_edges(self, x: Any, path: str) -> Edges:
        with DisableTorchFunction():
            return [] if self._tape is None else edges_of_other(self._tape, x, path)

    # ---- gradients of parameters ---------------------------------------------------------------------------------

    def _watch_parameters(self) -> None:
        """Watch what reaches each parameter's gradient accumulator: one gradient a backward, before it is added."""
        if self._accumulators:
            return  # still there from the step before
        seen: set[int] = set()
        for model in self._models:
            for module in model.modules():
                info = self.known.get(id(module))
                if info is None or not info.selected:
                    continue
                for short, p in info.parameters:
                    if id(p) in seen or not p.requires_grad or not p.is_leaf or is_flattened(p):
                        continue
                    seen.add(id(p))
                    edge = edge_of(p)
                    if edge is not None:  # the parameter holds its accumulator only weakly, so it is held here
                        handle = edge[0].register_prehook(self._watch.parameter_hook(info, short, id(p)))
                        self._accumulators.append((edge[0], handle))

    def unwatched_parameters(self) -> None:
        """Record `p.grad` of parameters whose accumulator saw nothing this step: sharded ones are filled by their framework."""
        tape = self._tape
        if tape is None or not (self.request.backward and PARAMETER_GRADIENTS in self.request.data):
            return
        for model in self._models:
            for module in model.modules():
                info = self.known.get(id(module))
                if info is None or not info.selected:
                    continue
                for short, p in info.parameters:
                    if id(p) not in self._arrived and p.is_leaf and p.grad is not None:
                        self._watch.parameter(info, short, id(p), p.grad)

    def _note_compiled(self, name: str) -> None:
        self.notes[
            f"{name} is compiled: what happens inside it cannot be seen. To see it, run the step uncompiled "
            "(torch.compiler.set_stance('force_eager') around the collected step, or compile less of the model)."
        ] = None
