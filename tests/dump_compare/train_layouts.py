"""Two steps of a small GPT in several layouts of torch, dumped: `train_layouts.py FOLDER KIND[+LEVEL][:FAULT]…` on each rank.

KIND: ddp, fsdp1, fsdp2, hsdp, tensor (DTensor), context (keys and values are gathered), pipeline (two stages), zero1 to zero3
(DeepSpeed), alone, fused (alone, with one projection for q, k and v), redundancy (DDP with torch's ZeroRedundancyOptimizer).
All layouts begin with the same weights and see the same samples. LEVEL: of the dump, L0 without it; `tensors`: L0 with all
elements, of one step; `states`: L0 with the state of the optimizer, `state tensors`: that with all elements. KIND may end with
the optimizer, `ddp-sgd`: AdamW without it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

import trainprobe
from trainprobe.engine.core.records import Place

WIDTH, WORDS, STEPS = 32, 50, 2
WHERE = "layers.1.down"
CONTEXT: list[bool] = []  # not empty where each rank holds a part of each sequence
SHARE_SAMPLES = ("redundancy", "ddp", "fsdp1", "fsdp2", "hsdp", "zero1", "zero2", "zero3")
MONITOR = {"parameters": True, "gradients": True}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale: float | None = None  # of attention, that of the width of a head without it
        self.norm, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.act, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        b, t, _ = h.shape
        projected = self.qkv(h).chunk(3, -1) if hasattr(self, "qkv") else [linear(h) for linear in (self.q, self.k, self.v)]
        q, k, v = (each.view(b, t, -1, 8).transpose(1, 2) for each in projected)
        mixed = attention(q, k, v, self.scale)
        x = x + self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        return x + self.down(self.act(self.up(self.norm2(x))))

    def fuse(self) -> None:
        """Make one projection of three."""
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        with torch.no_grad():
            for name, mine in self.qkv.named_parameters():
                mine.copy_(torch.cat([part.get_parameter(name) for part in (self.q, self.k, self.v)]))
        del self.q, self.k, self.v


class Gathered(torch.autograd.Function):
    """The keys or values of all ranks, in their order along the sequence."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor) -> Tensor:
        every = [torch.empty_like(mine, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
        dist.all_gather(every, mine.contiguous())
        return torch.cat(every, 2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        grad = grad.contiguous().clone()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size(), 2)[dist.get_rank()]


def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None) -> Tensor:
    if not CONTEXT:
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    k, v = (Gathered.apply(each) for each in (k, v))
    begin = dist.get_rank() * q.shape[2]
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(begin)
    return functional.scaled_dot_product_attention(q, k, v, mask)


class Gpt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.embed(x)
        for layer in self.layers:
            h = layer(h)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


class Stage(nn.Module):
    """The half of a model that one stage of a pipeline holds, under its names in the whole."""

    def __init__(self, whole: Gpt, last: bool) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(int(last)): whole.layers[int(last)]})
        if last:
            self.head = whole.head
        else:
            self.embed = whole.embed

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if hasattr(self, "embed"):
            return self.layers["0"](self.embed(x))
        return functional.cross_entropy(self.head(self.layers["1"](x)).flatten(0, 1), y.flatten())


def pass_through(model: Any, x: Tensor, y: Tensor) -> None:
    """Run forward and backward of this stage, between the others."""
    handed = torch.empty(*x.shape, WIDTH)
    if dist.get_rank() == 0:
        h = model(x, y)
        dist.send(h.detach(), 1)
        dist.recv(handed, 1)
        h.backward(handed)
    else:
        dist.recv(handed, 0)
        model(handed.requires_grad_(), y).backward()
        assert handed.grad is not None
        dist.send(handed.grad, 0)


