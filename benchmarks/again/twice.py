"""The same step twice: planted flips on one of two ranks, ops that are not deterministic, healthy models.

python -m benchmarks.again.twice                 # everything; a line a case
python -m benchmarks.again.twice --repeats 40    # fewer healthy repeats than 200
python -m benchmarks.again.twice --only flips    # or unsteady, healthy, cost

A flip is planted below everything that looks: an op's result is changed in the dispatcher of torch, a weight in its memory. A
case is named where an error says "hardware", this rank, this bit, and the module, op or parameter that was hit.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import trainprobe
from benchmarks.models import SIZES, prepare
from trainprobe.demo.gpt import GPT, Shape, next_token_loss

STRUCK = 4  # the step
# aten op → words of which a finding has one
FORWARD = {
    "addmm": ("linear", "qkv", "proj", "up", "down"),
    "gelu": ("gelu", "act"),
    "native_layer_norm": ("layer_norm", "norm"),
}
FORWARD |= {"embedding": ("embedding", "tokens", "places"), "_softmax": ("softmax",), "bmm": ("matmul", "attn")}
BACKWARD = {"gelu_backward": ("gelu", "act"), "mm": ("linear", "weight", "backward"), "native_layer_norm_backward": ("norm",)}


def shape(**more: Any) -> Shape:
    return Shape(**{"layers": 2, "width": 32, "heads": 2, "context": 16, "vocabulary": 64, "attention": "explicit", **more})


def flip(t: Tensor, place: int, bit: int) -> None:
    """Flip one bit of one element in its memory; torch is told of no write."""
    kinds = {2: torch.int16, 4: torch.int32}
    mask = 1 << bit if bit < 31 else -(1 << 31)
    t.data.view(kinds[t.element_size()]).view(-1)[place % t.numel()] ^= mask


class Striking(TorchDispatchMode):
    """Flips a bit in the first result of the n-th call of an aten op."""

    def __init__(self, op: str, n: int, place: int, bit: int) -> None:
        super().__init__()
        self.op, self.left, self.place, self.bit, self.struck = op, n, place, bit, False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not self.struck and func.overloadpacket.__name__ == self.op:
            self.left -= 1
            if self.left < 0:
                self.struck = True
                flip((out[0] if isinstance(out, tuple | list) else out), self.place, self.bit)
        return out


def flips() -> list[dict[str, Any]]:
    """Return 20 planted flips: 8 results of ops, 6 of gradients, 6 of weights."""
    draw = random.Random(36)
    forward = [
        (op, draw.randrange(2))
        for op in ("addmm", "addmm", "gelu", "native_layer_norm", "embedding", "_softmax", "bmm", "gelu")
    ]
    backward = [
        (op, draw.randrange(2)) for op in ("gelu_backward", "mm", "native_layer_norm_backward", "mm", "gelu_backward", "mm")
    ]
    weights = [
        (name, when)
        for when in ("begin", "forward", "backward")
        for name in ("layers.0.attn.qkv.weight", "layers.1.norm2.weight")
    ]
    cases: list[dict[str, Any]] = [{"kind": "op", "op": op, "n": n, "words": FORWARD[op]} for op, n in forward]
    cases += [{"kind": "gradient", "op": op, "n": n, "words": BACKWARD[op]} for op, n in backward]
    cases += [{"kind": "weight", "name": name, "when": when, "words": (name,)} for name, when in weights]
    for case in cases:
        case |= {"rank": draw.randrange(2), "bit": draw.randrange(32), "place": draw.randrange(1 << 20)}
    return cases


@contextmanager
def struck(case: dict[str, Any] | None) -> Iterator[None]:
    if case is None or case["kind"] not in ("op", "gradient"):
        yield
        return
    with Striking(case["op"], case["n"], case["place"], case["bit"]) as mode:
        yield
    assert mode.struck, case


def hit(case: dict[str, Any] | None, when: str, weights: dict[str, Any]) -> None:
    if case is not None and case.get("when") == when:
        flip(weights[case["name"]], case["place"], case["bit"])


def train(rank: int, case: dict[str, Any] | None, folder: str) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = GPT(shape(dropout=0.1))
    ddp = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    torch.manual_seed(rank)
    plan = {"output": folder, "console": False, "audit": {"repeat": STRUCK}, "on_error": "raise"}
    weights = dict(model.named_parameters())
    with trainprobe.watch(ddp, optimizer, plan) as probe:
        for step in range(STRUCK + 2):
            now = case if case is not None and step == STRUCK and rank == case["rank"] else None
            x = torch.randint(0, 64, (2, 17))
            with probe.step():
                hit(now, "begin", weights)
                with struck(now if now and now["kind"] == "op" else None):
                    loss = next_token_loss(ddp(x[:, :-1]), x[:, 1:])
                hit(now, "forward", weights)
                optimizer.zero_grad()
                with struck(now if now and now["kind"] == "gradient" else None):
                    loss.backward()
                hit(now, "backward", weights)
                optimizer.step()
    return [
        {"message": f.message, "severity": f.severity, "step": f.step, "rank": rank}
        for f in probe.findings
        if f.rule == "repeat"
    ]


def on_rank(rank: int, store: str, out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    found = [train(rank, case, tempfile.mkdtemp()) for case in [None, *flips()]]
    Path(f"{out}{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def run_flips() -> str:
    """Run all planted flips and the healthy twin; return how many were named."""
    folder = Path(tempfile.mkdtemp())
    mp.spawn(on_rank, (str(folder / "store"), str(folder / "rank")), 2)
    both = [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]
    print(f"healthy twin on two ranks: {len(both[0][0]) + len(both[1][0])} findings")
    named = 0
    for case, here, there in zip(flips(), both[0][1:], both[1][1:], strict=True):
        mine, other = (here, there) if case["rank"] == 0 else (there, here)
        text = mine[0]["message"] if mine else ""
        right = f"hardware: on rank {case['rank']}" in text and f"bit {case['bit']} " in text and not other
        right = right and any(word in text for word in case["words"])
        named += right
        print(
            f"{case['kind']:9} {case.get('op') or case['name']:28} {'named' if right else 'MISSED':7} {text[:150]}", flush=True
        )
    return f"flips: {named} of 20 named"


# ---- not deterministic -----------------------------------------------------------------------------------------------


class Odd(nn.Module):
    """Adds something to what a module makes."""

    def __init__(self, inner: nn.Module, more: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.more = inner, more

    def forward(self, x: Tensor) -> Tensor:
        return self.more(self.inner(x))


def unseeded(x: Tensor) -> Tensor:
    own = torch.Generator()
    own.manual_seed(int.from_bytes(os.urandom(4), "big"))
    return x + 1e-3 * torch.rand(x.shape, generator=own)


def scattered(x: Tensor) -> Tensor:
    """Sum with atomic additions, whose order is another one each time."""
    flat = x.reshape(-1)
    order = torch.tensor(random.Random(os.urandom(4)).sample(range(flat.numel()), flat.numel()))
    return x + torch.zeros(4).index_add(0, order % 4, flat[order]).mean()


def masked(x: Tensor) -> Tensor:
    keep = torch.tensor(list(os.urandom(x.shape[-1])), dtype=torch.float32)
    return x * (keep > 10)


def split_sum(x: Tensor) -> Tensor:
    """Sum two halves whose border is chosen anew, as a kernel that picks its tiles by load does."""
    at = 1 + os.urandom(1)[0] % (x.shape[-1] - 2)
    return x + (x[..., :at].sum(-1, keepdim=True) + x[..., at:].sum(-1, keepdim=True))


class OddGradient(torch.autograd.Function):
    """Hands on its input, and a gradient that is another one each time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return scattered(gradient)


