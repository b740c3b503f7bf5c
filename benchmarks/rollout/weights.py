"""Twelve planted faults of pushing weights, in two layouts of the trainer, and twenty healthy pushes.

The trainer is a tiny mixture of experts of transformers: sharded as by tensor parallelism 2 × pipeline parallelism 2 (four
processes' shards, one after the other), or by FSDP2 in two gloo processes; LoRA for the adapter. The engine has the fused
parameters of vLLM (`qkv_proj`, `w13_weight`), a padded vocabulary and tensor parallelism 1.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import orjson
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

from benchmarks.rollout.models import LAYERS, model_of
from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import Shard
from trainprobe.rollout.weights.arrival import Prints, Push, WeightArrival
from trainprobe.rollout.weights.prints import as_json, fingerprints, from_json, joined
from trainprobe.rollout.weights.sync import WeightSync

VERSIONS, PADDING = 5, 16
CONFIG = {"heads": 4, "groups": 2, "head_dim": 16}
State = dict[str, torch.Tensor]


@cache
def versions() -> list[State]:
    """Return the weights of each version, float32: small random steps."""
    states = [dict(model_of("moe", 7).state_dict())]
    draw = torch.Generator().manual_seed(1)
    for _ in range(VERSIONS - 1):
        moved = {
            n: t + 0.02 * torch.randn(t.shape, generator=draw) * (t.std() if t.dim() > 1 else 1) for n, t in states[-1].items()
        }
        states.append(moved)
    return states


@dataclass
class _Rank:
    """The shards of one process: query, key, value and vocabulary by rows, projections back by columns, experts by number."""

    state: State
    tp: int
    pp: int

    def parts(self, moment: str) -> Iterator[Part]:
        """Yield the shards."""
        for name, t in self.state.items():
            layer = re.search(r"layers\.(\d+)\.", name)
            stage = int(layer[1]) * 2 // LAYERS if layer else int("embed" not in name)
            if stage != self.pp:
                continue
            axis = 1 if "o_proj" in name else 0 if re.search(r"[qkv]_proj|experts|embed|lm_head", name) else None
            offset, shape = [0] * t.dim(), list(t.shape)
            if axis is not None:
                shape[axis] //= 2
                offset[axis] = self.tp * shape[axis]
            piece = t[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
            yield Part(
                name, "value", piece, Shard(tuple(offset), tuple(shape), tuple(t.shape), () if axis is not None else ("tp",))
            )

    def scalars(self) -> Mapping[str, float]:
        """Return nothing."""
        return {}


def tensor_and_pipeline(dtype: str) -> list[Push]:
    """Return the pushes of a trainer with tensor parallelism 2 and pipeline parallelism 2."""
    found: list[Push] = []
    for number, state in enumerate(versions()):
        ranks = [fingerprints(None, source=_Rank(state, tp, pp), config=CONFIG, dtype=dtype) for tp in (0, 1) for pp in (0, 1)]
        found.append(Push(number, joined(ranks)))
    return found


def _fsdp_rank(rank: int, folder: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    model = model_of("moe", 7)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    for number, state in enumerate(versions()):
        with torch.no_grad():
            for name, p in model.named_parameters():
                local, whole = p.to_local(), state[name]
                begin = -(-whole.shape[0] // 2) * rank
                local.copy_(whole[begin : begin + local.shape[0]])
        for dtype in ("float32", "bfloat16"):
            document = as_json(fingerprints(model, dtype=dtype))
            Path(folder, f"{dtype}-{number}-{rank}.json").write_bytes(orjson.dumps(document))
    dist.destroy_process_group()


@cache
def _fsdp_prints() -> dict[tuple[str, int], Prints]:
    """Run two gloo processes with FSDP2; return (dtype, version) → the fingerprints of both together."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        multiprocessing.spawn(_fsdp_rank, (folder,), 2)  # pyright: ignore
        return {
            (dtype, number): joined(
                [from_json(orjson.loads(Path(folder, f"{dtype}-{number}-{rank}.json").read_bytes())) for rank in (0, 1)]
            )
            for dtype in ("float32", "bfloat16")
            for number in range(VERSIONS)
        }


def fsdp(dtype: str) -> list[Push]:
    """Return the pushes of a trainer with FSDP2 in two processes."""
    return [Push(number, _fsdp_prints()[dtype, number]) for number in range(VERSIONS)]


LAYOUTS: dict[str, Callable[[str], list[Push]]] = {"TP 2 x PP 2": tensor_and_pipeline, "FSDP2 x 2": fsdp}


class Engine(torch.nn.Module):
    """Parameters under dotted names."""

    def __init__(self, state: State) -> None:
        super().__init__()
        for name, tensor in state.items():
            at: torch.nn.Module = self
            *path, last = name.split(".")
            for step in path:
                if step not in at._modules:
                    at.add_module(step, torch.nn.Module())
                at = at._modules[step]  # pyright: ignore
            at.register_parameter(last, torch.nn.Parameter(tensor.clone(), requires_grad=False))


