"""Complex, boolean, integer, float64, half, float8 and zero-size tensors on their way through modules and ops."""

import torch
from torch import nn

from tests.zoo import normal


class Passes(nn.Module):
    def forward(self, *tensors):
        return tensors


class OddTypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.spectrum = nn.Parameter(torch.ones(4, dtype=torch.complex64))
        self.wide = nn.Linear(6, 2, dtype=torch.float64)
        self.passes = Passes()
        self.register_buffer("table", torch.arange(12, dtype=torch.int32))
        self.register_buffer("flags", torch.tensor([True, False, True]))

    def forward(self, x, index):
        y = self.linear(x)
        waves = torch.fft.rfft(y) * self.spectrum
        small = y.detach().to(torch.float8_e4m3fn)
        empty = y[:0]
        self.passes(waves, small, empty, y.half(), y > 0, self.table[index], torch.tensor(3), self.flags)
        back = torch.fft.irfft(waves, n=6)
        return back, self.wide(y.double()), waves.real, empty, (y.half() * 2).float()


def build():
    return OddTypes()


def batch(step):
    return normal(step, 4, 6), torch.tensor([1, 5, 3 + step % 4])
