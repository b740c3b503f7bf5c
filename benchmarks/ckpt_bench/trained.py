"""A training's whole state by DeepSpeed: the same steps under each ZeRO stage, and causes planted in the optimizer."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.ckpt_bench.judged import Answer, judged
from benchmarks.ckpt_bench.models import VOCAB, first_models, made
from benchmarks.ckpt_bench.writers import engine

States = dict[torch.Tensor, dict[str, Any]]


def _zeroed(states: States) -> None:
    for held in states.values():
        held["exp_avg"].zero_()
        held["exp_avg_sq"].zero_()


def _exchanged(states: States) -> None:
    for held in states.values():
        held["exp_avg"], held["exp_avg_sq"] = held["exp_avg_sq"], held["exp_avg"]


def _restarted(states: States) -> None:
    for held in states.values():
        held["step"] = torch.zeros_like(held["step"])


def _unscaled(states: States) -> None:
    for held in states.values():
        held["exp_avg"].mul_(128)


def _short(states: States) -> None:
    for held in states.values():
        held["exp_avg_sq"].copy_(held["exp_avg_sq"].bfloat16())


PLANTED: dict[str, tuple[Callable[[States], None], str]] = {
    "moments all zeros": (_zeroed, r"all zeros in B"),
    "moments exchanged": (_exchanged, r"exp_avg and exp_avg_sq are exchanged"),
    "step starts again": (_restarted, r"step is .* in A and 0"),
    "gradients not unscaled": (_unscaled, r"128 times as large in B"),
    "moments through bfloat16": (_short, r"bfloat16"),
}


def _training(stage: int) -> Any:
    model = engine(made("llama", first_models()["llama"]), stage)
    for step in range(2):
        ids = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(step))
        model.backward(model(input_ids=ids, labels=ids).loss)
        model.step()
    return model


def trained_pairs(folder: Path) -> Iterator[Answer]:
    """Yield the answers for a training of two steps."""
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    first = _saved(_training(1), folder / "zero1")
    for stage in (0, 2):
        found = judged(first, _saved(_training(stage), folder / f"zero{stage}"))
        yield Answer("trained", f"zero1 and zero{stage}", "", found.code == 0, found.sentence)
    third = _saved(_training(3), folder / "zero3")  # its steps round otherwise than those of ZeRO 0 to 2
    save_file(get_fp32_state_dict_from_zero_checkpoint(str(third)), folder / "gathered.safetensors")
    found = judged(third, folder / "gathered.safetensors")
    yield Answer("trained", "zero3 and what DeepSpeed gathers", "", found.code == 0, found.sentence)
    for number, (cause, (plant, pattern)) in enumerate(PLANTED.items()):
        training = _training(0)
        plant(training.optimizer.state)
        found = judged(first, _saved(training, folder / f"planted{number}"))
        good = found.code == 2 and bool(re.search(pattern, found.sentence))
        yield Answer("trained", "zero1 and zero0", cause, good, found.sentence)


def _saved(model: Any, path: Path) -> Path:
    model.save_checkpoint(str(path), tag="global_step2")
    return path
