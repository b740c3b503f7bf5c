"""Captures a running torch program for a number of micro-steps, and then leaves nothing behind.

A micro-step is a forward call of the model in training mode with gradients on; the forward that activation checkpointing
runs again is none. Nothing here changes a tensor, draws a random number or waits for a device: what is captured is queued,
and the writing thread waits.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch._C import _current_graph_task_id
from torch.nn.modules.module import register_module_forward_pre_hook

from trainprobe.config_check.capture.dataset import capture_inputs, signature_of
from trainprobe.config_check.capture.environment import capture_environment
from trainprobe.config_check.capture.hyperparameters import SettingsWatch, is_scripted
from trainprobe.config_check.capture.labels import LabelWatch, with_labels, with_target
from trainprobe.config_check.capture.loaders import LoaderCapture
from trainprobe.config_check.capture.loop_calls import LoopWatch
from trainprobe.config_check.capture.model_state import is_compiled, model_state, scripted_modules
from trainprobe.config_check.capture.optimizers import OptimizerWatch
from trainprobe.config_check.capture.packages import capture_packages
from trainprobe.config_check.capture.patches import Patches, before
from trainprobe.config_check.capture.randomness import COMPILED, RandomCalls, random_states
from trainprobe.config_check.capture.setting_files import read_settings
from trainprobe.config_check.capture.sources import hash_sources, source_files
from trainprobe.config_check.capture.switches import device_of, read_switches
from trainprobe.config_check.capture.weights import capture_weights, named_tensors
from trainprobe.config_check.merge import merge_ranks
from trainprobe.config_check.pack import AT_FIRST_LAYER, AT_MODEL
from trainprobe.config_check.pack_writer import PackWriter
from trainprobe.config_check.settings import CapturedSettings
from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.guard import Guard
from trainprobe.engine.core.naming import chunks_of, in_training
from trainprobe.engine.core.words import and_more
from trainprobe.errors import FormatError, OutputError

_MOST_NAMED = 3  # modules in a note


class SettingsRecorder:
    """One capture of one process. `start` before the model is made, `attach` once it exists, `finish` at the end."""

    def __init__(self, settings: CapturedSettings, settings_watch: SettingsWatch | None = None) -> None:
        self.settings = settings
        self.guard = Guard(settings.on_error)
        self.guard.farewell = "the config check stopped, everything else goes on"
        self.guard.on_trip(self._release)
        self.micro = 0
        self.finished = False
        self._patches = Patches()
        self._late_patches = Patches()
        self._random = RandomCalls(self._patches, self.guard)
        self._settings_watch = settings_watch or SettingsWatch()
        self._settings_watch.on_model = self.offer
        self._optimizers = OptimizerWatch(self._late_patches, self.guard)
        self._loaders = LoaderCapture(self._late_patches, self.guard)
        self._loop = LoopWatch(self.guard)
        self._labels = LabelWatch(self._late_patches, self.guard, self._quietly, self._trains, self._take_target)
        self._data: Any = None  # of the last micro-step, as it is to be written
        self._forwards = 0  # calls of the model that have not returned
        self._random.on_compiled = self._see_compiled
        self._compiled: list[tuple[weakref.ref[Any], weakref.ref[Any]]] = []
        self._compiled_with: dict[int, str] = {}
        self._model_state: dict[str, Any] = {}
        self._models: list[Any] = []
        self._handles: list[Any] = []
        self._writer: PackWriter | None = None
        self._place = (0, 1)  # rank and number of ranks
        self._merger: threading.Thread | None = None
        self._states: dict[str, Any] = {}
        self._flags: dict[str, Any] = {}
        self._flags_at = AT_MODEL
        self._started = time.time()
        self._scripts: list[dict[str, Any]] = []
        self.adopt(settings)

    def adopt(self, settings: CapturedSettings) -> None:
        """Take settings that came after the start; captures that were not started stay off."""
        if self.settings is not settings and "randomness" not in self.settings.captures:
            settings = replace(settings, captures=tuple(c for c in settings.captures if c != "randomness"))
        self.settings = settings
        self._scripts = [read_settings(path) for path in settings.scripts]

    def start(self) -> None:
        """Install the patches that see what happens before the first micro-step."""
        self._settings_watch.install()
        self._optimizers.install()
        self._loaders.install()
        self._loop.install()
        if "dataset" in self.settings.captures:
            self._labels.install()
            self._random.beside = self._labels.functions()
        if "randomness" in self.settings.captures:
            self._random.install()

    def attach(self, model: Any) -> None:
        """Watch the calls of a model, or of the first of its chunks."""
        self._stop_search()
        self._models = chunks_of(model)
        if self._random.active and any(is_compiled(module) for model in self._models for module in model.modules()):
            self._random.stop()
            self._random.end(COMPILED)
        first = self._models[0]
        wrapper = next((w() for m, w in self._compiled if m() is first), None)
        if any(cls.__name__ == "LightningModule" for cls in type(first).__mro__):
            self._late_patches.replace(first, "training_step", self._training_step)
        elif vars(first).get("_compiled_call_impl") is not None:  # compiled in place: hooks would be compiled away
            self._late_patches.replace(first, "_compiled_call_impl", before(functools.partial(self._before_compiled, first)))
        else:
            self._hook(wrapper or first)
            compiler = sys.modules.get("torch._dynamo.eval_frame")
            if wrapper is None and compiler is not None:
                self._late_patches.replace(compiler.OptimizedModule, "__call__", before(self._find_wrapper))

    def _hook(self, module: Any) -> None:
        register = torch.nn.Module  # TorchScript's modules call these hooks and refuse to have them registered
        self._handles.append(register.register_forward_pre_hook(module, self._before_forward, with_kwargs=True))
        self._handles.append(register.register_forward_hook(module, self._after_forward, always_call=True))

    def _see_compiled(self, target: Any, compiled: Any, arguments: str) -> None:
        """Watch the wrapper that torch.compile puts around a model: hooks on what is inside are compiled away."""
        module = getattr(target, "__self__", target)  # compiled in place, its own call is the target
        for one in (module, compiled):
            self._compiled_with[id(one)] = arguments
        if not isinstance(module, torch.nn.Module) or not isinstance(compiled, torch.nn.Module):
            return
        self._compiled.append((weakref.ref(module), weakref.ref(compiled)))
        if self._models and self._models[0] is module and self._handles:
            while self._handles:
                self._handles.pop().remove()
            self._hook(compiled)

    def _find_wrapper(self, compiled: Any, /, *args: Any, **kwargs: Any) -> None:
        """Find the wrapper of the model where torch.compile made it before anything was watched."""
        inner = compiled._modules.get("_orig_mod")
        if inner in self._models[:1] and not any(known() is compiled for _, known in self._compiled):
            self.guard.run(self._see_compiled, inner, compiled, "")

    def _before_compiled(self, module: Any, /, *args: Any, **kwargs: Any) -> None:
        self._before_forward(module, args, kwargs)

    def offer(self, model: Any) -> None:
        """Take this model if none was given."""
        if not self._models and not self.finished:
            self.guard.run(self.attach, model)

    def search(self) -> None:
        """Wait for the first module that is called in training, and take that for the model."""
        self._search = Patches()
        self._search.replace(torch.nn.Module, "__call__", before(self._try_module))

    _search: Patches | None = None

    def _stop_search(self) -> None:
        if self._search is not None:
            self._search.undo()
            self._search = None

    def _try_module(self, module: Any, /, *args: Any, **kwargs: Any) -> None:
        if in_training(module) and torch.is_grad_enabled() and any(p.requires_grad for p in module.parameters()):
            self.offer(module)

    def _training_step(self, original: Any) -> Any:
        @functools.wraps(original)
        def training_step(*args: Any, **kwargs: Any) -> Any:
            self.guard.run(self._micro_step, original, args, kwargs)
            self._forwards += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._forwards -= 1

        return training_step

    def _before_forward(self, module: Any, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or self.finished:
            return
        self._forwards += 1
        if in_training(module) and torch.is_grad_enabled() and _current_graph_task_id() == -1:
            self.guard.run(self._micro_step, signature_of(module), args, kwargs)
        elif not self._model_state and torch.is_grad_enabled():  # the only forwards of a run that is left in evaluation mode
            self.guard.run(self._take_model_state)

    def _after_forward(self, *_: Any) -> None:
        self._forwards = max(0, self._forwards - 1)

    def _trains(self) -> bool:
        """Whether there is a model that trains, and none of its forwards is under way."""
        return bool(self._models) and not self.finished and self._forwards == 0 and in_training(self._models[0])

    def _take_target(self, target: Any) -> None:
        if self._data is not None and self._writer is not None:
            self._data = with_target(self._data, target)
            self._writer.put("dataset", self._data, self.micro - 1)

    def _quietly(self, capture: Any, *args: Any) -> None:
        """Capture something; what that calls itself is not the program's, and no mode sees it, those of a dump among them."""
        watching = self._random.active
        self._random.active = False
        try:
            with without_dispatch(within_transforms=True):
                capture(*args)
        finally:
            self._random.active = watching

    def _take_model_state(self) -> None:
        with without_dispatch(within_transforms=True):
            self._model_state = model_state(self._models, self._compiled_with)

    def _micro_step(self, call: Any, args: Any, kwargs: Any) -> None:
        if self.micro >= self.settings.micro_steps:
            self.finish()
            return
        writer = self._writer or self._open()
        self._quietly(self._capture, writer, call, args, kwargs)
        self._random.window = self.micro
        self.micro += 1

    def _capture(self, writer: PackWriter, call: Any, args: Any, kwargs: Any) -> None:
        captures, micro = self.settings.captures, self.micro
        if micro == 0:
            self._first(writer)
        if "dataset" in captures:
            inputs = capture_inputs(call, args, kwargs, self._optimizers.steps, self.settings.tokens)
            self._data = with_labels(inputs, self._labels.recent())
            writer.put("dataset", self._data, micro)
        if "weights" in captures:
            writer.put("weights", capture_weights(self._models, self._optimizers.steps), micro)
        if "randomness" in captures:
            self._states[str(micro)] = random_states()
            writer.put("randomness", self._randomness())

    def _open(self) -> PackWriter:
        rank, world_size = self._place = rank_of_process()
        s = self.settings
        self._writer = PackWriter(s.output, rank, world_size, s.captures)
        if world_size > 1 and rank == 0:
            s.output.unlink(missing_ok=True)  # of an earlier run; `refuse_foreign` has looked at it
        return self._writer

    def _first(self, writer: PackWriter) -> None:
        """Capture what does not change from micro-step to micro-step."""
        self._optimizers.name_parameters({id(tensor): name for name, _, tensor in named_tensors(self._models)})
        if scripted := scripted_modules(self._models):
            verb, whose = ("is", "its") if len(scripted) == 1 else ("are", "their")
            writer.note(
                f"{and_more(scripted, shown=_MOST_NAMED)} {verb} TorchScript: {whose} layers are known by class and weights, "
                "random calls inside are not counted"
            )
        if "environment" in self.settings.captures:
            writer.put("environment", capture_environment())
        if "packages" in self.settings.captures:
            files = source_files(self._models)
            writer.put("packages", lambda: {**capture_packages(), "sources": hash_sources(files)})
        if not (self.finished and self._model_state):  # at the end the mode is no longer that of the training
            self._take_model_state()
        if "hyperparameters" in self.settings.captures:
            writer.put("hyperparameters", self._hyperparameters())
        self._flags = read_switches(device_of(self._models))
        if not self.finished and not self._compiled:
            self._watch_first_layer()

    def _watch_first_layer(self) -> None:
        """Read the switches again where the first layer of the model is called: wrappers set autocast on the way to it."""
        modules = [m for model in self._models for m in model.modules()]
        if any(is_compiled(m) for m in modules):
            return
        layers = {id(m): m for m in modules if is_scripted(m) or not any(True for _ in m.children())}

        def before_layer(module: Any, _: Any) -> None:
            if layers.get(id(module)) is module and not torch.compiler.is_compiling():
                handle.remove()
                self.guard.run(self._read_switches)

        handle = register_module_forward_pre_hook(before_layer)
        self._handles.append(handle)

    def _read_switches(self) -> None:
        self._flags, self._flags_at = read_switches(device_of(self._models)), AT_FIRST_LAYER

    def _hyperparameters(self) -> dict[str, Any]:
        extra = dict(self.settings.settings)
        found = self._settings_watch.sources(self._models, extra)
        found += [*self._optimizers.sources(), *self._loaders.sources(), *self._loop.sources()]
        return {"sources": [*self._scripts, *found], "model_state": self._model_state}

    def _randomness(self) -> dict[str, Any]:
        return {**self._random.content(), "states": dict(self._states), "flags": self._flags, "flags_at": self._flags_at}

    def add_optimizer(self, optimizer: Any) -> None:
        """Take down an optimizer that may never step."""
        self._optimizers.name_parameters({id(tensor): name for name, _, tensor in named_tensors(self._models)})
        for one in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
            self._optimizers.add(one)

    def _release(self) -> None:
        """Undo everything that is installed."""
        self._random.stop()
        self._stop_search()
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._optimizers.remove()
        self._loop.remove()
        self._settings_watch.remove()
        self._late_patches.undo()

    def finish(self, wait: bool = False) -> None:
        """Undo everything, and write the whole pack on another thread; wait: until that is done."""
        if not self.finished:
            self.finished = True
            self._release()
            if self._writer is None and self._models and self._search is None and self.guard.tripped is None:
                self.guard.run(self._first, self._open())
            if self._writer is not None:
                self.guard.run(self._finish_content, self._writer)
                self._merger = threading.Thread(target=self._write, args=(self._writer,), name="trainprobe-config-check-merge")
                self._merger.daemon = True
                self._merger.start()
        if wait and self._merger is not None:
            self._merger.join(self.settings.wait + 30)

    def _finish_content(self, writer: PackWriter) -> None:
        if self._random.ended:
            writer.note(self._random.ended)
        for kind in sorted(self._random.sealed):
            writer.note(f"calls of the methods of {kind} were not counted: this Python does not let them be replaced")
        if "hyperparameters" in self.settings.captures:
            writer.put("hyperparameters", self._hyperparameters())
        if "randomness" in self.settings.captures:
            writer.put("randomness", self._randomness())
        if self.micro == 0:
            writer.note("no call of the model in training mode was seen: data and weights were not captured")
        elif self.micro < self.settings.micro_steps:
            writer.note(f"the program ended after {self.micro} of {self.settings.micro_steps} micro-steps")
        self._models = []

    def _write(self, writer: PackWriter) -> None:
        if self.guard.tripped is not None:
            writer.note(self.guard.tripped.message)
            Guard(self.settings.on_error).run(writer.close, complete=False)
        else:
            self.guard.run(self._close_and_merge, writer)

    def _close_and_merge(self, writer: PackWriter) -> None:
        writer.close()
        rank, world_size = self._place
        if rank == 0 and world_size > 1:
            try:
                merge_ranks(self.settings.output, world_size, self.settings.wait, self._started)
            except (OutputError, FormatError, OSError):
                pass  # the packs of the ranks stay, and are read as one where the merged pack is missing


def rank_of_process() -> tuple[int, int]:
    """Return (rank, number of ranks): from the process group, or from the launcher's environment."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    try:
        return int(os.environ.get("RANK", "0")), max(1, int(os.environ.get("WORLD_SIZE", "1")))
    except ValueError:
        return 0, 1
