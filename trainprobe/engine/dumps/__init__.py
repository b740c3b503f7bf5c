"""Dumps on disk: how they are laid out, written and read back, including those of other tools."""

from trainprobe.engine.dumps.layout import find_ranks as find_ranks
from trainprobe.engine.dumps.layout import find_steps as find_steps
from trainprobe.engine.dumps.log import read_log as read_log
from trainprobe.engine.dumps.read import read as read
from trainprobe.engine.dumps.read import read_step as read_step
from trainprobe.engine.dumps.tensor_store import TensorStore as TensorStore
