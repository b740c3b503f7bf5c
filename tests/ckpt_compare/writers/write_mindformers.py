"""One trained state as MindFormers 1.9 saves it from one rank, and from ranks of tensor, pipeline and expert parallelism.

Usage: write_mindformers.py OUT, in the environment of tests/mindspore. It writes a folder for each of LAYOUTS, and `whole.npz`.

MindFormers' own functions write each file and `metadata.json`, of layouts that are MindSpore's own `Layout`. The ranks are
written one after the other in one process, and so its barrier is left out, for which MindSpore has no CPU kernel.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import mindspore as ms
import numpy as np
from mindspore import Layout, Parameter, Tensor, nn

WIDTH, VOCABULARY, EXPERTS = 4, 8, 4
SHAPES = {
    "embedding.weight": (VOCABULARY, WIDTH),
    "layers.0.attention.qkv.weight": (3 * WIDTH, WIDTH),
    "layers.0.attention.proj.weight": (WIDTH, WIDTH),
    "layers.0.norm.weight": (WIDTH,),
    "layers.1.experts.weight1": (EXPERTS, WIDTH, 2 * WIDTH),
    "layers.1.experts.weight2": (EXPERTS, 2 * WIDTH, WIDTH),
    "layers.1.norm.weight": (WIDTH,),
    "head.weight": (VOCABULARY, WIDTH),
}
_TENSOR = {
    "embedding.weight": ("tp", "None"),
    "layers.0.attention.qkv.weight": ("tp", "None"),
    "layers.0.attention.proj.weight": ("None", "tp"),
    "layers.1.experts.weight1": ("None", "None", "tp"),
    "layers.1.experts.weight2": ("None", "tp", "None"),
    "head.weight": (("dp", "tp"), "None"),
}
_EXPERT = {"layers.1.experts.weight1": ("dp", "None", "tp"), "layers.1.experts.weight2": ("dp", "tp", "None")}
# name → pipeline stages, devices of a stage, and along which axes the dimensions of parameters are cut
LAYOUTS: dict[str, tuple[int, tuple[int, int], dict[str, Any]]] = {
    "one": (1, (1, 1), {}),
    "tensor": (1, (2, 2), _TENSOR),
    "pipeline": (2, (1, 2), _TENSOR),
    "expert": (1, (2, 2), _TENSOR | _EXPERT),
}


class Model(nn.Cell):
    """A cell that holds the given parameters, and knows the names of all stages, as one of MindSpore's pipeline does."""

    def __init__(self, held: dict[str, Any]) -> None:
        super().__init__()
        for i, (name, array) in enumerate(held.items()):
            self.insert_param_to_cell(f"p{i}", Parameter(Tensor(np.ascontiguousarray(array)), name=name))

    def parameters_dict(self, recurse: bool = True) -> dict[str, Any]:
        return dict.fromkeys(SHAPES) | super().parameters_dict(recurse)


def trained() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return weights, and the optimizer's states by their names, after two updates."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    rng = np.random.default_rng(7)
    draw = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in SHAPES.items()}
    model = Model(draw)
    optimizer = nn.AdamWeightDecay(model.trainable_params())
    for _ in range(2):
        optimizer(tuple(Tensor(rng.standard_normal(shape).astype(np.float32)) for shape in SHAPES.values()))
    states = {p.name: p.asnumpy().copy() for p in optimizer.get_parameters() if p.name.split(".")[0] in ("adam_m", "adam_v")}
    return {p.name: p.asnumpy().copy() for p in model.get_parameters()}, states


def _weight(name: str) -> str:
    return name.removeprefix("adam_m.").removeprefix("adam_v.")


def _stage(name: str, stages: int) -> int:
    """Return the stage that has a parameter: the first half of the model, or the second."""
    return [*SHAPES].index(_weight(name)) * stages // len(SHAPES)


def write(folder: Path, layout: str, change: str = "") -> None:
    """Write the state in a layout; `change` names a tensor whose last element is another then."""
    from mindformers.checkpoint import checkpoint, metadata
    from mindformers.checkpoint.sharded_tensor import get_sharded_tensor_from_strategy_metadata

    stages, devices, cuts = LAYOUTS[layout]
    weights, states = trained()
    whole = {**weights, **states}
    if change:
        whole[change].flat[-1] += 0.5
    ranks, within = stages * devices[0] * devices[1], devices[0] * devices[1]
    metas: dict[int, Any] = {}
    for rank in range(ranks):
        stage = rank // within
        shape = Layout(devices, ("dp", "tp"), [*range(stage * within, (stage + 1) * within)])
        told = {
            name: [shape(*cuts.get(_weight(name), ("None",) * array.ndim)), ms.float32, array.shape]
            for name, array in whole.items()
            if _stage(name, stages) == stage
        }
        metas[rank] = get_sharded_tensor_from_strategy_metadata(told, rank)
    for rank, held in metas.items():
        parts: dict[str, Any] = {}
        for name, told in held.items():
            at = np.unravel_index(told.global_offset[0], told.axis_fragmentations)
            part = tuple(slice(i * n, (i + 1) * n) for i, n in zip(at, told.local_shape, strict=True))
            parts[name] = whole[name][part]
        model = Model({name: part for name, part in parts.items() if name in weights})
        optimizer = nn.AdamWeightDecay(model.trainable_params())
        for parameter in optimizer.get_parameters():
            if parameter.name in states:
                parameter.set_data(Tensor(np.ascontiguousarray(parts[parameter.name])))
        with (
            mock.patch.dict(os.environ, RANK_ID=str(rank), RANK_SIZE=str(ranks)),
            mock.patch.object(checkpoint, "barrier_world", lambda *_: None),
            mock.patch.object(metadata, "get_group_size", lambda: ranks),
        ):
            checkpoint.save_checkpoint(
                3,
                model,
                optimizer,
                common_info=checkpoint.CommonInfo(global_step=3, epoch_num=1),
                save_checkpoint_path=str(folder),
                user_prefix="tiny",
                **({"sharded_tensor_metas": metas} if ranks > 1 else {}),
            )


def read(folder: Path) -> dict[str, Any]:
    """Return weights by name as MindFormers itself loads them into one rank."""
    from mindformers.checkpoint import checkpoint

    model = Model({name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()})
    with mock.patch.dict(os.environ, RANK_ID="0", RANK_SIZE="1"):
        checkpoint.load_checkpoint(str(folder), model)
    return {p.name: p.asnumpy() for p in model.get_parameters()}


def main() -> None:
    """Write all layouts, and the whole state as NumPy has it."""
    out = Path(sys.argv[1]).resolve()
    os.chdir(tempfile.mkdtemp())  # MindFormers writes its log where it is imported
    ms.set_device("CPU")
    for layout in LAYOUTS:
        write(out / layout, layout)
    weights, states = trained()
    np.savez(out / "whole.npz", **weights, **states)


if __name__ == "__main__":
    main()
