"""How two sets of arrays differ: measured in one pass, held against a noise floor, and judged in one word."""

from trainprobe.engine.diff.difference import Difference as Difference
from trainprobe.engine.diff.measure import measure as measure
from trainprobe.engine.diff.number_formats import NumberFormat as NumberFormat
from trainprobe.engine.diff.number_formats import number_format as number_format
from trainprobe.engine.diff.verdict import Verdict as Verdict
from trainprobe.engine.diff.verdict import judge as judge
from trainprobe.engine.diff.verdict import noise_floor as noise_floor
