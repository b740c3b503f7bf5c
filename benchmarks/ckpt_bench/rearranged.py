"""Tensors that were rearranged as a whole, vocabularies, values of a neighbour, last bits, ranks of another save."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.ckpt_bench.judged import Answer, judged
from benchmarks.ckpt_bench.models import State

HEADS, GROUPS, DIM, HIDDEN, FFN = 4, 2, 8, 32, 48
Config = dict[str, Any]
PHI: Config = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "vocab_size": 96,
}


def _random(*shape: int) -> torch.Tensor:
    return 0.02 * torch.randn(shape)


def phi() -> State:
    state = {"model.embed_tokens.weight": _random(96, HIDDEN), "lm_head.weight": _random(96, HIDDEN)}
    for i in range(3):
        p = f"model.layers.{i}."
        state |= {
            p + "self_attn.qkv_proj.weight": _random((HEADS + 2 * GROUPS) * DIM, HIDDEN),
            p + "self_attn.o_proj.weight": _random(HIDDEN, HIDDEN),
            p + "mlp.gate_up_proj.weight": _random(2 * FFN, HIDDEN),
            p + "mlp.down_proj.weight": _random(HIDDEN, FFN),
            p + "input_layernorm.weight": torch.ones(HIDDEN),
            p + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    return state


def gemma() -> State:
    state: State = {}
    for i in range(3):
        p = f"model.layers.{i}."
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            state[f"{p}{name}_layernorm.weight"] = torch.randn(HIDDEN)
        for name in ("q_norm", "k_norm"):
            state[f"{p}self_attn.{name}.weight"] = torch.randn(DIM)
        for name, rows in (
            ("self_attn.q_proj", 32),
            ("self_attn.k_proj", 16),
            ("self_attn.v_proj", 16),
            ("mlp.gate_proj", 48),
            ("mlp.up_proj", 48),
        ):
            state[f"{p}{name}.weight"] = _random(rows, HIDDEN)
    return state


def oss() -> State:
    state: State = {}
    for i in range(2):
        p = f"model.layers.{i}.mlp."
        state |= {
            p + "experts.gate_up_proj": _random(4, 32, 64),
            p + "experts.gate_up_proj_bias": _random(4, 64),
            p + "experts.down_proj": _random(4, 32, 32),
            p + "experts.down_proj_bias": _random(4, 32),
            p + "router.weight": _random(4, 32),
            p + "router.bias": _random(4),
        }
    return state


def bloom() -> State:
    """A family that no map knows: its fused matrix keeps its name."""
    state: State = {}
    for i in range(3):
        state |= {
            f"transformer.blocks.{i}.attn.Wqkv.weight": _random(96, 32),
            f"transformer.blocks.{i}.attn.out.weight": _random(32, 32),
            f"transformer.blocks.{i}.ffn.w12.weight": _random(96, 32),
            f"transformer.blocks.{i}.ffn.w3.weight": _random(32, 48),
        }
    return state


def each(pattern: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[State], None]:
    def plant(state: State) -> None:
        for key in state:
            if re.search(pattern, key):
                state[key] = change(state[key]).contiguous()

    return plant


def parts(order: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(fused: torch.Tensor) -> torch.Tensor:
        held = dict(zip("qkv", fused.split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM]), strict=True))
        return torch.cat([held[c] for c in order])

    return change


def by_group(fused: torch.Tensor) -> torch.Tensor:
    held = fused.split([HEADS * DIM, GROUPS * DIM, GROUPS * DIM])
    return torch.cat([h.view(GROUPS, -1, HIDDEN) for h in held], 1).reshape(fused.shape)


def dealt(axis: int, sizes: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Deal portions of an axis out in turn: the first of each, then the second of each."""

    def change(t: torch.Tensor) -> torch.Tensor:
        return torch.stack(t.chunk(sizes, axis), axis if axis < 0 else axis + 1).flatten(
            *((axis - 1, -1) if axis < 0 else (axis, axis + 1))
        )

    return change


