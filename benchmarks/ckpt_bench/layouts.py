"""The layouts that a state is written in, and the writers that they come from."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

from benchmarks.ckpt_bench.causes import keys
from benchmarks.ckpt_bench.models import DIM, GROUPS, HEADS, HIDDEN, LAYERS, State

LAYOUTS = ("safetensors", "shards", "bin", "old", "dcp", "megatron")


def write(layout: str, state: State, source: Path, path: Path) -> bool:
    """Write a state in a layout beside the configuration of its model; return False where the layout has no such model."""
    path.mkdir(parents=True)
    if layout != "megatron":
        (path / "config.json").write_text((source / "config.json").read_text())
    if layout == "safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path / "model.safetensors", {"format": "pt"})
    elif layout == "shards":
        names, index = list(state), {}
        for i in range(3):
            part = {k: state[k].contiguous() for k in names[i::3]}
            save_file(part, path / f"model-{i}.safetensors", {"format": "pt"})
            index |= dict.fromkeys(part, f"model-{i}.safetensors")
        (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    elif layout in ("bin", "old"):
        torch.save(state, path / "pytorch_model.bin", _use_new_zipfile_serialization=layout == "bin")
    elif layout == "dcp":
        dcp.save({"model": state}, storage_writer=dcp.FileSystemWriter(path), no_dist=True)
    else:
        return write_megatron(state, path)
    return True


def write_megatron(state: State, path: Path) -> bool:
    """Write a Llama as Megatron-LM keeps it on one rank: q, k and v interleaved by query group, gate and up in one matrix."""
    if "model.layers.0.mlp.gate_proj.weight" not in state or keys(state, r"bias|feedforward"):
        return False
    model: State = {"embedding.word_embeddings.weight": state["model.embed_tokens.weight"]}
    straight = {"self_attention.linear_proj": "self_attn.o_proj", "mlp.linear_fc2": "mlp.down_proj",
                "input_layernorm": "input_layernorm", "pre_mlp_layernorm": "post_attention_layernorm"}  # fmt: skip
    for i in range(LAYERS):
        ours, theirs = f"model.layers.{i}.", f"decoder.layers.{i}."
        model |= {
            f"{theirs}{a}.weight": state[f"{ours}{b}.weight"] for a, b in straight.items() if f"{ours}{b}.weight" in state
        }
        groups = [state[f"{ours}self_attn.{p}_proj.weight"].view(GROUPS, -1, HIDDEN) for p in "qkv"]
        model[f"{theirs}self_attention.linear_qkv.weight"] = torch.cat(groups, 1).reshape(-1, HIDDEN)
        model[f"{theirs}mlp.linear_fc1.weight"] = torch.cat([state[f"{ours}mlp.{p}_proj.weight"] for p in ("gate", "up")])
    model |= {"decoder.final_layernorm.weight": state["model.norm.weight"], "output_layer.weight": state["lm_head.weight"]}
    args = SimpleNamespace(num_layers=LAYERS, hidden_size=HIDDEN, num_attention_heads=HEADS, num_query_groups=GROUPS,
                           kv_channels=DIM, swiglu=True, untie_embeddings_and_output_weights=True)  # fmt: skip
    (path / "mp_rank_00").mkdir()
    torch.save({"args": vars(args), "model": model, "iteration": 1}, path / "mp_rank_00" / "model_optim_rng.pt")
    return True
