import numpy as np
import pytest
import torch

from trainprobe.engine.compare.number_formats import FORMATS, coarser, decode, number_format
from trainprobe.errors import FormatError

EIGHT_BITS = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("name", EIGHT_BITS)
def test_every_eight_bit_float_decodes_to_the_value_torch_gives_it(name):
    if not hasattr(torch, name):
        pytest.skip(f"torch {torch.__version__} has no {name}")
    bits = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(bits.copy()).view(getattr(torch, name)).float().numpy()
    assert np.array_equal(decode(bits, number_format(name)).astype(np.float32), expected, equal_nan=True)


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_every_sixteen_bit_float_decodes_to_the_value_torch_gives_it(name):
    bits = np.arange(1 << 16, dtype=np.uint16)
    expected = torch.from_numpy(bits.view(np.int16).copy()).view(getattr(torch, name)).float().numpy()
    fmt = number_format(name)
    assert np.array_equal(decode(bits.view(fmt.storage), fmt), expected, equal_nan=True)


@pytest.mark.parametrize("name", [f for f in FORMATS if f.startswith(("float", "bfloat"))])
def test_epsilon_and_smallest_normal_are_those_of_torch(name):
    if name in ("float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"):
        pytest.skip("torch.finfo describes them by another convention")
    info = torch.finfo(getattr(torch, name))
    assert (number_format(name).epsilon, number_format(name).smallest) == (info.eps, info.smallest_normal)


def test_a_complex_array_gains_an_axis_of_real_and_imaginary_parts():
    assert decode(np.array([1 + 2j], np.complex64), number_format("complex64")).tolist() == [[1.0, 2.0]]


def test_torch_prefixed_names_are_understood():
    assert number_format("torch.bfloat16").name == "bfloat16"


def test_an_unknown_name_is_refused_with_a_suggestion():
    with pytest.raises(FormatError, match="did you mean 'bfloat16'"):
        number_format("bfloat61")


def test_the_coarser_of_two_formats_has_fewer_fraction_bits():
    assert coarser(number_format("float32"), number_format("bfloat16")).name == "bfloat16"


def test_a_float_is_coarser_than_an_integer():
    assert coarser(number_format("int64"), number_format("float16")).name == "float16"