def collected(t: torch.Tensor) -> torch.Tensor:
    return torch.cat([t[..., ::2], t[..., 1::2]], -1)


def copied(to: str, source: str) -> Callable[[State], None]:
    def plant(state: State) -> None:
        for key in [k for k in state if to in k]:
            state[key] = state[key.replace(to, source)].clone()

    return plant


def last_bit(t: torch.Tensor) -> torch.Tensor:
    found = t.clone().view(torch.int32)
    found.view(-1)[5:60:7] ^= 1
    return found.view(torch.float32)


CAUSES: dict[str, tuple[Callable[[], State], Callable[[State], None], str]] = {
    "qkv as k, q, v": (phi, each("qkv", parts("kqv")), r"k, q, v in B"),
    "qkv as v, k, q": (phi, each("qkv", parts("vkq")), r"v, k, q in B"),
    "qkv as q, v, k": (phi, each("qkv", parts("qvk")), r"q, v, k in B|k and v are exchanged"),
    "qkv by query group": (phi, each("qkv", by_group), r"interleaved by query group"),
    "qkv reversed": (phi, each("qkv", lambda t: t.flip(0)), r"reverse"),
    "qkv shuffled": (
        phi,
        each("qkv", lambda t: t[torch.randperm(len(t), generator=torch.Generator().manual_seed(2))]),
        r"^(?!.*interleaved).*order",
    ),
    "gate and up row by row": (phi, each("gate_up", dealt(0, 2)), r"interleaved|in turn"),
    "gate_up of experts collected": (oss, each("gate_up", collected), r"interleaved|in turn"),
    "gate_up of experts halves exchanged": (
        oss,
        each("gate_up", lambda t: t.roll(t.shape[-1] // 2, -1)),
        r"halves are exchanged|2, 1|exchanged",
    ),
    "down of experts reversed": (oss, each("down_proj$", lambda t: t.flip(-1)), r"reverse"),
    "experts turned": (oss, each("down_proj$", lambda t: t.transpose(1, 2)), r"transposed"),
    "unknown fused, thirds 3, 1, 2": (bloom, each("Wqkv", lambda t: t.roll(32, 0)), r"thirds|3, 1 and 2|3, 1, 2"),
    "unknown fused, by head": (
        bloom,
        each("Wqkv", lambda t: t.view(3, 4, 8, 32).transpose(0, 1).reshape(96, 32)),
        r"interleaved|in turn",
    ),
    "unknown gate_up exchanged": (bloom, each("w12", lambda t: t.roll(48, 0)), r"halves|exchanged"),
    "unknown gate_up rank by rank": (
        bloom,
        each("w12", lambda t: torch.cat([torch.cat([t[:24], t[48:72]]), torch.cat([t[24:48], t[72:]])])),
        r"interleaved|in turn|quarters|1, 3, 2, 4",
    ),
    "a norm from its neighbour": (
        gemma,
        copied("pre_feedforward", "post_attention"),
        r"pre_feedforward\w* of B holds? post_attention",
    ),
    "gate from up": (gemma, copied("gate_proj", "up_proj"), r"gate\S* of B holds? .*up"),
    "q_norm from k_norm": (gemma, copied("q_norm", "k_norm"), r"q_norm\S* of B holds? .*k_norm"),
    "layer 2 is a copy of layer 1": (gemma, copied("layers.2.", "layers.1."), r"layers\.2 of B holds? layers\.1"),
    "one matrix from another layer": (
        gemma,
        copied("layers.2.self_attn.q_proj", "layers.0.self_attn.q_proj"),
        r"layers\.2\S* of B holds? .*layers\.0",
    ),
    "last bit of float32": (phi, each(r"\.1\.mlp\.down_proj", last_bit), r"last bit of float32"),
    "last bit of all": (phi, each(r"proj", last_bit), r"last bit of float32"),
    "a vocabulary cut short": (phi, each("embed|lm_head", lambda t: t[:80]), r"16 rows (fewer|less) in B|16 rows more in A"),
    "rows more, no padding": (phi, each("embed|lm_head", lambda t: torch.cat([t, t[:32]])), r"32 rows more in B"),
}


def save(folder: Path, state: State, config: Config) -> Path:
    folder.mkdir(parents=True)
    save_file({k: v.clone().contiguous() for k, v in state.items()}, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def rearranged_pairs(folder: Path) -> Iterator[Answer]:
    """Yield the answers of this part."""
    configs = {phi: PHI, gemma: {**PHI, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "head_dim": DIM}}
    for name, (make, plant, pattern) in CAUSES.items():
        torch.manual_seed(0)
        state = make()
        config = dict(configs.get(make, {"hidden_size": HIDDEN, "num_hidden_layers": 2}))
        a = save(folder / name / "a", state, config)
        plant(state)
        wanted = 3 if "rows more" in name or "cut short" in name else 2
        if "rows more" in name:
            config.pop("vocab_size")
            (a / "config.json").write_text(json.dumps(config))
        found = judged(a, save(folder / name / "b", state, config))
        good = found.code in ((1, 2) if "last bit" in name else (wanted,)) and bool(re.search(pattern, found.sentence))
        yield Answer(make.__name__, "safetensors", name, good, found.sentence)
    yield from _vocabularies(folder / "vocabulary")
    yield from _fresh_norms(folder / "norms")
    yield from _scripts(folder / "scripts")
    yield from _ranks(folder / "ranks")


def _vocabularies(folder: Path) -> Iterator[Answer]:
    torch.manual_seed(1)
    state = phi()
    padded = {
        k: torch.cat([v, _random(32, HIDDEN)]) if v.shape[0] == 96 and v.shape[1] == HIDDEN and "mlp" not in k else v
        for k, v in state.items()
    }
    for name, config in (("vocab_size in both", PHI), ("vocab_size of text_config", {"text_config": PHI})):
        found = judged(save(folder / name / "a", state, config), save(folder / name / "b", padded, config))
        yield Answer("phi", name, "", found.code == 0, found.sentence)
    plain = {k: v for k, v in PHI.items() if k != "vocab_size"}
    found = judged(save(folder / "c" / "a", state, plain), save(folder / "c" / "b", padded, PHI))
    yield Answer("phi", "vocab_size in the padded one", "", found.code == 0, found.sentence)


def _fresh_norms(folder: Path) -> Iterator[Answer]:
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    weight, one, zero = torch.randn(4, 4), torch.ones(4), torch.zeros(4)
    a = {"l.weight": weight, **{f"{n}.{p}": v.clone() for n in "nm" for p, v in (("weight", one), ("bias", zero))}}
    b = {k.replace(".weight", ".gamma").replace(".bias", ".beta") if k[0] in "nm" else k: v for k, v in a.items()}
    trained = {**b, "n.gamma": one * 1.5}
    for name, state in (("a", a), ("b", b), ("c", trained)):
        save_file(state, folder / f"{name}.safetensors")
    found = judged(folder / "a.safetensors", folder / "b.safetensors")
    yield Answer("norms", "gamma and beta", "", found.code == 0, found.sentence)
    found = judged(folder / "a.safetensors", folder / "c.safetensors")
    yield Answer(
        "norms", "gamma and beta", "one norm trained", found.code == 2 and "n.weight" in found.sentence, found.sentence
    )


def _scripts(folder: Path) -> Iterator[Answer]:
    folder.mkdir(parents=True)
    torch.manual_seed(1)
    nets: dict[str, torch.nn.Module] = {
        "convolution": torch.nn.Sequential(torch.nn.Conv1d(2, 4, 3, padding=1), torch.nn.ReLU(), torch.nn.BatchNorm1d(4)),
        "lstm": torch.nn.LSTM(4, 4, 2),
        "lists": _Lists(),
    }
    for name, net in nets.items():
        path = folder / f"{name}.pt"
        scripted: Any = torch.jit.script(net)
        scripted.save(str(path))
        found = judged(path, path)
        yield Answer(
            name, "TorchScript", "", found.code == 0 and not any("warning" in d for d in found.details), found.sentence
        )


class _Lists(torch.nn.Module):
    """Attributes of all kinds of lists that TorchScript pickles."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.floats, self.truths, self.names = [0.5, 1.5], [True, False], ["a", "b"]
        self.tensors, self.table = [torch.ones(2)], {"a": 1}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.floats[0] + self.tensors[0] * float(self.truths[0]) + self.table[self.names[0]]


def _ranks(folder: Path) -> Iterator[Answer]:
    """Write Megatron-LM's folders of two tensor ranks; then let one rank's file be of another save, or rounded."""
    from types import SimpleNamespace

    torch.manual_seed(4)
    args = vars(
        SimpleNamespace(
            num_layers=3,
            hidden_size=32,
            num_attention_heads=4,
            num_query_groups=4,
            kv_channels=8,
            swiglu=False,
            untie_embeddings_and_output_weights=True,
            tensor_model_parallel_size=2,
            pipeline_model_parallel_size=1,
        )
    )
    norms = {
        f"decoder.layers.{i}.{n}.weight": 1 + _random(32) for i in range(3) for n in ("input_layernorm", "pre_mlp_layernorm")
    }
    norms["decoder.final_layernorm.weight"] = 1 + _random(32)
    wholes = {
        f"decoder.layers.{i}.{n}.weight": _random(*s)
        for i in range(3)
        for n, s in (
            ("self_attention.linear_proj", (32, 32)),
            ("self_attention.linear_qkv", (96, 32)),
            ("mlp.linear_fc1", (64, 32)),
            ("mlp.linear_fc2", (32, 64)),
        )
    }
    wholes |= {"embedding.word_embeddings.weight": _random(64, 32), "output_layer.weight": _random(64, 32)}

    def cut(name: str, value: torch.Tensor, rank: int) -> torch.Tensor:
        return value.chunk(2, 1 if re.search(r"linear_proj|fc2", name) else 0)[rank].clone()

    def write(path: Path, change: Callable[[str, torch.Tensor], torch.Tensor], iteration: int, of_norms: bool) -> Path:
        for rank in range(2):
            model = {k: cut(k, v, rank) for k, v in wholes.items()} | dict(norms)
            if rank == 1:
                model = {k: change(k, v) if k in wholes or of_norms else v for k, v in model.items()}
            (path / f"mp_rank_0{rank}").mkdir(parents=True)
            held = {"args": args, "model": model, "iteration": iteration if rank == 1 else 500, "checkpoint_version": 3.0}
            torch.save(held, path / f"mp_rank_0{rank}" / "model_optim_rng.pt")
        return path

    def same(_: str, value: torch.Tensor) -> torch.Tensor:
        return value

    a = write(folder / "a", same, 500, False)
    generator = torch.Generator().manual_seed(9)
    planted: dict[str, tuple[Callable[[str, torch.Tensor], torch.Tensor], int, bool, str]] = {
        "a rank of another save": (
            lambda _, v: v + 1e-3 * torch.randn(v.shape, generator=generator),
            400,
            True,
            r"tensor.* 1\b.*(400|iteration)|iteration 400|mp_rank_01",
        ),
        "a rank of another save, same norms": (
            lambda _, v: v + 1e-3 * torch.randn(v.shape, generator=generator),
            500,
            False,
            r"(only|all).*mp_rank_01",
        ),
        "a rank rounded": (lambda _, v: v.bfloat16().float(), 500, True, r"mp_rank_01.*bfloat16|bfloat16.*mp_rank_01"),
    }
    found = judged(a, write(folder / "again", same, 500, False))
    yield Answer("megatron", "TP2", "", found.code == 0, found.sentence)
    for name, (change, iteration, of_norms, pattern) in planted.items():
        found = judged(a, write(folder / name, change, iteration, of_norms))
        yield Answer("megatron", "TP2", name, found.code == 2 and bool(re.search(pattern, found.sentence)), found.sentence)