# ---- healthy ---------------------------------------------------------------------------------------------------------


class Checkpointed(GPT):
    """Computes each layer again in the backward pass."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))  # pyright: ignore[reportOptionalCall]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(self.norm(x))


class Counting(nn.Module):
    """Has running statistics, a buffer that it writes, an attribute that counts, and returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.head = nn.Embedding(64, 32), nn.BatchNorm1d(16), nn.Linear(32, 64)
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        self.calls += 1
        self.seen.add_(1)
        x = self.norm(self.embed(tokens)) * (1 + 0.01 * self.seen) * (1 + 0.001 * self.calls)
        return {"logits": self.head(x + 0.1 * torch.rand(x.shape) * random.random())}


def single(make: Callable[[], nn.Module], steps: int, micros: int = 1, cast: bool = False) -> list[Any]:
    """Train on one rank, each step twice; return the findings of the repeat."""
    torch.manual_seed(0)
    random.seed(0)
    model = make()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = {"output": tempfile.mkdtemp(), "console": False, "audit": {"repeat": 1}, "on_error": "raise"}
    with trainprobe.watch(model, optimizer, plan) as probe:
        for _ in range(steps):
            with probe.step():
                optimizer.zero_grad()
                for _ in range(micros):
                    x = torch.randint(0, 64, (2, 17))
                    with torch.autocast("cpu", torch.bfloat16, enabled=cast):
                        out = model(x[:, :-1])
                        next_token_loss(out["logits"] if isinstance(out, dict) else out, x[:, 1:]).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
        assert probe.program("repeat").repeated == steps
    return [finding for finding in probe.findings if finding.rule == "repeat"]


