"""What scripts import from `msprobe.mindspore`: change the package's name and keep the rest (docs/migration.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainprobe.engine.classic_paths import ClassicModule, add_modules, look_up

if TYPE_CHECKING:
    from trainprobe.integrations.mindspore_front import MsgConst as MsgConst
    from trainprobe.integrations.mindspore_front import MsprobeInitStep as MsprobeInitStep
    from trainprobe.integrations.mindspore_front import MsprobeStep as MsprobeStep
    from trainprobe.integrations.mindspore_front import PrecisionDebugger as PrecisionDebugger
    from trainprobe.integrations.mindspore_front import seed_all as seed_all
    from trainprobe.integrations.mindspore_save import save as save
    from trainprobe.integrations.mindspore_save import save_grad as save_grad
    from trainprobe.integrations.mindspore_save import step as step

_FRONT = "trainprobe.integrations.mindspore_front"
_SAVE = "trainprobe.integrations.mindspore_save"
_NAMES: dict[str, str] = {
    **dict.fromkeys(("MsgConst", "MsprobeInitStep", "MsprobeStep", "PrecisionDebugger", "seed_all"), _FRONT),
    **dict.fromkeys(("save", "save_grad", "step"), _SAVE),
}
_CALLBACK = "ProbeCallback of trainprobe.integrations.mindformers watches a training of a Model"
_INSTEAD = {
    "GradComparator": "record both runs at level L0, then `trainprobe dump-compare` (docs/migration.md)",
    "TrainerMon": f"{_CALLBACK}; the same JSON can be its plan",
}


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _NAMES, _INSTEAD)


add_modules(
    ClassicModule(f"{__name__}.common"),
    ClassicModule(f"{__name__}.common.utils", {name: _NAMES[name] for name in ("MsprobeInitStep", "MsprobeStep", "seed_all")}),
)
