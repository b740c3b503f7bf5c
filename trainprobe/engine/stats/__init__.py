"""Pure functions from partial sums to numbers, and the one layout of the partials that every device writes."""

from trainprobe.engine.stats.checksum import fingerprint as fingerprint
from trainprobe.engine.stats.checksum import shard_fingerprint as shard_fingerprint
from trainprobe.engine.stats.partials import PARTIALS as PARTIALS
from trainprobe.engine.stats.partials import STATISTICS as STATISTICS
from trainprobe.engine.stats.partials import finish as finish
