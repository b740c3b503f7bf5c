"""What scripts import from `msprobe.core`: change the package's name and keep the rest (docs/rollout.md)."""

from trainprobe.rollout import SingleComparator as SingleComparator
from trainprobe.rollout import SingleSave as SingleSave
