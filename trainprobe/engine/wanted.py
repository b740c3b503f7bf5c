"""What a plan wants of a value, as the tape's flags."""

from __future__ import annotations

from trainprobe.engine import tape
from trainprobe.engine.detail import Detail


def flags_of(detail: Detail, cuts: list[Detail] | None = None) -> int:
    """Return the tape's flags for a level of detail; one that stores only a slice is put into `cuts` and told by its number."""
    cut = 0
    if detail.wants_tensor and detail.slice and cuts is not None:
        if detail not in cuts:
            cuts.append(detail)
        cut = cuts.index(detail) + 1
    wanted = detail.statistics if detail.wants_statistics else ()
    return (
        (tape.STATS if wanted else 0)
        | (tape.CHECKSUM if detail.wants_checksum else 0)
        | (tape.CRC32 if detail.wants_crc32 else 0)
        | (tape.STD if "std" in wanted else 0)
        | (tape.SUBLOW if "sublow" in wanted else 0)
        | (tape.SAVE if detail.wants_tensor else 0)
        | (cut << tape.CUT)
    )
