"""What scripts import from `msprobe.pytorch`: change the package's name and keep the rest (docs/migration.md)."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

from trainprobe.debugger import PrecisionDebugger as PrecisionDebugger

if TYPE_CHECKING:
    from trainprobe.dump_compare.classic import compare as compare
    from trainprobe.dump_compare.classic import compare_distributed as compare_distributed
    from trainprobe.integrations.seeds import seed_all as seed_all
    from trainprobe.integrations.trainer_mon import TrainerMon as TrainerMon
    from trainprobe.integrations.trainer_mon import TrainerMonitorV2 as TrainerMonitorV2

# name → module, imported when it is asked for
_LATE = {
    "seed_all": "integrations.seeds",
    "TrainerMon": "integrations.trainer_mon",
    "TrainerMonitorV2": "integrations.trainer_mon",
    "compare": "dump_compare.classic",
    "compare_distributed": "dump_compare.classic",
}
_INSTEAD = {
    "set_fx_dump_config": "graphs of torchair are not recorded",
    "set_ge_dump_config": "graphs of torchair are not recorded",
    "acl_save": "graphs that a device replays are not recorded",
    "AclGraphDumper": "graphs that a device replays are not recorded",
}


module_dump = PrecisionDebugger.module_dump
module_dump_end = PrecisionDebugger.module_dump_end


def random_save(output_path: str = "./output") -> None:
    """Say what captures random calls here; the call stays in place."""
    sys.stderr.write(
        f"trainprobe: random_save({output_path!r}): nothing is written; trainprobe.ConfigChecker captures each random call, "
        "and `trainprobe config-check A B` compares them (docs/config_check.md)\n"
    )


def __getattr__(name: str) -> Any:
    if name in _LATE:
        return getattr(importlib.import_module(f"trainprobe.{_LATE[name]}"), name)
    if name in _INSTEAD:
        raise ImportError(f"trainprobe.pytorch has no {name}: {_INSTEAD[name]}")
    raise AttributeError(f"module 'trainprobe.pytorch' has no attribute {name!r}")
