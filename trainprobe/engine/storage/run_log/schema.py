"""The columns of the run log: the only place where their names, types and meanings stand."""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

from trainprobe.engine.stats.partials import ASKED, STATISTICS

FORMAT = "1"

_WORD = pa.dictionary(pa.int32(), pa.string())

COLUMNS: dict[str, tuple[pa.DataType, str]] = {
    "step": (pa.int64(), "number of the optimizer step"),
    "time": (
        pa.timestamp("us", tz="UTC"),
        "when the step was handed to the writer; later than that of the step before",
    ),
    "rank": (pa.int32(), "global rank"),
    "micro": (pa.int32(), "micro-batch within the step; null for what belongs to the whole step"),
    "position": (pa.int32(), "place in the order of execution within the step; features and scalars come last"),
    "phase": (_WORD, "forward, recompute, backward, optimizer, save or step"),
    "kind": (_WORD, "module, op, parameter, gradient, optimizer, collective, saved, scalar, feature, step or layout"),
    "name": (_WORD, "dotted name of the module or parameter, or name of the op or scalar"),
    "call": (pa.int32(), "how often this name was called before in the step"),
    "slot": (_WORD, "which of its values: input.0, output, grad_output.0, grad, exp_avg, value, …"),
    "dtype": (_WORD, "dtype as the framework writes it"),
    "shape": (_WORD, "sizes of the dimensions of the logical tensor as a JSON list"),
    "count": (pa.int64(), "elements that this rank holds: fewer than `shape` has, where it holds a shard"),
    "nan": (pa.int64(), "elements that are NaN"),
    "posinf": (pa.int64(), "elements that are +inf"),
    "neginf": (pa.int64(), "elements that are -inf"),
    "zero": (pa.int64(), "elements that are zero"),
    "min": (pa.float64(), "smallest element; NaN where one is NaN"),
    "max": (pa.float64(), "largest element; NaN where one is NaN"),
    "mean": (pa.float64(), "mean of all elements"),
    "norm": (pa.float64(), "Euclidean norm of all elements"),
    **{
        asked.column: (pa.int64() if asked.whole else pa.float64(), f"{asked.about}; null where that was not asked for")
        for asked in ASKED.values()
    },
    "checksum": (pa.uint64(), "fingerprint of the bits; null where that was not asked for"),
    "crc32": (pa.string(), "CRC-32 of the bytes, hexadecimal; null where that was not asked for"),
    "value": (pa.float64(), "the number itself, of scalars and of features with one number"),
    "numbers": (pa.list_(pa.float64()), "several numbers: quantiles of a value, counts per bin of a histogram or a feature"),
    "edges": (pa.list_(pa.float64()), "edges of the bins that `numbers` counts"),
    "quantiles": (pa.list_(pa.float64()), "the value at the quantiles that the plan names"),
    "note": (_WORD, "why there are no numbers, or what the numbers are of"),
    "detail": (
        pa.string(),
        "JSON: in a row of kind step what holds for all of it, of kind layout the calls of such steps",
    ),
}

# statistic of a plan → its column, of those that have one
OF_STATISTIC = {name: ASKED[name].column if name in ASKED else name for name in STATISTICS if name in ASKED or name in COLUMNS}

SCHEMA = pa.schema(
    [pa.field(name, kind, metadata={"description": text}) for name, (kind, text) in COLUMNS.items()],
    metadata={"trainprobe.run_log": FORMAT},
)
WORDS = tuple(name for name, (kind, _) in COLUMNS.items() if pa.types.is_dictionary(kind))
FLOATS = tuple(name for name, (kind, _) in COLUMNS.items() if pa.types.is_floating(kind))

_GRADIENT_SLOTS = {"grad", "grad_unclipped", "grad_unreduced"}
_PARAMETER_SLOTS = {"value", "value_after", "update"}


@lru_cache(maxsize=1 << 12)
def kind_in_words(kind: str, slot: str) -> str:
    """Return what a value is in the table: what belongs to a parameter is distinguished by its slot."""
    if kind != "parameter":
        return kind
    first = slot.partition(".")[0]
    return "gradient" if first in _GRADIENT_SLOTS else "parameter" if first in _PARAMETER_SLOTS else "optimizer"


def kind_of_address(kind: str) -> str:
    """Undo `kind_in_words`."""
    return "parameter" if kind in ("gradient", "optimizer") else kind
