"""The step in which a process died, as the other steps of a black box are: facts, and a line of the record log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from trainprobe.engine.storage.dumps.record_log import encode
from trainprobe.engine.storage.step_journal import read_journal
from trainprobe.monitor.black_box.ring import read_journal_bytes


def step_in_progress(ring: Path) -> dict[str, Any] | None:
    """Return {"facts": {"batches": …, "seen_last": a call}, "reel": …} of the step that a ring's journal describes, or None.

    Raises FormatError for a file that is no ring.
    """
    found = read_journal(read_journal_bytes(ring))
    if found is None:
        return None
    step_data, last = found
    seen = None if last is None else {"kind": last.kind, "name": last.name, "phase": last.phase, "node": last.node}
    return {"facts": {"batches": list(step_data.batches), "seen_last": seen}, "reel": orjson.loads(encode(step_data))}
