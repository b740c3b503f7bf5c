"""Faulty operators are found and right ones are not accused: the quick part of benchmarks/op_check."""

from __future__ import annotations

import pytest

from benchmarks.op_check import healthy, planted

WRONG = ("bug", "suspicious")


@pytest.mark.parametrize("one", planted.PLANTS, ids=[p.name for p in planted.PLANTS])
def test_a_planted_fault_is_found(one: planted.Plant) -> None:
    assert planted.judged(one).worst.outcome in WRONG


@pytest.mark.parametrize("one", [p for p in planted.PLANTS if p.hide][::4], ids=lambda p: p.name)
def test_a_fault_that_changes_nothing_is_not_found(one: planted.Plant) -> None:
    assert planted.judged(one, hidden=True).worst.outcome not in WRONG


@pytest.mark.parametrize(("name", "entry", "made", "kernel"), healthy.HEALTHY, ids=[h[0] for h in healthy.HEALTHY])
def test_a_right_kernel_is_not_accused(name: str, entry: str, made: object, kernel: object) -> None:
    found = healthy.judged(entry, made, kernel).worst
    assert found.outcome not in (*WRONG, "not checked")
    assert (found.outcome == "mode") == any(
        word in name for word in ("tf32", "multiplies_in", "four_parts", "in_half", "flushes")
    )
