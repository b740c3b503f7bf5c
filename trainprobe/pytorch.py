"""What scripts import from `msprobe.pytorch`: change the package's name and keep the rest (docs/migration.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainprobe.engine.classic_paths import ClassicModule, add_modules, look_up
from trainprobe.engine.core.log_lines import say
from trainprobe.run.precision_debugger import PrecisionDebugger as PrecisionDebugger

if TYPE_CHECKING:
    from trainprobe.dump_compare.classic import compare as compare
    from trainprobe.dump_compare.classic import compare_distributed as compare_distributed
    from trainprobe.integrations.seeds import seed_all as seed_all
    from trainprobe.integrations.trainer_mon import TrainerMon as TrainerMon
    from trainprobe.integrations.trainer_mon import TrainerMonitorV2 as TrainerMonitorV2

# name → the module that holds it, imported when it is asked for
_LATE = {
    "compare": "trainprobe.dump_compare.classic",
    "compare_distributed": "trainprobe.dump_compare.classic",
    "seed_all": "trainprobe.integrations.seeds",
    "TrainerMon": "trainprobe.integrations.trainer_mon",
    "TrainerMonitorV2": "trainprobe.integrations.trainer_mon",
}
_INSTEAD = {
    "set_fx_dump_config": "graphs of torchair are not recorded",
    "set_ge_dump_config": "graphs of torchair are not recorded",
    "acl_save": "graphs that a device replays are not recorded",
    "AclGraphDumper": "graphs that a device replays are not recorded",
}
_DISPATCH = "`with trainprobe.CompareWithCPU(): …` judges each operator that runs in the block (docs/op_check.md)"
__all__ = [
    "PrecisionDebugger",
    "TrainerMon",
    "TrainerMonitorV2",
    "compare",
    "compare_distributed",
    "module_dump",
    "module_dump_end",
    "random_save",
    "seed_all",
]


module_dump = PrecisionDebugger.module_dump
module_dump_end = PrecisionDebugger.module_dump_end


def random_save(output_path: str = "./output") -> None:
    """Say what captures random calls here; the call stays in place."""
    say(
        f"random_save({output_path!r}): nothing is written; trainprobe.ConfigChecker captures each random call, and "
        "`trainprobe config-check compare A B` compares them (docs/config_check.md)",
        severity="warning",
    )


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _LATE, _INSTEAD)


add_modules(
    ClassicModule(f"{__name__}.common", {"seed_all": _LATE["seed_all"]}),
    ClassicModule(f"{__name__}.monitor"),
    ClassicModule(f"{__name__}.monitor.csv2tb", {"csv2tensorboard_by_step": "trainprobe.monitor.csv2tb_command"}),
    ClassicModule(f"{__name__}.online_dispatch", instead={"PtdbgDispatch": _DISPATCH}),
)
