import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ckpt_compare.memory import held, tensor
from trainprobe.ckpt_compare.pieces import flat_pieces, gather, window
from trainprobe.engine.geometry.rectangles import Rectangle, flat_rectangles
from trainprobe.errors import FormatError

SHAPES = st.lists(st.integers(1, 6), min_size=0, max_size=4).map(tuple)


@st.composite
def rectangles(draw, shape):
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Rectangle(offset, tuple(draw(st.integers(1, n - o)) for o, n in zip(offset, shape, strict=True)))


def paint(shape, boxes):
    """Count how often each element lies in one of the boxes."""
    canvas = np.zeros(shape, int)
    for box in boxes:
        canvas[box.within((0,) * len(shape))] += 1
    return canvas


@settings(max_examples=200)
@given(st.data())
def test_a_box_minus_another_is_the_set_difference_without_overlap(data):
    shape = data.draw(SHAPES)
    a, b = data.draw(rectangles(shape)), data.draw(rectangles(shape))
    assert (paint(shape, a.minus(b)) == (paint(shape, [a]) & ~paint(shape, [b]).astype(bool))).all()


@settings(max_examples=200)
@given(st.data())
def test_an_intersection_holds_the_elements_that_both_hold(data):
    shape = data.draw(SHAPES)
    a, b = data.draw(rectangles(shape)), data.draw(rectangles(shape))
    common = a.intersect(b)
    expected = (paint(shape, [a]) == 1) & (paint(shape, [b]) == 1)
    assert (paint(shape, [common] if common else []) == expected).all()


@settings(max_examples=300)
@given(st.data())
def test_a_flat_range_becomes_rectangles_that_hold_exactly_its_elements_in_order(data):
    shape = data.draw(SHAPES)
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    numbers = np.arange(count).reshape(shape)
    found = [(at, numbers[box.within((0,) * len(shape))].reshape(-1)) for at, box in flat_rectangles(shape, start, stop)]
    assert all(list(part) == list(range(at, at + part.size)) for at, part in found)
    assert [n for _, part in found for n in part] == list(range(start, stop))


@settings(max_examples=200)
@given(st.data())
def test_a_flat_range_needs_at_most_two_boxes_an_axis(data):
    shape = data.draw(SHAPES.filter(len))
    count = math.prod(shape)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    assert len(list(flat_rectangles(shape, start, stop))) <= 2 * len(shape) - 1


def test_pieces_of_a_flat_buffer_hold_the_numbers_of_their_place():
    whole = np.arange(60.0).reshape(3, 4, 5)
    for piece in flat_pieces(whole.shape, 7, held(whole.reshape(-1)[7:49].copy()), "buffer"):
        assert (piece.source.load() == whole[piece.rectangle.within((0, 0, 0))]).all()


def test_a_window_of_a_window_is_one_window():
    source = held(np.arange(100.0).reshape(10, 10))
    twice = window(window(source, (slice(2, 9), slice(1, 8))), (slice(3, 5), slice(0, 2)))
    assert twice.source is source
    assert (twice.load() == source.load()[5:7, 1:3]).all()


def test_a_window_on_everything_is_the_source_itself():
    source = held(np.zeros((3, 4)))
    assert window(source, (slice(0, 3), slice(0, 4))) is source


def test_pieces_from_several_files_are_joined_under_one_key():
    array = np.zeros((4, 2))
    parts = [tensor("w", array, [((r, 0), (2, 2))]) for r in (0, 2)]
    assert len(gather(parts)["w"].pieces) == 2


def test_two_files_that_disagree_about_a_shape_are_refused():
    with pytest.raises(FormatError, match=r"w has shape \[4\] .* and \[5\]"):
        gather([tensor("w", np.zeros(4)), tensor("w", np.zeros(5))])
