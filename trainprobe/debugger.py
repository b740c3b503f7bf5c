"""The classic front: PrecisionDebugger with start, stop and step, for scripts and habits that have it.

    from trainprobe import PrecisionDebugger
    debugger = PrecisionDebugger("config.json")
    for batch in data:
        debugger.start(model)
        loss = model(batch); loss.backward()
        debugger.stop()
        optimizer.step()
        debugger.step()

One debugger a process: a second construction with the same settings is the same debugger, with others it is an error.
Every verb also works on the class.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Mapping
from typing import Any, ClassVar

from trainprobe.engine.plan import Plan
from trainprobe.engine.plan_loading import load_plan
from trainprobe.errors import UsageError
from trainprobe.watching import Probe


class PrecisionDebugger:
    """Collects the steps that its configuration selects, between `start` and `stop`.

    config_path: a plan, or the `config.json` of mindstudio-probe. The other arguments are fields of the plan on top of it;
    `dump_path` is the plan's `output`. Raises PlanError for bad settings and UsageError for a second construction with other
    settings.
    """

    _only: ClassVar[PrecisionDebugger | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        """Return the process's debugger, made at the first construction."""
        return cls._only if cls._only is not None else super().__new__(cls)

    def __init__(
        self,
        config_path: str | os.PathLike[str] | Mapping[str, Any] | Plan | None = None,
        *,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        step: Any = None,
        rank: Any = None,
        **fields: Any,
    ) -> None:
        named = {"task": task, "output": dump_path, "level": level, "step": step, "rank": rank}
        plan = load_plan(config_path, **{k: v for k, v in named.items() if v is not None}, **fields)
        if PrecisionDebugger._only is self:
            if plan != self.plan:
                raise UsageError(
                    "PrecisionDebugger exists already in this process with other settings "
                    f"({_difference(self.plan, plan)}): use the first one, or end it with PrecisionDebugger.close()"
                )
            return
        self.plan = plan
        self.probe = Probe(plan)
        self._step = 0
        self._model: Any = None
        self._running = False
        PrecisionDebugger._only = self
        atexit.register(_close_only)

    @classmethod
    def instance(cls) -> PrecisionDebugger:
        """Return the process's debugger. Raises UsageError when none was made yet."""
        if cls._only is None:
            raise UsageError("no PrecisionDebugger exists yet: make one first, PrecisionDebugger(config_path=...)")
        return cls._only

    @classmethod
    def start(cls, model: Any = None) -> None:
        """Begin collecting, if this step is selected. model: needed once for levels L0 and mix; a list of chunks is allowed."""
        self = cls.instance()
        if self._running:
            return
        if model is not None and model is not self._model:
            self._model = model
            self.probe.open(model)
        elif self._model is None and self.plan.level in ("L0", "mix"):
            raise UsageError(f"level {self.plan.level} records modules: call start(model=your_model)")
        self._running = True
        if not self.probe._inside:
            self.probe.begin_step(self._step)
        else:
            self.probe.resume()

    @classmethod
    def stop(cls) -> None:
        """Pause collecting until the next `start`; gradients of what was recorded still arrive until `step`."""
        self = cls.instance()
        if self._running:
            self._running = False
            self.probe.pause()

    @classmethod
    def step(cls) -> None:
        """End the step: what was collected is written, and the step number goes up by one."""
        self = cls.instance()
        self._running = False
        if self.probe._inside:
            self.probe.end_step()
        self._step += 1

    @classmethod
    def save(cls, value: Any, name: str, save_backward: bool = True) -> None:
        """Record a value (level debug needs nothing else); it belongs to the step that is going on."""
        self = cls.instance()
        if not self.probe._inside:
            self.probe.begin_step(self._step)
        self.probe.save(value, name, save_backward)

    @classmethod
    def set_init_step(cls, number: int) -> None:
        """Number the next step `number` (after a resume)."""
        cls.instance()._step = number

    @classmethod
    def close(cls) -> None:
        """Write everything and forget the debugger; a new one may then be made."""
        if cls._only is not None:
            only, PrecisionDebugger._only = cls._only, None
            only.probe.close()


def _close_only() -> None:
    PrecisionDebugger.close()


def _difference(a: Plan, b: Plan) -> str:
    names = [n for n in Plan.model_fields if getattr(a, n) != getattr(b, n)]
    return ", ".join(f"{n}: {getattr(a, n)!r} and {getattr(b, n)!r}" for n in names)
