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

from trainprobe.engine.capture import Tap
from trainprobe.engine.core.records import Place
from trainprobe.engine.plan.dump_switch import DumpSwitch
from trainprobe.engine.plan.loading import load_plan
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.plan.token_range import TokenRange
from trainprobe.errors import UsageError
from trainprobe.watching import Probe

NO_DEBUGGER = "no PrecisionDebugger exists yet: make one first, PrecisionDebugger(config_path=...)"


class PrecisionDebugger:
    """Collects the steps that its configuration selects, between `start` and `stop`.

    config_path: a plan, or the `config.json` of mindstudio-probe; what differs from that tool is printed once. Without one the
    defaults are that tool's: level L1, statistics, `./dump_path`. The other arguments are fields of the plan on top of it;
    `dump_path` is the plan's `output`. model: as for `start`. Arguments without their names are taken in that tool's order:
    config_path, task, dump_path, level, then model and step, or step alone.
    Raises PlanError for bad settings and UsageError for a second construction with other settings.
    """

    _only: ClassVar[PrecisionDebugger | None] = None

    def __new__(cls, *args: Any, **kwargs: Any) -> PrecisionDebugger:
        """Return the process's debugger, made at the first construction."""
        return cls._only if cls._only is not None else super().__new__(cls)

    def __init__(
        self,
        config_path: str | os.PathLike[str] | Mapping[str, Any] | Plan | None = None,
        task: str | None = None,
        dump_path: str | os.PathLike[str] | None = None,
        level: str | None = None,
        *further: Any,
        model: Any = None,
        step: Any = None,
        rank: Any = None,
        **fields: Any,
    ) -> None:
        model, step = _model_and_step(further, model, step)
        named = {"task": task, "output": dump_path, "level": level, "step": step, "rank": rank}
        named = {k: v for k, v in named.items() if v is not None} | fields
        if PrecisionDebugger._only is self and config_path is None and not named:
            return
        if config_path is None:
            config_path = {"dump_path": "./dump_path", "task": named.pop("task", "statistics")}
        switch = DumpSwitch.of(config_path)
        settings = config_path if switch is None else switch.settings
        plan = load_plan(settings, self._probe_kind().backend.name, {"level": "L0", "on_existing": "refuse"}, **named)
        if PrecisionDebugger._only is self:
            if plan != self.plan:
                raise UsageError(
                    "PrecisionDebugger exists already in this process with other settings "
                    f"({_difference(self.plan, plan)}): use the first one, or end it with PrecisionDebugger.close()"
                )
            return
        self.plan = plan
        self.probe = self._probe_kind()(plan)
        self._step = 0
        self._model: Any = None
        self._given = model
        self._running = False
        self._switch = switch
        self._said: set[str] = set()
        self._functions: Any = None
        self._written_at_exit: Any = None
        self._dumped: Any = None
        self._tokens: Any = None
        for note in plan.notes:
            self._say(note)
        PrecisionDebugger._only = self
        atexit.register(_close_only)

    @classmethod
    def _probe_kind(cls) -> type[Probe]:
        """Return the class of the probe: another framework has its own."""
        return Probe

    def _token_range(self, model: Any, first: int, last: int) -> Any:
        """Have only these forward passes of a model recorded, until `close` of what is returned."""
        return TokenRange(model, first, last, self.probe.resume, self.probe.pause)

    @classmethod
    def instance(cls) -> PrecisionDebugger:
        """Return the process's debugger. Raises UsageError when none was made yet."""
        if cls._only is None:
            raise UsageError(NO_DEBUGGER)
        return cls._only

    @classmethod
    def start(
        cls, model: Any = None, token_range: Any = None, rank_id: int | None = None, scheduled_tokens: Any = None
    ) -> None:
        """Begin collecting, if this step is selected.

        model: a module or a list of chunks, needed once for levels L0 and mix. rank_id: the rank whose folder is written to,
        where torch.distributed does not tell it. token_range: [first, last] of the model's forward passes until `stop`, counted
        from 0, that are recorded; it needs the model. scheduled_tokens: not used, which is printed once.
        """
        self = cls.instance()
        if self._running or (self._switch is not None and not self._switch.on()):
            return
        model = model if model is not None else self._given
        if scheduled_tokens is not None:
            self._say(
                "start(scheduled_tokens=): every forward of the model is recorded; token_range=[first, last] chooses some"
            )
        within = _range_of(token_range)
        if within is not None and model is None and self._model is None:
            raise UsageError("start(token_range=...) counts the forward passes of a model: call start(model=your_model, ...)")
        if model is not None and model is not self._model:
            self._model = model
            self.probe.open(
                model, place=None if rank_id is None else Place(rank_id, max(rank_id + 1, self.probe.place.world_size))
            )
        elif self._model is None and self.plan.level in ("L0", "mix"):
            raise UsageError(f"level {self.plan.level} records modules: call start(model=your_model)")
        self._running = True
        if not self.probe._inside:
            self._begin()
        else:
            self.probe.resume()
        if within is not None:
            first = next(iter(self._model)) if isinstance(self._model, list | tuple) else self._model
            self._tokens = self._token_range(first, *within)

    @classmethod
    def stop(cls) -> None:
        """Pause collecting until the next `start`; gradients of what was recorded still arrive until `step`."""
        self = cls.instance()
        self._forget_tokens()
        if self._running:
            self._running = False
            self.probe.pause()

    forward_backward_dump_end = stop

    @classmethod
    def step(cls) -> None:
        """End the step: what was collected is written, and the step number goes up by one."""
        self = cls.instance()
        self._running = False
        self._forget_tokens()
        if self._dumped is not None:
            self.probe.guard.run(self._dumped.step_ends)
        if self.probe._inside:
            self.probe.end_step()
        self._step += 1

    @classmethod
    def save(cls, variable: Any, name: str, save_backward: bool = True) -> None:
        """Record a value (level debug needs nothing else); it belongs to the step that is going on."""
        self = cls.instance()
        if not self.probe._inside:
            self._begin()
        self.probe.save(variable, name, save_backward)

    @classmethod
    def register_custom_api(cls, module: Any, api_name: str, api_prefix: str | None = None) -> None:
        """Record calls of the function `module.api_name` as the op `api_prefix.api_name` at levels L1 and mix.

        api_prefix: by default the module's name. Raises UsageError where the module has no such function.
        """
        self = cls.instance()
        if self._functions is None:
            from trainprobe.engine.capture.custom_functions import CustomFunctions

            ops: Any = self.probe.taps.get("ops", Tap)
            self._functions = CustomFunctions(ops)
        self._functions.register(module, api_name, api_prefix)

    @classmethod
    def restore_custom_api(cls, module: Any, api_name: str) -> None:
        """Put the program's own function back where `register_custom_api` replaced it."""
        functions = cls.instance()._functions
        if functions is not None:
            functions.restore(module, api_name)

    @classmethod
    def module_dump(cls, module: Any, module_name: str) -> None:
        """Record of `module` its own calls, as `Module.{module_name}.{class}`, and nothing else until `module_dump_end`.

        At levels L0 and mix modules are recorded as everywhere, which is printed once. Raises UsageError for anything but a
        module, and beside a monitor, whose modules are left out of a dump of level L1.
        """
        self = cls.instance()
        if not hasattr(module, "named_modules"):
            raise UsageError(f"module_dump({type(module).__name__}, {module_name!r}): give it a torch.nn.Module and a name")
        if self.plan.level != "L1":
            self._say(
                f"module_dump({module_name!r}): at level {self.plan.level} modules are recorded as everywhere; use level L1, "
                "or name the module in `modules` of a plan at level L0"
            )
            return
        if self.plan.section("monitor") is not None:
            raise UsageError(
                f"module_dump({module_name!r}): a dump of level L1 leaves out the modules that are recorded beside a monitor; "
                "use level mix, or leave `monitor` out of the plan"
            )
        if self._dumped is None:
            from trainprobe.engine.capture.dumped_modules import DumpedModules
            from trainprobe.engine.capture.requests import modules_of_plan

            taps, probe = self.probe.taps, self.probe
            wanted = modules_of_plan(self.plan, taps.cuts)
            others = [taps.get("ops", Tap), taps.get("collectives", Tap)]
            self._dumped = DumpedModules(others, taps.pauses, wanted, probe.guard, lambda: probe.tape)
        self.probe.guard.run(self._dumped.begin, module, module_name)

    @classmethod
    def module_dump_end(cls) -> None:
        """Record everything again."""
        self = cls.instance()
        if self._dumped is not None:
            self.probe.guard.run(self._dumped.end)

    @classmethod
    def monitor(cls, model: Any) -> None:
        """Watch the gradients of `model` at each update of its optimizer (`task: grad_probe`).

        Raises UsageError where the plan has no `monitor` that says what is watched.
        """
        self = cls.instance()
        if self.plan.section("monitor") is None:
            raise UsageError(
                "monitor(model) watches what `monitor` of the plan says, and there is none: set task to grad_probe"
            )
        from trainprobe.integrations import torch_loop

        torch_loop.attach(model, plan=self.plan, first_step=self._step)

    @classmethod
    def set_init_step(cls, step: int) -> None:
        """Number the next step `step` (after a resume)."""
        cls.instance()._step = step

    @classmethod
    def close(cls) -> None:
        """Write everything and forget the debugger; a new one may then be made."""
        if cls._only is not None:
            only, PrecisionDebugger._only = cls._only, None
            if only.probe._inside and not only._running:
                only.probe.end_step()  # all between start and stop is there; a script need not call step
            only.probe.close()

    def _begin(self) -> None:
        """Begin a step, and have it written at the exit if the program ends within it."""
        self.probe.begin_step(self._step)
        if self._written_at_exit is not self.probe.writer:
            self._written_at_exit = self.probe.writer
            atexit.unregister(_close_only)
            atexit.register(_close_only)  # what was registered last runs first: before the writer closes

    def _forget_tokens(self) -> None:
        """Take the forward passes of the model as they come."""
        tokens, self._tokens = self._tokens, None
        if tokens is not None:
            tokens.close()

    def _say(self, sentence: str) -> None:
        """Print a sentence, once, on rank 0."""
        if sentence not in self._said and not self.probe.place.rank:
            self._said.add(sentence)
            self.probe.console.line(sentence)