def spread(kind: str, model: Any) -> Any:
    """Return a model whose parameters are spread over the ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    if kind == "pipeline":
        return Stage(model, last=dist.get_rank() == 1)
    if kind in ("ddp", "context", "redundancy"):
        return nn.parallel.DistributedDataParallel(model)
    world = dist.get_world_size()
    if kind == "tensor":
        return spread_tensors(model, init_device_mesh("cpu", (world,), mesh_dim_names=("tp",)))
    if kind == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        cpu = torch.device("cpu")
        return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({Block}), use_orig_params=True, device_id=cpu)
    from torch.distributed.fsdp import fully_shard

    shape, names = ((2, world // 2), ("dp_replicate", "dp_shard")) if kind == "hsdp" else ((world,), ("dp",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def spread_tensors(model: Any, mesh: Any) -> Any:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    column, row = ["q", "k", "v", "up"], ["out", "down"]
    for layer in model.layers:
        ways = {name: ColwiseParallel() for name in column} | {name: RowwiseParallel() for name in row}
        parallelize_module(layer, mesh, ways)
    return model


def local_part(weight: Any) -> Tensor:
    """Return the memory of what this rank holds of a weight."""
    held = getattr(weight, "ds_tensor", weight)
    return (held.to_local() if hasattr(held, "to_local") else held).data


def plant(fault: str, bare: Any, model: Any) -> None:
    """Change what the second rank alone holds (`weight`, `shard`, one last bit: `flip`), or have two ranks `swap`
    their shards, or change what the second one computes (`column`: the gradient of one linear layer).

    Or what an operator gives there (`gelu`, `attention`), or what belongs to the `key` of an attention, or two of its `rows`,
    which change places. Or leave out the `reduce` of activations or `gradients`, or reduce gradients with a wrong `scale`.
    """
    linear = bare.get_submodule(WHERE)
    second = dist.get_rank() == 1
    if fault in ("weight", "shard") and second:
        local_part(linear.weight).mul_(1.01)
    if fault == "flip" and second:
        last_bits = local_part(linear.weight).view(torch.int32).view(-1)
        last_bits[7] ^= 1
    if fault == "swap":
        mine = local_part(linear.weight)
        held = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(held, mine.contiguous())
        mine.copy_(held[1 - dist.get_rank()])
    if fault == "column" and second:
        bare.get_submodule("layers.1.up").weight.register_hook(lambda gradient: gradient * 1.01)
    key = getattr(bare.layers[1], "k", None)
    if fault == "key" and second:
        key.register_forward_hook(lambda module, given, out: out * 1.05)
    if fault == "key weight" and second:
        with torch.no_grad():
            key.weight.to_local().mul_(1.05)
    if fault == "key rows":
        with torch.no_grad():
            rows = local_part(key.weight)
            rows[[1, 2]] = rows[[2, 1]]
    if fault == "key gradient":
        key.weight.register_hook(lambda gradient: gradient * 1.2)
    if fault == "gelu" and second:
        bare.get_submodule("layers.1.act").approximate = "tanh"
    if fault == "attention" and second:
        bare.get_submodule("layers.1").scale = 0.3
    if fault == "reduce":
        linear._forward_hooks.clear()
        linear.register_forward_hook(lambda module, given, out: out.to_local())
    if fault == "gradients":
        bare.register_forward_pre_hook(lambda module, given: setattr(model, "require_backward_grad_sync", False))
        model.require_backward_grad_sync = False
    if fault == "scale":
        summed = lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future()  # noqa: E731
        model.register_comm_hook(None, lambda state, bucket: summed(state, bucket).then(lambda done: done.value()[0]))


def plant_in_optimizer(fault: str, step: int, optimizer: Any) -> None:
    """Change how the second rank alone steps, or behind the first step what it keeps, of the weight that has most elements.

    Another learning `rate`, weight `decay` or `betas`; a `moment`, a `square` or a count of `steps` that is another, or moments
    that are `lost`; or all state is `forgotten` there, or by all ranks at a `restart`.
    """
    kept = getattr(optimizer, "optim", optimizer).state
    if fault == "restart" and step == 1:  # as a resumed run that does not load what the optimizer kept
        kept.clear()
    if dist.is_initialized() and dist.get_rank() != 1:
        return
    if fault == "forgotten" and step == 1:
        kept.clear()
    for group in optimizer.param_groups if step == 0 else ():
        group["lr"] *= 1.1 if fault == "rate" else 1
        group["weight_decay"] = 0.5 if fault == "decay" else group["weight_decay"]
        if fault == "betas":
            group["betas"] = (0.88, group["betas"][1])
    if fault not in ("moment", "steps", "lost", "square") or step != 1:
        return
    states = kept[max(kept, key=lambda p: p.numel())]
    if fault == "lost":
        states["exp_avg"].zero_()
        states["exp_avg_sq"].zero_()
    elif fault == "steps":
        states["step"].add_(1)
    else:
        local_part(states["exp_avg" if fault == "moment" else "exp_avg_sq"]).mul_(1.05)


def batches(kind: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield what this rank is given: its share of the samples, or of each sequence, or all."""
    for words in torch.randint(WORDS, (STEPS, 4, 9), generator=torch.Generator().manual_seed(3)):
        x, y = words[:, :-1], words[:, 1:]
        if kind in SHARE_SAMPLES or kind == "context":
            x, y = (each.chunk(dist.get_world_size(), int(kind == "context"))[dist.get_rank()] for each in (x, y))
        yield x, y