HEALTHY: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "gpt": (lambda: GPT(shape()), {}),
    "fused attention, dropout": (lambda: GPT(shape(attention="fused", dropout=0.2)), {}),
    "rotary, tied head": (lambda: GPT(shape(positions="rotary", tied_head=True)), {}),
    "accumulation over 3": (lambda: GPT(shape(dropout=0.1)), {"micros": 3}),
    "autocast to bfloat16": (lambda: GPT(shape(dropout=0.1)), {"cast": True}),
    "activation checkpointing": (lambda: Checkpointed(shape(dropout=0.1)), {}),
    "batch norm, buffers, counters": (Counting, {"micros": 2}),
    "compiled by no one, bfloat16 weights": (lambda: GPT(shape()).bfloat16(), {}),
}


def odd(more: Callable[[Tensor], Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = GPT(shape())
        model.layers[0].mlp.act = Odd(model.layers[0].mlp.act, more)  # type: ignore[union-attr]
        return model

    return make


UNSTEADY = {f.__name__: odd(f) for f in (unseeded, scattered, masked, split_sum)} | {"odd gradient": odd(OddGradient.apply)}


def run_unsteady() -> str:
    named = 0
    for name, make in UNSTEADY.items():
        found = single(make, 2)
        right = bool(found) and all(
            f.message.startswith("not deterministic") and "layers.0.mlp.act" in f.message for f in found
        )
        named += right
        print(f"unsteady  {name:28} {'named' if right else 'MISSED':7} {found[0].message[:150] if found else ''}", flush=True)
    return f"not deterministic: {named} of {len(UNSTEADY)} named"


def run_healthy(repeats: int) -> str:
    alarms = 0
    for name, (make, more) in HEALTHY.items():
        found = single(make, repeats // len(HEALTHY), **more)
        alarms += len(found)
        print(f"healthy   {name:36} {len(found)} alarms {found[0].message[:150] if found else ''}", flush=True)
    return f"healthy: {alarms} alarms in {repeats} repeats"


def run_cost(pairs: int = 6) -> str:
    """Measure the CPU time of steps that run twice, of those that do not, and of forward and backward alone, in turn."""
    watched, bare = prepare(SIZES["real"], "whole step"), prepare(SIZES["real"], "fwd+bwd")
    plan = {"output": tempfile.mkdtemp(), "console": False, "audit": {"repeat": 2, "every": 1000}, "on_error": "raise"}
    spent: dict[str, list[float]] = {"twice": [], "once": [], "passes": []}
    with trainprobe.watch(watched.model, watched.optimizer, plan) as probe:
        for i in range(2 * pairs + 2):
            begun = time.process_time()
            with probe.step():
                watched.step(i)
            middle = time.process_time()
            bare.step(i)
            if i > 1:
                spent["once" if i % 2 else "twice"].append(middle - begun)
                spent["passes"].append(time.process_time() - middle)
    twice, once, passes = (median(spent[name]) for name in ("twice", "once", "passes"))
    more = twice - once - passes
    each = f"{more / once:.1%} of a step, {more / once / 500:.3%} of a training that repeats each 500th"
    return f"CPU seconds: {twice:.3f} twice, {once:.3f} once, {passes:.3f} the passes alone; beyond the passes {each}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--only", choices=("flips", "unsteady", "healthy", "cost"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    parts = {"flips": run_flips, "unsteady": run_unsteady, "healthy": lambda: run_healthy(given.repeats), "cost": run_cost}
    for line in [part() for name, part in parts.items() if given.only in (None, name)]:
        print(line)


if __name__ == "__main__":
    main()
