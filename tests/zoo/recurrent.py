"""An LSTM and a multi-head attention: one call that runs many steps, with tuple outputs and flattened weights."""

from torch import nn

from tests.zoo import normal


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

    def forward(self, x):
        y, (hidden, cell) = self.lstm(x)
        mixed, weights = self.attention(y, y, y)
        return mixed, weights, hidden, cell


def build():
    return Recurrent()


def batch(step):
    return (normal(step, 3, 5, 6),)
