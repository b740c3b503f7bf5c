"""The made-up fleet of `benchmarks/fleet.py` is what the sink and `runs --compact` would have written, byte for byte."""

from __future__ import annotations

import secrets
from dataclasses import replace

import pyarrow.parquet as pq
import pytest

from benchmarks.fleet import Copier, Fleet, planted_in, write_through_sink
from trainprobe.engine.storage.dumps.layout import find_segments
from trainprobe.engine.storage.run_log.read import read_steps, read_tables
from trainprobe.engine.storage.run_log.replicas import compact_segment
from trainprobe.errors import FormatError
from trainprobe.monitor.frames_of_run_log import RunLog

SMALL = Fleet(data=3, tensor=2, pipeline=2, steps=5, parameters=7, activations=10)


@pytest.mark.parametrize("planted", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_a_copied_rank_has_the_bytes_of_one_that_the_sink_wrote(whole, planted, tmp_path, monkeypatch):
    """With a NaN planted the text is compared: the sign of a NaN depends on how many numbers a processor takes at once."""
    monkeypatch.setattr(secrets, "token_hex", lambda size: "0" * 2 * size)
    fleet = replace(SMALL, planted=planted_in(SMALL)) if planted else SMALL
    template = write_through_sink(fleet, tmp_path / "fleet", 1)
    for rank in (3, 5):
        Copier(fleet, template, whole).write(tmp_path / "fleet", rank)
        (made,) = find_segments(tmp_path / "fleet" / f"rank{rank}")
        (written,) = find_segments(write_through_sink(fleet, tmp_path / "sink", rank))
        if not whole:
            assert compact_segment(written, template)
        assert made.read_bytes() == written.read_bytes() or planted
        assert str(pq.read_table(made).to_pydict()) == str(pq.read_table(written).to_pydict())


def test_a_compacted_rank_is_read_back_as_the_sink_wrote_it(tmp_path):
    fleet = replace(SMALL, planted=planted_in(SMALL))
    template = write_through_sink(fleet, tmp_path, 1)
    for rank in (3, 5):
        (segment,) = find_segments(write_through_sink(fleet, tmp_path, rank))
        before = rows_of(segment.parent)
        frames = [str((f.step, f.place, f.values, f.scalars)) for f in RunLog(segment.parent).frames()]
        collected_steps = [[str(record) for record in step_data.records()] for step_data in read_steps(segment.parent)]
        size = segment.stat().st_size
        assert compact_segment(segment, template)
        assert segment.stat().st_size < 0.8 * size
        assert rows_of(segment.parent) == before
        assert [str((f.step, f.place, f.values, f.scalars)) for f in RunLog(segment.parent).frames()] == frames
        assert [[str(record) for record in step_data.records()] for step_data in read_steps(segment.parent)] == collected_steps
        (part,) = read_tables(segment.parent, ["norm"], [("step", ">=", 1), ("step", "<=", 2), ("kind", "==", "gradient")])
        assert part.num_rows == 2 * fleet.parameters
        assert not compact_segment(segment, template)


def test_a_segment_whose_reference_is_another_file_is_refused(tmp_path):
    template, other = (write_through_sink(SMALL, tmp_path, rank) for rank in (0, 2))
    (segment,) = find_segments(other)
    assert compact_segment(segment, template)
    (reference,) = find_segments(write_through_sink(SMALL, tmp_path, 0))
    with pytest.raises(FormatError, match="is not the file that it was compacted against: put that file back"):
        list(read_tables(other))
    reference.unlink()
    with pytest.raises(FormatError, match="is gone"):
        list(read_tables(other))


def test_ranks_with_nothing_in_common_stay_whole(tmp_path):
    one, other = (write_through_sink(SMALL, tmp_path, rank) for rank in (0, 1))
    (segment,) = find_segments(other)
    assert not compact_segment(segment, one)


def rows_of(folder):
    """Return the rows of a rank's log as text, in any order."""
    return sorted(str(row) for table in read_tables(folder) for row in table.to_pylist())
