import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ckpt_compare.memory import tensor
from tests.ckpt_compare.test_random_layouts import cuts
from trainprobe.ckpt_compare.fingerprints import tensor_fingerprint
from trainprobe.engine.stats.checksum import fingerprint


@settings(max_examples=100)
@given(st.data())
def test_the_fingerprint_of_any_layout_is_that_of_the_whole_array(data):
    shape = tuple(data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=3)))
    array = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    assert tensor_fingerprint(tensor("w", array, data.draw(cuts(shape)))) == fingerprint(array)


def test_a_complex128_array_has_the_fingerprint_of_its_definition():
    array = np.arange(6).reshape(2, 3) * (1 + 2j)
    assert tensor_fingerprint(tensor("w", array, [((0, 0), (2, 1)), ((0, 1), (2, 2))])) == fingerprint(array)


def test_an_incomplete_tensor_has_none():
    assert tensor_fingerprint(tensor("w", np.zeros((2, 2)), [((0, 0), (1, 2))])) is None
