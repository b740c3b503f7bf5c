"""A small GLM-like model in PyTorch, trained two steps under a plan: `glm_torch.py PLAN [WEIGHTS] [PLANTED]`.

WEIGHTS: a file that the model's weights are saved to. PLANTED: a parameter whose gradient is doubled.
"""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn import functional

import trainprobe
from tests.mindspore.glm_numbers import HEADS, INNER, LAYERS, LENGTH, STEPS, WIDTH, WORDS, mask, tokens, weights


class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return x * torch.rsqrt(torch.mean(x * x, -1, True) + 1e-5) * self.weight


class ColumnParallelLinear(nn.Linear):
    pass


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query_key_value = ColumnParallelLinear(WIDTH, 3 * WIDTH)
        self.dense = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x, mask):
        batch = x.shape[0]
        q, k, v = (
            part.reshape(batch, LENGTH, HEADS, WIDTH // HEADS).permute(0, 2, 1, 3)
            for part in self.query_key_value(x).chunk(3, -1)
        )
        scores = torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5 + mask, -1)
        return self.dense(torch.matmul(scores, v).permute(0, 2, 1, 3).reshape(batch, LENGTH, WIDTH))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(WIDTH, 2 * INNER, bias=False)
        self.dense_4h_to_h = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x):
        gate, up = self.dense_h_to_4h(x).chunk(2, -1)
        return self.dense_4h_to_h(functional.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.input_norm, self.attention = RMSNorm(), Attention()
        self.post_norm, self.mlp = RMSNorm(), MLP()

    def forward(self, x, mask):
        x = x + self.attention(self.input_norm(x), mask)
        return x + self.mlp(self.post_norm(x))


class GLM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.final_norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x, mask):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.final_norm(x))


def main(plan, saved="", planted=""):
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    model = GLM()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in weights().items()})
    if saved:
        torch.save(model.state_dict(), saved)
    if planted:
        model.get_parameter(planted).register_hook(lambda gradient: gradient * 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    added = torch.from_numpy(mask())
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(STEPS):
            with probe.step():
                batch = torch.from_numpy(tokens(step)).long()
                logits = model(batch[:, :-1], added)
                loss = functional.cross_entropy(logits.reshape(-1, WORDS), batch[:, 1:].reshape(-1))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


if __name__ == "__main__":
    main(*sys.argv[1:])
