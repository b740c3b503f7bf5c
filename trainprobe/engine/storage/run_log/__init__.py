"""The run log as columns: one long table a rank, with a row for each value, place and step, that any tool can query.

    schema.py     the columns: what each holds, its type and unit
    rows.py       some steps as rows; what steps of one layout have in common is worked out once
    arrow_arrays.py  Arrow arrays from NumPy arrays
    live.py       the stream of the steps since the last segment, readable after a kill
    segments.py   closed Parquet files
    replicas.py   rows that data-parallel replicas share, stored once
    read.py       both, by column and by range of steps

`engine/storage/sinks/parquet.py` writes it and imports this package with the first step that it writes. pyarrow is imported
nowhere else, so a process that only dumps, or only imports trainprobe, never loads it.
"""

import importlib.util

from trainprobe.errors import ProbeError

if importlib.util.find_spec("pyarrow") is None:
    raise ProbeError("the run log needs pyarrow, which is not installed: pip install pyarrow")
