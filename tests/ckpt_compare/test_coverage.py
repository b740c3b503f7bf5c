import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ckpt_compare.memory import held, tensor
from tests.ckpt_compare.test_pieces import SHAPES, paint, rectangles
from trainprobe.ckpt_compare.coverage import coverage_of, overlaps
from trainprobe.ckpt_compare.pieces import LogicalTensor, Piece


@settings(max_examples=200)
@given(st.data())
def test_any_pieces_become_a_cover_without_overlap_and_every_second_copy_is_kept(data):
    shape = data.draw(SHAPES)
    boxes = data.draw(st.lists(rectangles(shape), max_size=6))
    found = coverage_of(tensor("w", np.zeros(shape), [(b.offset, b.shape) for b in boxes]))
    painted = paint(shape, boxes)
    assert (paint(shape, [p.box for p in found.parts]) == (painted > 0)).all()
    assert found.uncovered == int((painted == 0).sum())
    assert sum(c.box.count for c in found.copies) >= int((painted - 1).clip(0).sum())


@settings(max_examples=200)
@given(st.data())
def test_two_covers_overlap_in_exactly_the_elements_that_both_hold(data):
    shape = data.draw(SHAPES)
    a, b = (
        coverage_of(
            tensor("w", np.zeros(shape), [(x.offset, x.shape) for x in data.draw(st.lists(rectangles(shape), max_size=5))])
        )
        for _ in "ab"
    )
    common = paint(shape, [p.box for p in a.parts]) & paint(shape, [p.box for p in b.parts])
    assert (paint(shape, [o.box for o in overlaps(a.parts, b.parts)]) == common).all()


def test_gaps_are_named_as_boxes():
    found = coverage_of(tensor("w", np.zeros((4, 6)), [((0, 0), (4, 3)), ((2, 3), (2, 3))]))
    assert [str(g) for g in found.gaps()] == ["[0:2, 3:6]"]


def test_a_piece_that_reaches_beyond_the_tensor_is_set_aside():
    piece = Piece((2,), held(np.zeros(3)), "rank 1")
    found = coverage_of(LogicalTensor("w", (4,), (piece,)))
    assert (found.beyond, found.uncovered) == ((piece,), 4)


def test_a_thousand_flat_shards_are_covered_quickly():
    n = 1000
    found = coverage_of(tensor("w", np.zeros((n, 4)), [((i, 0), (1, 4)) for i in range(n)]))
    assert (len(found.parts), found.copies, found.uncovered) == (n, (), 0)
