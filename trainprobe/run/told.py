"""What a script tells other tools becomes scalars of the step: what `wandb.log` and `SummaryWriter.add_scalar` are given, say.

Only a client that the script has imported is looked at, and nothing is imported for it. The client is called first, as ever; a
name that it was given becomes the scalar `told/NAME`. Calls of other threads, our own sinks' among them, are left alone.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.naming import utf8
from trainprobe.engine.core.records import TOLD
from trainprobe.engine.program import Program, Schedule

if TYPE_CHECKING:
    from trainprobe.engine.probe import EngineProbe

Pairs = Iterator[tuple[Any, Any]]
MOST = 256  # names in a run: a script may make up new ones at each step
_DEPTH = 8  # of mappings in each other


def _flat(values: Any, prefix: str = "", depth: int = 0) -> Pairs:
    """Yield the names and values of a mapping, of nested ones as `outer/inner`, which is how their own pages show them."""
    if isinstance(values, Mapping) and depth < _DEPTH:
        for name, value in values.items():
            if isinstance(name, str):
                inner = isinstance(value, Mapping)
                yield from _flat(value, f"{prefix}{name}/", depth + 1) if inner else ((f"{prefix}{name}", value),)


def _mapping(_: Any, data: Any = None, *args: Any, **kwargs: Any) -> Pairs:
    return _flat(next((kwargs[name] for name in ("data", "metrics", "values") if name in kwargs), data))


def _pair(_: Any, name: Any = None, value: Any = None, *args: Any, **kwargs: Any) -> Pairs:
    name = next((kwargs[key] for key in ("tag", "name") if key in kwargs), name)
    yield name, next((kwargs[key] for key in ("scalar_value", "value") if key in kwargs), value)


def _group(_: Any, main_tag: str = "", tag_scalar_dict: Any = None, *args: Any, **kwargs: Any) -> Pairs:
    return _flat(tag_scalar_dict, f"{main_tag}/")


def _metric(_: Any, run_id: str = "", key: Any = None, value: Any = None, *args: Any, **kwargs: Any) -> Pairs:
    yield key, value


def _metrics(_: Any, run_id: str = "", metrics: Any = (), *args: Any, **kwargs: Any) -> Pairs:
    return ((metric.key, metric.value) for metric in metrics)


_WRITER = {"add_scalar": _pair, "add_scalars": _group}
# module → class, what of it is called for each value that is logged, and whether who has the module also uses it
CLIENTS: dict[str, tuple[str, dict[str, Callable[..., Pairs]], bool]] = {
    "wandb.sdk.wandb_run": ("Run", {"_log": _mapping}, True),
    "mlflow.tracking.client": ("MlflowClient", {"log_metric": _metric, "log_batch": _metrics}, True),
    "torch.utils.tensorboard.writer": ("SummaryWriter", _WRITER, True),
    "tensorboardX.writer": ("SummaryWriter", _WRITER, True),
    "trackio.run": ("Run", {"log": _mapping}, True),
    "accelerate.accelerator": ("Accelerator", {"log": _mapping}, False),
    "lightning.pytorch.core.module": ("LightningModule", {"log": _pair}, False),
    "pytorch_lightning.core.module": ("LightningModule", {"log": _pair}, False),
}


class ToldProgram(Program):
    """Takes what is told within a step, and behind it until the next one begins."""

    def __init__(self) -> None:
        super().__init__("told", Schedule(), "what the script tells other tools")
        self._probe: Any = None
        self._thread = 0
        self._names: set[str] = set()
        self._told_between = False  # two steps
        self._waiting = dict(CLIENTS)  # that the script has not imported so far
        self._patches: list[Replaced] = []

    def attached(self, probe: EngineProbe) -> None:
        """Where the probe stops, leave nothing installed."""
        self._probe = probe
        probe.guard.of(self.part).on_trip(self.closed)

    def begins(self, step: int) -> None:
        """Look at the clients that have been imported by now, on the thread that trains.

        The first step behind that waits for what may be told behind it; further ones do where something was.
        """
        self._thread = threading.get_ident()
        self._probe.more_is_told = self._told_between
        for name in [name for name in self._waiting if name in sys.modules]:
            kind, methods, used = self._waiting[name]
            owner = getattr(sys.modules[name], kind, None)
            if owner is not None:  # else another thread is importing it
                del self._waiting[name]
                self._probe.more_is_told |= used
                self._patches += [
                    Replaced(owner, method, self._telling(getattr(owner, method), pairs))
                    for method, pairs in methods.items()
                    if hasattr(owner, method)
                ]

    def closed(self) -> None:
        """Give the clients back."""
        for patch in self._patches:
            patch.back()
        self._patches.clear()

    def _telling(self, original: Any, pairs: Callable[..., Pairs]) -> Callable[..., Any]:
        @wraps(original)
        def told(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            if not told.ended and threading.get_ident() == self._thread:  # type: ignore[attr-defined]
                self._probe.guard.run(self._probe.guard.part, self.part, self._take, pairs, args, kwargs)
            return result

        return told

    def _take(self, pairs: Callable[..., Pairs], args: Any, kwargs: Any) -> None:
        for name, value in pairs(*args, **kwargs):
            if isinstance(name, str) and not name.startswith("trainprobe/"):
                self._tell(utf8(f"{TOLD}{name}"), value)

    def _tell(self, name: str, value: Any) -> None:
        """Keep a number, or what holds one; of anything else, as a picture or a table, there is no scalar."""
        tape, single = self._probe.tape, getattr(value, "size", None) == 1 or getattr(value, "numel", int)() == 1
        if name not in self._names and (isinstance(value, int | float) or single):
            if len(self._names) == MOST:
                self._probe.at_end(f"Of what was told to other tools {MOST} names were kept, and no other ones")
                return
            self._names.add(name)
        if isinstance(value, int | float):
            self._probe.tell(name, float(value))
        elif single and str(getattr(value, "device", "cpu")) == "cpu":
            self._probe.tell(name, float(getattr(value, "detach", lambda: value)().item()))
        elif single and tape is not None:
            self._probe.note(name, value.detach())  # read with all else as the step ends
        self._told_between |= tape is None
