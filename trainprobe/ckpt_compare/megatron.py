"""What Megatron's per-rank and distributed checkpoints have in common: folders, arguments, plain sections."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.plain_state import digest, flat
from trainprobe.ckpt_compare.storage.inert_objects import Thing
from trainprobe.ckpt_compare.storage.mapped import inside, read_text

LATEST = "latest_checkpointed_iteration.txt"
CONVERTED = ("torch", "torch_dist")  # what `--ckpt-convert-save` puts a checkpoint into


def iteration_folder(path: Path) -> Path | None:
    """Return the folder of one iteration: the path itself, or what `latest_checkpointed_iteration.txt` in it points to."""
    if not path.is_dir():
        return None
    latest = path / LATEST
    if not latest.is_file():
        converted = [path / name for name in CONVERTED if (path / name / LATEST).is_file()]
        return iteration_folder(converted[0]) if len(converted) == 1 else path
    said = read_text(latest).strip()
    folder = inside(path, f"iter_{int(said):07d}" if said.isdigit() and len(said) < 20 else said)
    return folder if folder.is_dir() else path


def namespace(args: Any) -> dict[str, Any]:
    """Return Megatron's arguments as a dict, whatever they were stored as."""
    if isinstance(args, Thing):
        return args.state
    return dict(args) if isinstance(args, Mapping) else {}


def model_config(args: Any) -> tuple[dict[str, Any], dict[str, int]]:
    """Return (what the names need to know of the model, layout) from Megatron's arguments."""
    a = namespace(args)
    heads = a.get("num_attention_heads")
    grouped = a.get("group_query_attention")
    config = {
        "heads": heads,
        "groups": a.get("num_query_groups") if grouped or grouped is None else heads,
        "head_dim": a.get("kv_channels") or (a["hidden_size"] // heads if heads and a.get("hidden_size") else None),
        "layers": a.get("num_layers"),
        "hidden": a.get("hidden_size"),
        "gated": a.get("swiglu"),
        "experts": a.get("num_experts"),
        "moe_ffn": a.get("moe_ffn_hidden_size") or a.get("ffn_hidden_size"),
        "grouped": a.get("moe_grouped_gemm"),
        "q_down_rows": a.get("q_lora_rank"),
        "kv_down_rows": (a.get("kv_lora_rank") or 0) + (a.get("qk_pos_emb_head_dim") or 0) or None,
        "tied": not a.get("untie_embeddings_and_output_weights"),
        "bucket_size": a.get("ddp_bucket_size"),
        "vocab": a.get("vocab_size"),
        "vocab_multiple": (a.get("make_vocab_size_divisible_by") or 0) * (a.get("tensor_model_parallel_size") or 1) or None,
    }
    config["groups"] = config["groups"] or heads
    named = {
        "world": "world_size",
        "tp": "tensor_model_parallel_size", "pp": "pipeline_model_parallel_size", "vpp": "virtual_pipeline_model_parallel_size",
        "ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size", "dp": "data_parallel_size",
        "cp": "context_parallel_size",
    }  # fmt: skip
    return config, {axis: int(a[key]) for axis, key in named.items() if a.get(key)}


def plain_sections(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return iteration, scheduler and arguments of a checkpoint's non-tensor content as plain values."""
    sections: dict[str, dict[str, Any]] = {"iteration": {k: content[k] for k in ("iteration",) if k in content}}
    if "opt_param_scheduler" in content:
        sections["scheduler"] = flat(content["opt_param_scheduler"])
    if "args" in content:
        sections["args"] = flat(namespace(content["args"]))
    return sections


def rng_digests(rank: str, states: Any) -> dict[str, str]:
    """Return `rank/generator` → digest for Megatron's RNG states, which come as a dict in one or two lists."""
    while isinstance(states, list) and states:
        states = states[0]
    return {f"{rank}/{name}": digest(value) for name, value in states.items()} if isinstance(states, Mapping) else {}


def rank_of(folder: str) -> tuple[int, int, int, bool] | None:
    """Read `mp_rank_TT[_PPP][_EEE]`: (tp, first further number, second further number, whether there were two).

    None if it is none.
    """
    match = re.fullmatch(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?", folder)
    if match is None:
        return None
    return int(match[1]), int(match[2] or 0), int(match[3] or 0), match[3] is not None
