"""The run log as columns: one long table a rank, with a row for each value, place and step, that any tool can query.

    schema.py     the columns: what each holds, its type and unit
    rows.py       one step as rows; what repeats from step to step is worked out once
    live.py       the stream of the steps since the last segment, readable after a kill
    segments.py   closed Parquet files
    replicas.py   rows that data-parallel replicas share, stored once
    read.py       both, by column and by range of steps

`engine/sinks/parquet.py` writes it. pyarrow is imported here and by whoever imports this package, and by nobody else.
"""

import importlib.util

from trainprobe.errors import MissingExtra

if importlib.util.find_spec("pyarrow") is None:
    raise MissingExtra("pyarrow", "parquet", "the run log as columns")
