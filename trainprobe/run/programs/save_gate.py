"""What happens where the training saves its state while an error finding stands: `flag` or `refuse` it (docs/again.md)."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.core.records import Finding
from trainprobe.engine.plan.subplans import read_section
from trainprobe.engine.probe import EngineProbe
from trainprobe.engine.program import Making, Program, Schedule
from trainprobe.errors import PlanError, StopTraining
from trainprobe.monitor.findings import OWN

ORDER = 9  # behind all that finds something
WATCHES = "saves"
NOT_UNDER = {"mindspore": "save_gate: saves of PyTorch alone are seen: leave the section out"}
# module → what saves a state, where that module is loaded; the first may call the others
SAVES = {
    "transformers.trainer": ("Trainer._save_checkpoint",),
    "lightning.pytorch.trainer.trainer": ("Trainer.save_checkpoint",),
    "pytorch_lightning.trainer.trainer": ("Trainer.save_checkpoint",),
    "deepspeed.runtime.engine": ("DeepSpeedEngine.save_checkpoint",),
    "accelerate.accelerator": ("Accelerator.save_state",),
    "megatron.training.training": ("save_checkpoint",),
    "torch.distributed.checkpoint": ("save", "async_save"),
    "torch": ("save",),
}


class SaveGatePlan(BaseModel):
    """All settings of the save gate."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    save: Literal["flag", "refuse"] = "flag"
    """flag: a warning says that the state was saved with the error; refuse: the save raises StopTraining and writes nothing."""


def validate(settings: Mapping[str, Any] | bool | None = True) -> SaveGatePlan:
    """Return the plan of a section. Raises PlanError, which names each key, its value and what was meant."""
    return read_section("save_gate", SaveGatePlan, settings)


def program(making: Making) -> Program:
    """Return the program that looks at saves. Raises PlanError where nothing would find an error."""
    if not making.plan.judges:
        raise PlanError("save_gate waits for a finding, and nothing judges: add `monitor` or `audit`")
    return SaveGate(validate(making.plan.section("save_gate")))


class SaveGate(Program):
    """See the module text. Saves of other threads, such as the tool's own writer, are not looked at."""

    def __init__(self, plan: SaveGatePlan) -> None:
        super().__init__("save_gate", Schedule(), part="the save gate")
        self.plan = plan
        self._replaced: list[Replaced] = []
        self._within = False

    def attached(self, probe: EngineProbe) -> None:
        """Leave nothing behind where the tool stops."""
        self._probe = probe
        probe.guard.of(self.part).on_trip(self.closed)

    def opened(self, model: Any, optimizer: Any, declared: bool) -> None:
        """See what saves from now on."""
        self._thread = threading.get_ident()
        for module, names in SAVES.items():
            for name in names if module in sys.modules else ():
                *kind, function = name.split(".")
                owner = functools.reduce(getattr, kind, sys.modules[module])
                self._replaced.append(Replaced(owner, function, self._around(getattr(owner, function), name)))

    def closed(self) -> None:
        """See no more."""
        for one in self._replaced:
            one.back()
        self._replaced.clear()

    def _around(self, original: Any, name: str) -> Any:
        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._within or save.ended or threading.get_ident() != self._thread:  # type: ignore[attr-defined]
                return original(*args, **kwargs)
            self._within = True
            try:
                self._looks(name)
                return original(*args, **kwargs)
            finally:
                self._within = False

        return save

    def _looks(self, name: str) -> None:
        """Report a save beside an error. Raises StopTraining where the plan refuses it."""
        errors = [f for f in self._probe.findings if f.severity == "error" and f.rule not in OWN]
        if not errors:
            return
        first = errors[0]
        stands = f"while an error stands: {first.rule}{f' (step {first.step})' if first.step is not None else ''}"
        if self.plan.save == "refuse":
            raise StopTraining(f"{name} was refused {stands}: {first.message}")
        hint = "go on from a state before it, or look at the error first: `trainprobe judge`"
        self._probe.report_once(Finding("save_gate", "warning", f"{name} {stands}", self._probe.step_number, next=hint))
