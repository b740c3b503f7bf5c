"""Two checkpoints that should hold the same weights, and what a conversion did to them.

    python examples/two_checkpoints.py
    trainprobe ckpt-compare two_checkpoints/before.pt two_checkpoints/after

The conversion joins query, key and value to one matrix, in the wrong order.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

torch.manual_seed(0)
folder = Path("two_checkpoints")
(folder / "after").mkdir(parents=True, exist_ok=True)

before = {"embed.weight": torch.randn(100, 32)}
for layer in range(2):
    for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
        before[f"layers.{layer}.self_attn.{name}.weight"] = torch.randn(32, 32)
torch.save(before, folder / "before.pt")

after = {"embed.weight": before["embed.weight"]}
for layer in range(2):
    parts = [before[f"layers.{layer}.self_attn.{name}.weight"] for name in ("q_proj", "v_proj", "k_proj")]
    after[f"layers.{layer}.self_attn.qkv_proj.weight"] = torch.cat(parts)
    after[f"layers.{layer}.self_attn.o_proj.weight"] = before[f"layers.{layer}.self_attn.o_proj.weight"]
save_file(after, folder / "after" / "model.safetensors")
config = {"model_type": "phi3", "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 2}
(folder / "after" / "config.json").write_text(json.dumps(config), encoding="utf-8")
