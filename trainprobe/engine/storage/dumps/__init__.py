"""Dumps on disk: how they are laid out, written and read back, including those of other tools."""

from trainprobe.engine.storage.dumps.layout import find_ranks as find_ranks
from trainprobe.engine.storage.dumps.layout import find_steps as find_steps
from trainprobe.engine.storage.dumps.log import read_log as read_log
from trainprobe.engine.storage.dumps.read import not_read as not_read
from trainprobe.engine.storage.dumps.read import read as read
from trainprobe.engine.storage.dumps.read import read_step as read_step
from trainprobe.engine.storage.dumps.tensor_store import TensorStore as TensorStore
from trainprobe.engine.storage.dumps.tensor_store import open_tensors as open_tensors
