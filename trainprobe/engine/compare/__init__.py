"""How two sets of arrays differ: measured in one pass, and whether rounding explains it."""

from trainprobe.engine.compare.difference import Difference as Difference
from trainprobe.engine.compare.measure import measure as measure
from trainprobe.engine.compare.number_formats import NumberFormat as NumberFormat
from trainprobe.engine.compare.number_formats import number_format as number_format
