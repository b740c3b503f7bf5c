"""Two random layouts of two random tensors against NumPy on the whole arrays."""

from functools import reduce

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ckpt_compare.memory import checkpoint, tensor
from tests.matrices import examples
from trainprobe.ckpt_compare.compare import compare
from trainprobe.ckpt_compare.tasks import TaskOutcome, run
from trainprobe.engine.compare.difference import Difference


@st.composite
def cuts(draw, shape):
    """Cut a tensor into a random grid, then cut some cells again; every element is held once."""
    boxes = [((0,) * len(shape), shape)]
    for _ in range(draw(st.integers(0, 6))):
        i = draw(st.integers(0, len(boxes) - 1))
        offset, extent = boxes[i]
        axis = draw(st.integers(0, len(shape) - 1))
        if extent[axis] < 2:
            continue
        at = draw(st.integers(1, extent[axis] - 1))
        first = (offset, (*extent[:axis], at, *extent[axis + 1 :]))
        rest = (
            (*offset[:axis], offset[axis] + at, *offset[axis + 1 :]),
            (*extent[:axis], extent[axis] - at, *extent[axis + 1 :]),
        )
        boxes[i : i + 1] = [first, rest]
    return boxes


@st.composite
def pairs(draw):
    shape = tuple(draw(st.lists(st.integers(1, 12), min_size=1, max_size=3)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    a = rng.standard_normal(shape).astype(np.float32)
    b = a.copy()
    for _ in range(draw(st.integers(0, 3))):
        b[tuple(rng.integers(0, n) for n in shape)] += np.float32(rng.standard_normal())
    return a, b, draw(cuts(shape)), draw(cuts(shape))


@settings(max_examples=examples(200))
@given(pairs())
def test_any_two_layouts_measure_as_the_whole_arrays_do(case):
    a, b, cut_a, cut_b = case
    measured: list[TaskOutcome] = []  # a row of equal values keeps no sums

    def runner(*given):
        measured.extend(run(*given))
        return measured

    row = compare(checkpoint(tensor("w", a, cut_a)), checkpoint(tensor("w", b, cut_b)), runner=runner).rows[0]
    x, y = a.astype(np.float64), b.astype(np.float64)
    d = reduce(Difference.merge, (outcome.difference for outcome in measured), Difference())
    assert row.difference == (d if d.changed else Difference(d.count))
    assert (d.count, d.changed) == (a.size, int((a != b).sum()))
    assert np.allclose((d.square_d, d.square_a, d.dot), (((x - y) ** 2).sum(), (x * x).sum(), (x * y).sum()), rtol=1e-12)
    assert d.max_abs == np.abs(x - y).max()
    assert d.at is None or abs(x[d.at] - y[d.at]) == d.max_abs


@settings(max_examples=examples(100))
@given(pairs())
def test_the_verdict_is_identical_exactly_when_the_bits_are(case):
    a, b, cut_a, cut_b = case
    row = compare(checkpoint(tensor("w", a, cut_a)), checkpoint(tensor("w", b, cut_b))).rows[0]
    assert (row.verdict == "identical") == (a.tobytes() == b.tobytes())


@settings(max_examples=examples(100))
@given(pairs(), st.data())
def test_a_lost_shard_is_counted_to_the_element_and_never_passes(case, data):
    a, b, cut_a, cut_b = case
    lost = data.draw(st.integers(0, len(cut_b) - 1))
    kept = cut_b[:lost] + cut_b[lost + 1 :]
    row = compare(checkpoint(tensor("w", a, cut_a)), checkpoint(tensor("w", b, kept))).rows[0]
    assert row.verdict == "incomplete"
    assert row.difference.count == a.size - int(np.prod(cut_b[lost][1]))
    assert "B: no file holds" in row.note


@settings(max_examples=examples(50))
@given(pairs(), st.integers(1, 5))
def test_the_number_of_threads_does_not_change_a_bit_of_the_result(case, threads):
    a, b, cut_a, cut_b = case
    one, many = (
        compare(checkpoint(tensor("w", a, cut_a)), checkpoint(tensor("w", b, cut_b)), threads=n).rows[0].difference
        for n in (1, threads)
    )
    assert one == many