def train(output: Path, kind: str = "alone", fault: str = "", level: str = "L0") -> None:
    torch.set_num_threads(1)  # as all layouts, whose bits it is compared with
    torch.manual_seed(0)
    CONTEXT[:] = [True] if kind == "context" else []
    bare = Gpt()
    plan: dict[str, Any] = {
        "level": level,
        "summary": "both",
        "step": list(range(STEPS)),
        "monitor": MONITOR,
        "sinks": ["dump"],
    }
    if level == "tensors":
        plan |= {"level": "L0", "task": "tensor", "step": [0]}
    if level.startswith("state"):
        plan |= {"level": "L0", "monitor": {**MONITOR, "optimizer_state": True}}
        plan |= {"task": "tensor"} if level == "state tensors" else {}
    kind, _, way = kind.partition("-")
    if way == "half":
        bare.bfloat16()
    if way == "frozen":
        for p in (*bare.embed.parameters(), *bare.layers[0].down.parameters()):
            p.requires_grad_(False)
    if kind.startswith("zero"):
        train_deepspeed(output, kind, bare, fault, plan, way)
        return
    if kind == "fused":
        for layer in bare.layers:
            layer.fuse()
    model = bare if kind in ("alone", "fused") else spread(kind, bare)
    if fault:
        plant(fault, bare, model)
    optimizer = make_optimizer(way, list(model.parameters()), redundancy=kind == "redundancy")
    place = None
    spread_samples = kind in SHARE_SAMPLES or kind == "context"
    scale = 2 * (dist.get_world_size() if spread_samples else 1)  # what a script counts of its ranks; changes no bit
    axis = {"context": "cp", "pipeline": "pp"}.get(kind)
    if axis is not None:
        place = Place(dist.get_rank(), dist.get_world_size(), {axis: (dist.get_rank(), dist.get_world_size())})
    with trainprobe.Probe(plan, place=place, output=output, console=False) as probe:
        probe.open(model, optimizer)
        for step, (x, y) in enumerate(batches(kind)):
            plant_in_optimizer(fault, step, optimizer)
            with probe.step():
                optimizer.zero_grad()
                if kind == "pipeline":
                    pass_through(model, x, y)
                else:
                    loss = model(x, y)
                    (loss / scale * scale).backward()
                optimizer.step()


class InBlocks(torch.optim.SGD):
    """Keeps its momentum beside the exact one as whole numbers, of blocks of what this rank holds, each with its largest."""

    BLOCK = 24

    def step(self, closure: Any = None) -> Any:
        out = super().step(closure)
        for p, state in self.state.items():
            held = local_part(state["momentum_buffer"]).flatten()
            blocks = functional.pad(held, (0, -len(held) % self.BLOCK)).view(-1, self.BLOCK)
            largest = blocks.abs().amax(1, keepdim=True).clamp_min(1e-30)
            state["state1"] = ((blocks / largest * 127 + 128).to(torch.uint8).flatten()[: len(held)]).view_as(local_part(p))
            state["absmax1"] = largest.flatten()
        return out


def make_optimizer(way: str, parameters: list[Any], *, redundancy: bool = False) -> Any:
    """Return an optimizer of torch: AdamW, or what `way` calls."""
    kinds: dict[str, tuple[Any, dict[str, Any]]] = {
        "": (torch.optim.AdamW, {"lr": 1e-3}),
        "frozen": (torch.optim.AdamW, {"lr": 1e-3}),
        "half": (torch.optim.AdamW, {"lr": 1e-3}),
        "sgd": (torch.optim.SGD, {"lr": 0.1}),
        "blocks": (InBlocks, {"lr": 0.1, "momentum": 0.9}),
        "momentum": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        "adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
        "amsgrad": (torch.optim.AdamW, {"lr": 1e-3, "amsgrad": True}),
        "fused": (torch.optim.AdamW, {"lr": 1e-3, "fused": True}),
        "foreach": (torch.optim.AdamW, {"lr": 1e-3, "foreach": True}),
        "capturable": (torch.optim.AdamW, {"lr": torch.tensor(1e-3), "fused": True}),
        "rmsprop": (torch.optim.RMSprop, {"lr": 1e-3}),
        "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
    }
    if way == "muon":  # which takes matrices alone: nobody steps the others
        return torch.optim.Muon([p for p in parameters if p.ndim == 2], lr=0.02)
    kind, settings = kinds[way]
    if redundancy:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(parameters, kind, **settings)
    return kind(parameters, **settings)


def train_deepspeed(output: Path, kind: str, bare: Any, fault: str, plan: dict[str, Any], way: str = "") -> None:
    """DeepSpeed counts steps from 1."""
    import deepspeed

    from trainprobe.integrations import deepspeed as integration

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
    config = {
        "train_micro_batch_size_per_gpu": 4 // dist.get_world_size(),
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": int(kind[-1])},
        "steps_per_print": 10**9,
        "bf16": {"enabled": way == "half"},  # with master weights
    }
    optimizer = make_optimizer(way, list(bare.parameters()))
    engine = deepspeed.initialize(model=bare, optimizer=optimizer, config=config)[0]
    if fault:
        plant(fault, bare, engine)
    plan = {**plan, "step": [step + 1 for step in plan["step"]], "console": False}
    integration.attach(engine, plan, output=str(output))
    for step, (x, y) in enumerate(batches(kind)):
        plant_in_optimizer(fault, step, engine.basic_optimizer)
        engine.backward(engine(x, y))
        engine.step()
    integration.detach(engine)
    engine.destroy()


def main() -> None:
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        recorded, _, fault = layout.partition(":")
        kind, _, level = recorded.partition("+")
        train(Path(sys.argv[1]) / layout, kind, fault, level or "L0")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
