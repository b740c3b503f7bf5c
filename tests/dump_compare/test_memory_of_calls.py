"""What a comparison of many calls takes at most: the numbers of their values, and little for each call."""

from __future__ import annotations

import pytest

from benchmarks.dump_compare.large import used, write_large

CALLS = 20_000
LIMITS = {"equal": 145.0, "apart": 145.0}  # MiB; 129 are the text of a file, what JSON makes of it, and its values


@pytest.mark.parametrize("case", LIMITS)
def test_memory_grows_little_with_the_calls(tmp_path, case):
    few, many = (
        [
            str(
                write_large(
                    tmp_path / f"{calls}{side}", calls, differs_from=calls * 3 // 5 if side == "b" and case == "apart" else -1
                )
            )
            for side in "ab"
        ]
        for calls in (100, CALLS)
    )
    least, most = (used("-m", "trainprobe", "dump-compare", "-q", *dumps) for dumps in (few, many))
    assert most.code == (0 if case == "equal" else 2)
    assert most.memory - least.memory < LIMITS[case], (least, most)
