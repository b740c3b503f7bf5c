"""A teacher in eval whose attention takes torch's fast path, which it leaves where a torch-function mode is on."""

import torch
from torch import nn

from tests.zoo import normal


class Taught(nn.Module):
    """A student and what a frozen encoder, and attention over sequences of several lengths, say of its input."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.1, batch_first=True)
        self.teacher = nn.TransformerEncoder(layer, 2)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.student = nn.Linear(16, 16)

    def forward(self, x, padding):
        self.teacher.eval()
        self.attention.eval()
        with torch.no_grad():
            said = self.teacher(x, src_key_padding_mask=padding)
            lengths = (~padding).sum(1).tolist()
            ragged = torch.nested.nested_tensor([row[:n] for row, n in zip(x, lengths, strict=True)])
            looked = self.attention(ragged, ragged, ragged, need_weights=False)[0].to_padded_tensor(0.0)
        return (self.student(x) - said).square() + looked * self.student(x)


def build():
    return Taught()


def batch(step):
    return normal(step, 3, 5, 16), torch.arange(5) >= torch.tensor([[5], [3], [4]])
