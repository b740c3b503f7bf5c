"""Adapters that PEFT writes: beside each other, in a training's state, and merged into their model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.ckpt_bench.judged import Answer, judged
from benchmarks.ckpt_bench.models import State, first_models, made, more_models


def _kinds(modules: list[str]) -> dict[str, Any]:
    import peft

    return {
        "lora": peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False),
        "dora": peft.LoraConfig(r=4, target_modules=modules, init_lora_weights=False, use_dora=True),
        "loha": peft.LoHaConfig(r=4, target_modules=modules, init_weights=False),
        "ia3": peft.IA3Config(target_modules=modules, feedforward_modules=[], init_ia3_weights=False),
        "prompt": peft.PromptTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM"),
    }


TARGETS = {"llama": ["q_proj", "v_proj", "down_proj"], "qwen3_moe": ["q_proj", "v_proj"], "t5": ["q", "v", "wo"],
           "whisper": ["q_proj", "v_proj", "fc2"]}  # fmt: skip


def _untrained(s: State) -> bool:
    for k in [k for k in s if "lora_B" in k]:
        s[k] = torch.zeros_like(s[k])
    return True


def _scaled(s: State) -> bool:
    for k in [k for k in s if "lora_B" in k]:
        s[k] = s[k] * 2
    return True


def _layers(s: State) -> bool:
    first = [k for k in s if re.search(r"(layers|block)\.0\.", k) and "decoder" not in k]
    for a in first:
        b = a.replace("layers.0.", "layers.2.").replace("block.0.", "block.2.")
        s[a], s[b] = s[b], s[a]
    return bool(first)


def _element(s: State) -> bool:
    k = next(k for k in s if re.search(r"\.1\..*lora_A", k))
    s[k] = s[k].clone()
    s[k][1, 3] += 1
    return True


def _lost(s: State) -> bool:
    del s[next(k for k in s if re.search(r"\.1\..*lora_A", k))]
    return True


PLANTED: dict[str, tuple[Callable[[State], bool], str]] = {
    "adapter never trained": (_untrained, r"all zeros in B, such as .*lora_B"),
    "adapter's scale": (_scaled, r"2 times as large in B"),
    "adapter's layers exchanged": (_layers, r"layers 0 and 2 (of the encoder )?are exchanged"),
    "adapter: one element": (_element, r"1 of \d+ tensors; worst is .*\.1\..*lora_A.*1 of [\d,]+ elements"),
    "adapter: a tensor lost": (_lost, r"1 tensors? (are|is) only in A.*\.1\..*lora_A"),
}


def adapter_pairs(folder: Path) -> Iterator[Answer]:
    """Yield the answers for adapters of four families."""
    models = {**first_models(), **more_models()}
    for family, modules in TARGETS.items():
        for kind in _kinds(modules):
            if kind in ("loha", "ia3", "prompt") and family != "llama":
                continue
            yield from _pairs(folder / f"{family}-{kind}", family, kind, lambda f=family: made(f, models[f]), modules)


def _pairs(folder: Path, family: str, kind: str, make: Callable[[], Any], modules: list[str]) -> Iterator[Answer]:
    import peft

    make().save_pretrained(folder / "base")
    adapted = peft.get_peft_model(make(), _kinds(modules)[kind])
    adapted.save_pretrained(str(folder / "adapter"))
    adapted.save_pretrained(str(folder / "bin"), safe_serialization=False)
    torch.save({"model": adapted.state_dict()}, folder / "training.pt")
    name = f"{family} + {kind}"
    found = judged(folder / "adapter", folder / "bin")
    yield Answer(name, "adapter_model.bin", "", found.code == 0, found.sentence)
    if kind in ("lora", "dora"):
        found = judged(folder / "adapter", folder / "training.pt", ["*lora_*"])
        yield Answer(name, "a training's state", "", found.code == 0, found.sentence)
    if kind != "lora":
        return
    found = judged(folder / "base", folder / "training.pt", ["*[!AB].weight", "*.bias"])
    yield Answer(name, "the base in a training's state", "", found.code == 0, found.sentence)
    adapted.merge_and_unload().save_pretrained(folder / "merged")
    found = judged(folder / "base", folder / "merged")
    yield Answer(name, "merged", "adapter merged into B", bool(re.search(r"rank 4", found.sentence)), found.sentence)
    held = load_file(folder / "adapter" / "adapter_model.safetensors")
    for number, (cause, (plant, pattern)) in enumerate(PLANTED.items()):
        state = dict(held)
        plant(state)
        path = folder / f"planted{number}"
        path.mkdir()
        (path / "adapter_config.json").write_text((folder / "adapter" / "adapter_config.json").read_text())
        save_file({k: v.contiguous() for k, v in state.items()}, path / "adapter_model.safetensors")
        found = judged(folder / "adapter", path)
        yield Answer(name, "adapter", cause, found.code > 1 and bool(re.search(pattern, found.sentence)), found.sentence)
