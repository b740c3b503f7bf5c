"""Watches a training from outside, with and without trainprobe: one line for every number that tells whether bits changed.

Python runs this file at its start where this folder stands on PYTHONPATH. Each process writes one file into the folder that
FOREIGN_OBSERVED names, with the fingerprint of every value on which backward (or autograd.grad) starts, of every parameter
after each step of a torch optimizer, and of the random states at the end. FOREIGN_SEED seeds a program that seeds nothing.
Nothing here imports a framework: it waits until the program does.
"""

from __future__ import annotations

import atexit
import hashlib
import importlib.abc
import importlib.util
import os
import random
import sys
import threading
import time
from pathlib import Path

FOLDER = Path(os.environ["FOREIGN_OBSERVED"])
SEED = os.environ.get("FOREIGN_SEED")


class Lines:
    """The file of this process; a process that is forked writes one of its own."""

    def __init__(self):
        self._pid = None
        self._file = None
        self._lock = threading.Lock()

    def write(self, *words):
        with self._lock:
            if self._pid != os.getpid():
                self._pid = os.getpid()
                self._file = (FOLDER / f"{time.time_ns()}-{self._pid}.txt").open("w", buffering=1)
            self._file.write("\t".join(map(str, words)) + "\n")


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function once a module has been run, however often somebody has only looked for it before."""

    def __init__(self, functions):
        self._functions = functions
        self._sought = set()  # another tool's finder may ask all finders in its turn

    def find_spec(self, fullname, path, target=None):
        if fullname not in self._functions or fullname in self._sought:
            return None
        self._sought.add(fullname)
        try:
            return self._found(fullname, path, target)
        finally:
            self._sought.discard(fullname)

    def _found(self, fullname, path, target):
        for finder in [f for f in sys.meta_path if f is not self]:
            spec = finder.find_spec(fullname, path, target) if hasattr(finder, "find_spec") else None
            if spec is not None and spec.loader is not None:
                run = spec.loader.exec_module

                def exec_module(module, run=run):
                    run(module)
                    self._functions.pop(fullname, lambda _: None)(module)

                spec.loader.exec_module = exec_module
                return spec
        return None


lines = Lines()


def observe_torch(torch):
    """Stand before autograd's two entries and behind every step of a torch optimizer."""
    if SEED is not None:
        torch.manual_seed(int(SEED))
    if importlib.util.find_spec("torchvision") is not None and "+cpu" in torch.__version__:
        _declare_box_operators(torch)

    def fingerprint(tensor):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                flat = tensor.detach().cpu().contiguous().reshape(-1)
                return hashlib.sha256(flat.view(torch.uint8).numpy().tobytes()).hexdigest()[:16]
            except (RuntimeError, TypeError) as error:  # inside torch.func there is no memory to read
                return type(error).__name__

    def number(tensor):
        with torch._C.DisableTorchFunction(), torch.no_grad():
            try:
                return repr(float(tensor.detach())) if tensor.numel() == 1 else ""
            except RuntimeError:
                return ""

    def values(x):
        return [x] if isinstance(x, torch.Tensor) else [t for t in x if isinstance(t, torch.Tensor)]

    def in_front_of(kind, original):
        def call(outputs, *args, **kwargs):
            outputs = outputs if isinstance(outputs, torch.Tensor) else list(outputs)
            for value in values(outputs):
                lines.write(kind, fingerprint(value), number(value))
            return original(outputs, *args, **kwargs)

        return call

    torch.autograd.backward = in_front_of("backward", torch.autograd.backward)
    torch.autograd.grad = in_front_of("grad", torch.autograd.grad)

    def stepped(optimizer, args, kwargs):
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        every = hashlib.sha256("".join(fingerprint(p) for p in parameters).encode()).hexdigest()[:16]
        lines.write("step", every, type(optimizer).__name__)

    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(stepped)


def _declare_box_operators(torch):
    """Declare what torchvision's Python files expect of its compiled part, which is built for CUDA in the registry's wheel."""
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch._foreign_library = library  # it ends with the object


def observe_numpy(numpy_random):
    if SEED is not None:
        numpy_random.seed(int(SEED))
        generator = numpy_random.default_rng
        numpy_random.default_rng = lambda seed=None: generator(int(SEED) if seed is None else seed)


def at_the_end():
    """Write the random states, and that the process came to its end."""
    states = {"python": repr(random.getstate())}
    if "torch" in sys.modules and hasattr(sys.modules["torch"], "get_rng_state"):
        states["torch"] = sys.modules["torch"].get_rng_state().numpy().tobytes().hex()
    if "numpy" in sys.modules and hasattr(sys.modules["numpy"], "random"):
        states["numpy"] = repr(sys.modules["numpy"].random.get_state()[1:])
    for name, state in states.items():
        if name == "torch" or lines._pid is not None:
            lines.write("random", hashlib.sha256(state.encode()).hexdigest()[:16], name)


if SEED is not None:
    random.seed(int(SEED))
sys.meta_path.insert(0, AfterImport({"torch": observe_torch, "numpy.random": observe_numpy}))
atexit.register(at_the_end)
