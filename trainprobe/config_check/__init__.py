"""What decides a run's numbers: captured from a run into one pack, and compared between two runs."""

from trainprobe.config_check.checker import ConfigChecker as ConfigChecker
