"""Checkpoints of speechbrain: a folder with `CKPT.yaml` and a `.ckpt` file for each thing that is to be recovered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import plain_torch
from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.engine.storage.safe_files import open_to_read


def sniff(path: Path) -> bool:
    """A folder that speechbrain's Checkpointer has marked."""
    return (path / "CKPT.yaml").is_file() and any(path.glob("*.ckpt"))


def open(path: Path) -> Checkpoint:
    """Open every file that torch.save wrote, as one checkpoint; counters are files of text."""
    sections: dict[str, Any] = {}
    for file in sorted(path.glob("*.ckpt")):
        sections[file.stem] = torch_archive.load(str(file)) if torch_archive.is_torch_file(str(file)) else _counter(file)
    return plain_torch.read(path, sections, "speechbrain")


def _counter(file: Path) -> str:
    with open_to_read(file) as text:
        return text.read(1000).decode(errors="replace")
