"""A two-layer language model."""

import torch
from torch import nn
from torch.nn import functional

WIDTH = 16
VOCABULARY = 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 32)
        self.down = nn.Linear(32, WIDTH)
        self.drop = nn.Dropout(0.1)

    def attend(self, x, mask):
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, dim=-1))
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :].bool())
        return self.out(y.transpose(1, 2).flatten(-2))

    def forward(self, x, mask):
        x = x + self.drop(self.attend(self.norm1(x), mask))
        return x + self.drop(self.down(functional.gelu(self.up(self.norm2(x)))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("positions", torch.arange(64.0)[:, None] / 10000 ** (torch.arange(WIDTH) / WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        for name, p in self.named_parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.05)

    def forward(self, input_ids, attention_mask):
        x = self.embed(input_ids) + torch.sin(self.positions[: input_ids.shape[1]])
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.head(self.norm(x))
