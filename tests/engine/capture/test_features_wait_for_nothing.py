"""Working features out reads nothing back: on the meta device, which has no data, any read would raise."""

import pytest
import torch

from trainprobe.engine.arrays.torch_extras import exponent_counts
from trainprobe.engine.arrays.torch_library import TorchLibrary
from trainprobe.engine.capture.features.attention import attention_logits, of_logits
from trainprobe.engine.capture.features.dead_units import dead_share
from trainprobe.engine.capture.features.number_formats import CountedFormats
from trainprobe.engine.capture.features.routers import chosen, similarity
from trainprobe.engine.capture.features.weight_spectra import FIRST, spectrum
from trainprobe.engine.stats.exponents import ExponentBins
from trainprobe.engine.stats.low_precision import FORMATS
from trainprobe.engine.tape import Tape


def empty(*shape, dtype=torch.float32):
    return torch.empty(*shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("mask", [None, empty(2, 1, 300, 300, dtype=torch.bool), empty(1, 8, 300, 300)])
def test_attention(mask):
    logits = attention_logits(empty(2, 8, 300, 16), empty(2, 4, 300, 16), mask, causal=True, scale=None, rows=64, sequences=1)
    assert [x.shape for x in of_logits(logits)] == [(8,)] * 3


def test_weights_and_routers():
    assert [x.shape for x in spectrum(empty(30, 4, 3), None, FIRST)] == [(), (), (12,)]
    assert similarity(empty(6, 20)).shape == ()
    assert chosen([empty(10, 2, dtype=torch.int64)], 6).shape == (6,)
    assert chosen([empty(10, 6, dtype=torch.bool)], 6).shape == (6,)


@pytest.mark.parametrize("scale", [1.0, 3.0, "amax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_formats(scale, dtype):
    tape = Tape(TorchLibrary())
    counted = CountedFormats(tape, torch.device("meta"), dtype, list(FORMATS), scale, True)
    for shape in ((50, 70), (3,), (1 << 11, 1 << 10)):
        counted.add(empty(*shape, dtype=torch.bfloat16))
    counted.finish()
    assert counted.deferred.tensor.shape == (3, ExponentBins(str(dtype).rpartition(".")[2], 2 * len(FORMATS)).bins)


def test_exponents_and_dead_units():
    t = empty(50, 70, dtype=torch.bfloat16)
    assert exponent_counts(t).dim() == 1
    assert dead_share(t, 0.0).shape == ()
