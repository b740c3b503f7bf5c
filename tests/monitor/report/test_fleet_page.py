"""`trainprobe report --fleet`: a browser opens the page quietly, and its map shows the states that were planted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from chromium import Browser, require_chromium

from benchmarks.fleet import Fleet, planted_in, write_fleet
from trainprobe.cli import main
from trainprobe.monitor.fleet import page as fleet_page
from trainprobe.monitor.fleet.command import verdict_of

pytest.importorskip("duckdb", reason="requirements/oldest.txt is without DuckDB")
SHAPE = Fleet(data=8, tensor=2, pipeline=2, steps=12, parameters=4, activations=10)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    write_fleet(replace(SHAPE, planted=planted_in(SHAPE)), folder)
    return folder


def test_the_map_holds_what_was_planted(folder, monkeypatch):
    planted = planted_in(SHAPE)
    verdict = verdict_of(folder, ray=False)
    codes = fleet_page.states(verdict)
    wanted = np.zeros((32, 12), int)
    wanted[16:, planted.late[1] :] = fleet_page.LATE
    wanted[planted.loss[0], planted.loss[1] :] = fleet_page.SCALAR
    wanted[:, planted.nan[1]] = fleet_page.BAD
    wanted[planted.parted[0], planted.parted[1] :] = fleet_page.DIFFERS
    wanted[planted.stopped[0], planted.stopped[1] :] = fleet_page.MISSING
    np.testing.assert_array_equal(codes, wanted)
    told = fleet_page.describe(verdict)
    assert told["first"] == {"row": planted.parted[0], "column": planted.parted[1]}
    rows = [told["patterns"][row] for row in told["rows"]]
    np.testing.assert_array_equal([np.repeat(row[::2], row[1::2]) for row in rows], codes)
    monkeypatch.setattr(fleet_page, "COLUMNS", 5)
    joined, every = fleet_page.joined(codes)
    assert (joined.shape, every) == ((32, 4), 3)
    np.testing.assert_array_equal(joined[:, 0], codes[:, :3].max(axis=1))


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_opens_the_page_quietly(scheme, folder, tmp_path):
    page = tmp_path / "fleet.html"
    assert main(["report", "--fleet", str(folder), "-o", str(page)]) == 0
    browser = Browser(require_chromium(), scheme=scheme)
    try:
        browser.open(page)
        assert browser.errors == []
        assert [url for url in browser.requests if not url.startswith(("file:", "data:"))] == []
        assert f"rank {planted_in(SHAPE).parted[0]} " in browser.run("document.querySelector('#verdict .say').textContent")
        assert browser.run("document.querySelectorAll('#findings tr').length") == 6
        assert browser.run("document.getElementById('all').width") > 500
        box = browser.run("(() => { const b = document.getElementById('all').getBoundingClientRect(); return [b.x, b.y]; })()")
        browser.point(box[0] + 5, box[1] + 5)
        assert "rank 0 (dp 0, tp 0, pp 0), step 0: as its replicas" in browser.run("document.getElementById('tip').textContent")
        browser.screenshot(Path(f"/tmp/fleet_{scheme}.png"))
    finally:
        browser.close()


def test_steps_at_which_nothing_was_compared_do_not_read_as_healed(tmp_path):
    """Two steps in the middle of a run were collected without tensors: only the loss is there."""
    write_fleet(Fleet(data=4, tensor=1, pipeline=1, steps=8, parameters=4, activations=4), tmp_path / "run", whole=True)
    for segment in (tmp_path / "run").rglob("metrics-*.parquet"):
        rows = pq.read_table(segment)
        tensors = pc.is_in(rows["kind"].cast(pa.string()), pa.array(["gradient", "module", "parameter"]))
        there = pc.is_in(rows["step"], pa.array([4, 5], rows["step"].type))
        pq.write_table(rows.filter(pc.invert(pc.and_(tensors, there))), segment)
    wanted = np.full((4, 8), fleet_page.ALIKE)
    wanted[:, 4:6] = fleet_page.UNSEEN
    np.testing.assert_array_equal(fleet_page.states(verdict_of(tmp_path / "run", ray=False)), wanted)
    page = tmp_path / "fleet.html"
    main(["report", "--fleet", str(tmp_path / "run"), "-o", str(page)])
    browser = Browser(require_chromium())
    try:
        browser.open(page)
        box = "(b => [b.x, b.y, b.width])(document.getElementById('all').getBoundingClientRect())"
        told = {}
        for step in (3, 4):
            x, y, width = browser.run(box)
            browser.point(x + width * (step + 0.5) / 8, y + 5)
            told[step] = browser.run("document.getElementById('tip').textContent")
        assert "step 3: as its replicas" in told[3]
        assert "step 4: not compared" in told[4]
    finally:
        browser.close()