def _model_and_step(further: tuple[Any, ...], model: Any, step: Any) -> tuple[Any, Any]:
    """Return the model and the steps among arguments without names: older releases take both, newer ones the steps alone."""
    if len(further) > 2:
        raise TypeError(f"PrecisionDebugger takes at most 6 arguments without their names, {4 + len(further)} were given")
    first, second = (*further, None, None)[:2]
    if len(further) == 1 and isinstance(first, int | str | list | range) and not _holds_modules(first):
        return model, first if step is None else step
    return (first if model is None else model), (second if step is None else step)


def _holds_modules(value: Any) -> bool:
    return isinstance(value, list | tuple) and any(hasattr(item, "named_modules") for item in value)  # pyright: ignore


def _range_of(value: Any) -> tuple[int, int] | None:
    """Return the first and the last of a range of tokens. Raises UsageError for anything but two rising whole numbers."""
    if value is None:
        return None
    match value:
        case [int(first), int(last)] if 0 <= first <= last:
            return first, last
        case _:
            raise UsageError(f"start(token_range={value!r}): write [first, last], two whole numbers from 0 on")


def _close_only() -> None:
    PrecisionDebugger.close()


def _difference(a: Plan, b: Plan) -> str:
    names = [n for n in Plan.model_fields if getattr(a, n) != getattr(b, n)]
    return ", ".join(f"{n}: {getattr(a, n)!r} and {getattr(b, n)!r}" for n in names)
