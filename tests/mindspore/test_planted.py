"""Bugs planted in a MindSpore training are found as `docs/bug_bench.md` says, and healthy twins are left alone."""

from __future__ import annotations

from tests.mindspore import planted


def test_what_is_found_of_planted_bugs_is_what_the_table_says() -> None:
    written = planted.DOC.read_text(encoding="utf-8").partition(f"{planted.BEGIN}\n")[2].partition(planted.END)[0]
    assert written == planted.table()
    assert sum(not bug.missed for bug in planted.BUGS) >= 12
