"""`python -m trainprobe` is the same command as `trainprobe`."""

from trainprobe.cli import entry

entry()
