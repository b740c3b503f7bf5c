"""How two sets of arrays differ: measured in one pass, held against a noise floor, and judged in one word."""

from trainprobe.engine.compare.difference import Difference as Difference
from trainprobe.engine.compare.measure import measure as measure
from trainprobe.engine.compare.number_formats import NumberFormat as NumberFormat
from trainprobe.engine.compare.number_formats import number_format as number_format
from trainprobe.engine.compare.verdict import Verdict as Verdict
from trainprobe.engine.compare.verdict import judge as judge
from trainprobe.engine.compare.verdict import noise_floor as noise_floor
