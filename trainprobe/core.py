"""What scripts import from `msprobe.core`: change the package's name and keep the rest (docs/migration.md)."""

from trainprobe.engine.classic_paths import ClassicModule, add_modules
from trainprobe.rollout import SingleComparator as SingleComparator
from trainprobe.rollout import SingleSave as SingleSave

add_modules(
    ClassicModule("trainprobe.core.config_check", {"ConfigChecker": "trainprobe.config_check"}),
    ClassicModule("trainprobe.core.monitor_v2", {"TrainerMonitorV2": "trainprobe.integrations.trainer_mon"}),
    ClassicModule("trainprobe.core.monitor_v2.trainer", {"TrainerMonitorV2": "trainprobe.integrations.trainer_mon"}),
)
