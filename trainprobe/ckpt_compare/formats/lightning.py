"""Lightning checkpoints: a `.ckpt` file, or the folder that its sharded strategies write.

The folder is a distributed checkpoint with a `meta.pt` beside it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats import plain_torch, torch_dcp
from trainprobe.ckpt_compare.pieces import Checkpoint
from trainprobe.ckpt_compare.plain_state import flat
from trainprobe.ckpt_compare.storage import torch_archive


def sniff(path: Path) -> bool:
    """A torch file that states Lightning's version, or a distributed checkpoint with `meta.pt`."""
    if path.is_dir():
        return (path / "meta.pt").is_file() and (path / ".metadata").is_file()
    return torch_archive.is_torch_file(str(path)) and torch_archive.mentions(str(path), plain_torch.LIGHTNING)


def open(path: Path) -> Checkpoint:
    """Open a Lightning checkpoint; its loops and callbacks stand among the arguments."""
    if not path.is_dir():
        content = torch_archive.load(str(path))
        read = plain_torch.read(path, content, "lightning")
        return replace(read, state={**read.state, **_sections(content)})
    stored = torch_dcp.open(path)
    return replace(stored, format="lightning", state={**stored.state, **_sections(torch_archive.load(str(path / "meta.pt")))})


def _sections(content: Any) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "iteration": flat({k: content[k] for k in ("epoch", "global_step") if k in content}),
        "args": flat({k: content[k] for k in ("hyper_parameters", "loops", "callbacks") if k in content}),
    }
    if content.get("lr_schedulers"):
        sections["scheduler"] = flat({"lr_schedulers": content["lr_schedulers"]})
    return sections