def fused(state: State, dtype: torch.dtype) -> State:
    """Return what an engine makes of a state dict when it loads it."""
    found: State = {}
    for name, t in state.items():
        t = t.to(dtype)
        if "q_proj" in name:
            parts = [state[name.replace("q_proj", n)].to(dtype) for n in ("q_proj", "k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "experts.gate_up_proj" in name:
            found[name.replace("gate_up_proj", "w13_weight")] = t
        elif "experts.down_proj" in name:
            found[name.replace("down_proj", "w2_weight")] = t
        elif "embed" in name or "lm_head" in name:
            found[name] = torch.cat([t, torch.zeros(PADDING, t.shape[1], dtype=dtype)])
        elif "k_proj" not in name and "v_proj" not in name:
            found[name] = t
    return found


def answer_of(pushes: list[Push], state: State, before: State | None = None) -> WeightArrival:
    """Judge an engine behind the last push. before: what it held at the push before."""
    engine = Engine(state)
    sync = WeightSync(pushes)
    if before is not None:
        with torch.no_grad():
            for name, p in engine.named_parameters():
                p.data = before[name].clone()
            WeightSync(pushes[:-1]).received(engine, config=CONFIG)
            for name, p in engine.named_parameters():
                p.data = state[name].clone()
    return sync.received(engine, config=CONFIG)


_QKV, _W2 = "model.layers.1.self_attn.qkv_proj.weight", "model.layers.2.mlp.experts.w2_weight"
_W13, _O = "model.layers.2.mlp.experts.w13_weight", "model.layers.1.self_attn.o_proj.weight"
_ROUTER = "model.layers.2.mlp.gate.weight"


def _with(state: State, name: str, tensor: torch.Tensor) -> State:
    return state | {name: tensor.contiguous()}


def _never_sent(new: State, old: State) -> tuple[State, State]:
    own = torch.randn(new[_O].shape, generator=torch.Generator().manual_seed(3)).to(new[_O].dtype)
    return _with(new, _O, own), _with(old, _O, own)


def _half(new: State, old: State) -> State:
    rows = new[_W2].clone()
    rows[4:] = old[_W2][4:]
    return _with(new, _W2, rows)


def _half_of_one(new: State, old: State) -> State:
    name = "lm_head.weight"
    rows = new[name].clone()
    rows[64:] = old[name][64:]
    return _with(new, name, rows)


def _shard(new: State, old: State) -> State:
    name = "model.embed_tokens.weight"
    rows = new[name].clone()
    rows[64:128] = rows[:64]
    return _with(new, name, rows)


def _exchanged(new: State, old: State) -> State:
    tensor = new[_W13].clone()
    tensor[:, :48], tensor[:, 48:] = new[_W13][:, 48:], new[_W13][:, :48]
    return _with(new, _W13, tensor)


def _expert(new: State, old: State) -> State:
    tensor = new[_W2].clone()
    tensor[3] = torch.randn(tensor[3].shape, generator=torch.Generator().manual_seed(5)).to(tensor.dtype) * tensor[3].std()
    return _with(new, _W2, tensor)


def _permuted(new: State, old: State) -> State:
    t = new[_O]
    return _with(new, _O, t.reshape(8, 8, 8, 8).permute(0, 2, 1, 3).reshape(t.shape))


def _cast(new: State, old: State) -> State:
    half = new[_O].float()
    noise = torch.randn(half.shape, generator=torch.Generator().manual_seed(2))
    unit = 2.0**-8 if new[_O].dtype == torch.bfloat16 else 2.0**-23
    return _with(new, _O, (half * (1 + unit * noise.sign() * (noise.abs() > 0.5))).to(new[_O].dtype))


# fault → (pattern of the sentence, what the engine holds after and before the push)
FAULTS: dict[str, tuple[str, Callable[[State, State], State | tuple[State, State]]]] = {
    "never sent": (r"^Never sent: layers\.1\.attention\.proj", _never_sent),
    "stale": (r"^Stale: layers\.1\.attention\.[qkv].*version 3", lambda new, old: _with(new, _QKV, old[_QKV])),
    "all stale": (r"^Stale: .* 3\. \d+ of", lambda new, old: old),
    "half of the experts": (r"^Stale: layers\.2\.mlp\.experts\.4\.fc2.*version 3", _half),
    "half loaded": (r"^Half loaded: output\.weight: rows 64–127 are those of version 3", _half_of_one),
    "transposed": (r"^Transposed: layers\.1\.attention\.proj", lambda new, old: _with(new, _O, new[_O].T)),
    "exchanged": (r"^Exchanged: layers\.2\.mlp\.experts\.0\.(gate|up)", _exchanged),
    "cast in another order": (r"^Cast in another order: layers\.1\.attention\.proj", _cast),
    "one expert": (r"layers\.2\.mlp\.experts\.3\.fc2", _expert),
    "one shard": (r"^One shard is wrong: embedding\.word\.weight: rows 64–127", _shard),
    "permuted": (r"^Laid out otherwise: layers\.1\.attention\.proj", _permuted),
    "never travels": (
        r"^Never travels: layers\.2\.mlp\.router\.weight",
        lambda new, old: {n: t for n, t in new.items() if n != _ROUTER},
    ),
}


def planted() -> Iterator[tuple[str, str, str, WeightArrival]]:
    """Yield (fault, layout, pattern, answer)."""
    for number, (fault, (pattern, plant)) in enumerate(FAULTS.items()):
        for place, (layout, make) in enumerate(LAYOUTS.items()):
            dtype = ("float32", "bfloat16")[(number + place) % 2]
            new, old = (fused(versions()[v], getattr(torch, dtype)) for v in (4, 3))
            made = plant(new, old)
            held, before = made if isinstance(made, tuple) else (made, {n: old[n] for n in made})
            yield fault, layout, pattern, answer_of(make(dtype), held, before)


def healthy() -> Iterator[tuple[str, WeightArrival]]:
    """Yield (which, answer) of twenty pushes."""
    for layout, make in LAYOUTS.items():
        for dtype in ("float32", "bfloat16"):
            pushes = make(dtype)
            for number in range(VERSIONS):
                yield (
                    f"{layout}, {dtype}, version {number}",
                    answer_of(pushes[: number + 1], fused(versions()[number], getattr(torch, dtype))),
                )
