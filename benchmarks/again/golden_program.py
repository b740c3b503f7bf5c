"""A small training with switches: harmless changes and real regressions of what a release may change."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainprobe.demo.gpt as gpt
from trainprobe.demo.gpt import GPT, Block, Shape

SWITCH = sys.argv[1] if len(sys.argv) > 1 else ""
STEPS = 3


def on(name: str) -> bool:
    return name == SWITCH


def method(cls: Any, name: str) -> Callable[[Any], Any]:
    """Replace a method of a class."""
    return lambda function: setattr(cls, name, function)


def by_hand(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt() * weight + (0 if bias is None else bias)


def change_modules() -> None:
    """Change what modules compute."""
    if on("layer norm by hand"):
        method(nn.LayerNorm, "forward")(lambda self, x: by_hand(x, self.weight, self.bias, self.eps))
    if on("layer norm: biased by n - 1"):
        method(nn.LayerNorm, "forward")(
            lambda self, x: (x - x.mean(-1, True)) / (x.std(-1, keepdim=True) + self.eps) * self.weight + self.bias
        )
    if on("layer norm: no bias"):
        method(nn.LayerNorm, "forward")(
            lambda self, x: functional.layer_norm(x, self.normalized_shape, self.weight, None, self.eps)
        )
    if on("linear as product and sum"):
        method(nn.Linear, "forward")(lambda self, x: x @ self.weight.T + (0 if self.bias is None else self.bias))
    if on("linear by einsum"):
        method(nn.Linear, "forward")(
            lambda self, x: torch.einsum("...i,oi->...o", x, self.weight) + (0 if self.bias is None else self.bias)
        )
    if on("linear in two halves of the sum"):
        method(nn.Linear, "forward")(halves)
    if on("linear in bfloat16"):
        method(nn.Linear, "forward")(
            lambda self, x: functional.linear(
                x.bfloat16(), self.weight.bfloat16(), None if self.bias is None else self.bias.bfloat16()
            ).float()
        )
    if on("gelu by erf"):
        method(nn.GELU, "forward")(lambda self, x: 0.5 * x * (1 + torch.erf(x / math.sqrt(2))))
    if on("gelu by tanh"):
        method(nn.GELU, "forward")(lambda self, x: functional.gelu(x, approximate="tanh"))
    if on("gelu is silu"):
        method(nn.GELU, "forward")(lambda self, x: functional.silu(x))
    if on("residual in the other order"):
        method(Block, "forward")(other_order)
    if on("residual without its input norm"):
        method(Block, "forward")(lambda self, x: (y := x + self.attn(x)) + self.mlp(self.norm2(y)))
    if on("dropout left on"):
        method(nn.Dropout, "forward")(lambda self, x: functional.dropout(x, 0.1))


def halves(self: Any, x: Tensor) -> Tensor:
    at = self.in_features // 2
    whole = x[..., :at] @ self.weight[:, :at].T + x[..., at:] @ self.weight[:, at:].T
    return whole if self.bias is None else whole + self.bias


def other_order(self: Any, x: Tensor) -> Tensor:
    x = self.drop(self.attn(self.norm1(x))) + x
    return self.drop(self.mlp(self.norm2(x))) + x


def change_attention() -> None:
    """Change what attention computes."""

    def attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, dropout_p: float) -> Tensor:
        size = q.shape[-1]
        scale = 1 / size if on("attention scaled by the size") else size**-0.5
        scores = (q * scale) @ k.transpose(-2, -1)
        shift = 0 if on("mask hides the token itself") else 2 if on("mask lets one later token pass") else 1
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(shift)
        hidden[0, 0] = False
        scores = scores.masked_fill(hidden, float("-inf"))
        if on("softmax by hand"):
            parts = (scores - scores.amax(-1, keepdim=True)).exp()
            return (parts / parts.sum(-1, keepdim=True)) @ v
        if on("softmax in bfloat16"):
            return scores.bfloat16().softmax(-1).float() @ v
        return scores.softmax(-1) @ v

    own = ("attention scaled by the size", "mask hides the token itself", "mask lets one later token pass", "softmax by hand")
    own += ("softmax in bfloat16", "attention scaled before the product")
    gpt.explicit_attention = attend if SWITCH in own else gpt.explicit_attention


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    flat, wanted = logits.flatten(0, 1), targets.flatten()
    if on("loss by log-softmax"):
        return functional.nll_loss(flat.log_softmax(-1), wanted)
    if on("loss as sum and count"):
        return functional.cross_entropy(flat, wanted, reduction="sum") / wanted.numel()
    if on("label smoothing"):
        return functional.cross_entropy(flat, wanted, label_smoothing=0.05)
    if on("loss summed over the batch"):
        return functional.cross_entropy(flat, wanted, reduction="sum") / targets.shape[1]
    return functional.cross_entropy(flat, wanted)


def made() -> GPT:
    torch.manual_seed(1 if on("another seed of the weights") else 0)
    explicit = "fused" if on("fused attention") else "explicit"
    model = GPT(Shape(layers=2, width=32, heads=2, context=16, vocabulary=64, attention=explicit))
    for module in model.modules():
        if isinstance(module, nn.LayerNorm) and on("eps 1e-5 to 1e-3"):
            module.eps = 1e-3
    if on("weights stored transposed"):
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.T.contiguous().T
    if on("one bias frozen"):
        model.layers[1].mlp.up.bias.requires_grad_(False)  # type: ignore[union-attr]
    if on("activation checkpointing"):
        for layer in model.layers:
            layer.mlp.forward = lambda x, mlp=layer.mlp: checkpoint(type(mlp).forward, mlp, x, use_reentrant=False)  # type: ignore
    return model


def main() -> None:
    change_modules()
    change_attention()
    torch.use_deterministic_algorithms(on("deterministic algorithms"))
    torch.backends.mkldnn.enabled = not on("without oneDNN")
    if on("two threads"):
        torch.set_num_threads(2)
    if on("four threads"):
        torch.set_num_threads(4)
    model = made()
    rate = 1.1e-3 if on("rate a tenth higher") else 1e-3
    more: dict[str, Any] = {"fused": True} if on("fused AdamW") else {"foreach": False} if on("AdamW without foreach") else {}
    more |= {"betas": (0.9, 0.95)} if on("beta2 0.95") else {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0 if on("no weight decay") else 0.1, **more)
    draw = torch.Generator().manual_seed(5 if on("another order of the data") else 4)
    for _ in range(STEPS):
        tokens = torch.randint(0, 64, (4, 17), generator=draw)
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        if on("targets not shifted"):
            targets = inputs
        loss = loss_of(model(inputs), targets)
        optimizer.zero_grad(set_to_none=not on("gradients zeroed in place"))
        loss.backward()
        if not on("no clipping"):
            nn.utils.clip_grad_norm_(model.parameters(), 0.2, foreach=False if on("clipping without foreach") else None)
        optimizer.step()


HARMLESS = (
    *("two threads", "four threads", "fused attention", "fused AdamW", "AdamW without foreach", "weights stored transposed"),
    *("linear by einsum", "linear as product and sum", "linear in two halves of the sum", "gelu by erf", "layer norm by hand"),
    *("softmax by hand", "loss by log-softmax", "loss as sum and count", "activation checkpointing", "without oneDNN"),
    *(
        "residual in the other order",
        "clipping without foreach",
        "gradients zeroed in place",
        "attention scaled before the product",
    ),
)
# switch → words, of which the sentence has one
REGRESSIONS = {
    "layer norm: biased by n - 1": ("layers.0.norm1",),
    "layer norm: no bias": ("layers.0.norm1", "norm"),
    "eps 1e-5 to 1e-3": ("layers.0.norm1",),
    "linear in bfloat16": ("layers.0.attn.qkv",),
    "gelu by tanh": ("layers.0.mlp.act",),
    "gelu is silu": ("layers.0.mlp.act",),
    "residual without its input norm": ("layers.0",),
    "dropout left on": ("layers.0.drop",),
    "attention scaled by the size": ("layers.0.attn",),
    "mask hides the token itself": ("layers.0.attn",),
    "mask lets one later token pass": ("layers.0.attn",),
    "softmax in bfloat16": ("layers.0.attn",),
    "label smoothing": ("the loss",),
    "loss summed over the batch": ("the loss",),
    "targets not shifted": ("the loss",),
    "another seed of the weights": ("weights that the run begins with",),
    "another order of the data": ("the data",),
    "rate a tenth higher": ("the update",),
    "beta2 0.95": ("the update",),
    "no clipping": ("the update",),
}

if __name__ == "__main__":
    main()
