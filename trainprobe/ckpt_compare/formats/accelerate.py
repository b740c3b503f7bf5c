"""What `Accelerator.save_state` of accelerate writes: each model, optimizer and scheduler in a file of its own.

A second one of a kind is numbered (`model_1.safetensors`, `optimizer_1.bin`). Further objects stand in
`custom_checkpoint_N.pkl`, random states in `random_states_RANK.pkl`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import huggingface, plain_torch
from trainprobe.ckpt_compare.pieces import Checkpoint, Problem
from trainprobe.ckpt_compare.plain_state import digest
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.errors import FormatError

_FURTHER = re.compile(r"(?:model|pytorch_model)_(?P<number>\d+)\.(?:safetensors|bin)")
_OTHER = re.compile(r"(?P<kind>optimizer(?:_\d+)?|scheduler(?:_\d+)?|custom_checkpoint_\d+)\.(?:bin|pkl)")


def sniff(path: Path) -> bool:
    """A folder with the random states of a rank, and a model or an optimizer that accelerate saved."""
    saved = ("optimizer.bin", "model.safetensors", "pytorch_model.bin")
    return path.is_dir() and any(path.glob("random_states_*.pkl")) and any((path / name).is_file() for name in saved)


def open(path: Path) -> Checkpoint:
    """Open the models, the optimizers under the names of their parameters, schedulers, objects and random states."""
    problems: list[Problem] = []
    shards = huggingface.model_files(path, problems)
    sections: dict[str, Any] = {
        "model": {k: v for file in shards for part in huggingface.read_file(file) for k, v in part.items()}
    }
    random: dict[str, Any] = {}
    for file in sorted(path.iterdir()):
        further, other = _FURTHER.fullmatch(file.name), _OTHER.fullmatch(file.name)
        try:
            if further is not None:
                tensors, values = huggingface.read_file(file)
                sections[f"model_{further['number']}"] = {**tensors, **values}
            elif other is not None:
                sections[other["kind"]] = torch_archive.load(str(file))
            elif file.match("random_states_*.pkl"):
                rank = f"rank {file.stem.rpartition('_')[2]}"
                random |= {f"{rank}/{key}": digest(value) for key, value in torch_archive.load(str(file)).items()}
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
    read = plain_torch.read(path, sections, "accelerate")
    state = {**read.state, **({"rng": random} if random else {})}
    return replace(read, state=state, problems=(*problems, *read.problems))
