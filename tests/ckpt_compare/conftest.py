"""Real checkpoints, written once a session and only when a test asks for them.

The environment variable TRAINPROBE_TEST_CHECKPOINTS names a folder in which they are kept for the next session.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.distributed.launch import launch

WRITERS = Path(__file__).parent / "writers"
VOCAB = 119

# sizes that are no multiples of 64, so that the buckets of the distributed optimizer end between its alignments
ODD = "--hidden 48 --ffn 72 --bias 1 --qkln 1 --norm LayerNorm --dtype bf16 --untied 1"
# sizes that are all multiples of 64 (Megatron-LM's usual ones): any order of the parameters fills the buckets
EVEN = "--dtype bf16 --untied 1"

# name → (ranks, arguments, the layout whose weights are loaded; None: trained here)
MEGATRON: dict[str, tuple[int, str, str | None]] = {
    "tp1": (1, "", None),
    "arguments1": (1, "--foreign-arguments 1", None),
    "tp2": (2, "--tp 2", "tp1"),
    "pp2": (2, "--pp 2", "tp1"),
    "pp2vpp2": (2, "--pp 2 --vpp 2", "tp1"),
    "zero2": (2, "--dist-opt 1", None),
    "zero1": (1, "--dist-opt 1", "zero2"),
    "zerotp2": (2, "--dist-opt 1 --tp 2", "zero2"),
    "zeropp2vpp2": (2, "--dist-opt 1 --pp 2 --vpp 2", "zero2"),
    "bucketpp2vpp2": (2, "--dist-opt 1 --pp 2 --vpp 2 --sharding dp_reshardable", "zero2"),
    "odd1": (1, f"--dist-opt 1 {ODD}", None),
    "bucketodd2": (2, f"--dist-opt 1 {ODD} --sharding dp_reshardable --bucket 9000 --overlap-grad 1", "odd1"),
    "sharedodd2": (2, f"--dist-opt 1 {ODD} --sharding dp_reshardable --fully-parallel 1", "odd1"),
    "even1": (1, f"--dist-opt 1 {EVEN}", None),
    "sharedeven2": (2, f"--dist-opt 1 {EVEN} --sharding dp_reshardable --fully-parallel 1 --bucket 40000", "even1"),
    "zeromoeep2": (2, "--dist-opt 1 --moe 4 --ep 2", None),
    "half1": (1, "--dtype bf16 --untied 1 --qkln 1 --bias 1 --norm LayerNorm", None),
    "half2": (2, "--dtype bf16 --untied 1 --qkln 1 --bias 1 --norm LayerNorm --tp 2", "half1"),
    "mla1": (1, "--mla 1 --qkln 1 --groups 8", None),
    "mlatp2": (2, "--mla 1 --qkln 1 --groups 8 --tp 2", "mla1"),
    "mtp1": (1, "--mtp 1", None),
    "mtptp2": (2, "--mtp 1 --tp 2", "mtp1"),
    "moe1": (1, "--moe 4 --shared-expert 32", None),
    "moetp2": (2, "--moe 4 --shared-expert 32 --tp 2", "moe1"),
    "moeep2": (2, "--moe 4 --shared-expert 32 --ep 2 --load-weights-only 1", "moe1"),
    "moeetp1": (2, "--moe 4 --shared-expert 32 --tp 2 --ep 2 --etp 1 --load-weights-only 1", "moe1"),
    "grouped1": (1, "--moe 4 --grouped 1 --dtype bf16", None),
    "groupedtp2": (2, "--moe 4 --grouped 1 --dtype bf16 --tp 2", "grouped1"),
    "groupedep2": (2, "--moe 4 --grouped 1 --dtype bf16 --ep 2 --load-weights-only 1", "grouped1"),
}
Written = Callable[[str], Path]


@pytest.fixture(scope="session")
def written(tmp_path_factory) -> Callable[[str], Path]:
    """Return a function from a name to the folder in which that framework's checkpoints are kept."""
    kept = os.environ.get("TRAINPROBE_TEST_CHECKPOINTS")

    def folder(name: str) -> Path:
        path = Path(kept) / name if kept else tmp_path_factory.mktemp(name)
        path.mkdir(parents=True, exist_ok=True)
        return path

    return folder


@pytest.fixture(scope="session")
def megatron(written, require) -> Written:
    """Return a function from `dist_tp2`, `legacy_pp2`, … to a checkpoint that megatron-core wrote."""
    require("megatron.core")
    root = written("megatron")

    def write(layout: str) -> None:
        if (root / f"dist_{layout}").exists():
            return
        ranks, arguments, source = MEGATRON[layout]
        words = ["--vocab", str(VOCAB), "--steps", "2", *arguments.split()]
        words += ["--save-dist", str(root / f"dist_{layout}"), "--save-legacy", str(root / f"legacy_{layout}")]
        if source is not None:
            write(source)
            words += ["--load", str(root / f"dist_{source}" / "iter_0000002")]
        if layout == "tp1":
            words += ["--save-logits", str(root / "logits.pt")]
        launch(WRITERS / "write_megatron.py", ranks, *words)

    def get(name: str) -> Path:
        if name == "logits.pt":
            write("tp1")
        else:
            write(name.partition("_")[2])
        return root / name

    return get


@pytest.fixture(scope="session")
def megatron_fsdp(written, require) -> Path:
    """Return an `fsdp_dtensor` checkpoint of two ranks, with gathered.pt in it: the whole tensors as Megatron gathers them."""
    require("megatron.core")
    root = written("megatron_fsdp")
    if not (root / "gathered.pt").exists():
        words = f"--vocab {VOCAB} --steps 2 --dist-opt 1 --save-dist {root}".split()
        launch(WRITERS / "write_megatron_fsdp.py", 2, *words)
    return root


@pytest.fixture(scope="session")
def deepspeed(written, require) -> Path:
    """Return a folder of DeepSpeed checkpoints: one/ from one rank, two/ from two, universal/."""
    require("deepspeed")
    root = written("deepspeed")
    if (root / "universal").exists():
        return root
    script = WRITERS / "write_deepspeed.py"
    two = ["zero0", "zero1", "zero2", "zero3", "zero1-bf16", "zero3-bf16", "moe0", "moe1", "tied0", "tied1", "tied2", "tied3"]
    launch(script, 2, str(root / "two"), *two)
    launch(script, 2, str(root / "two"), "pipe2")
    launch(script, 1, str(root / "one"), "zero0", "zero1", "zero3", "tied0", "tied3")
    launch(script, 1, str(root / "two"), "pipe1")
    for kind in ("zero2", "zero3", "tied2", "tied3"):
        convert = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", "--inject_missing_state"]
        convert += ["--num_extract_workers", "1", "--num_merge_workers", "1"]
        convert += ["--input_folder", str(root / f"two/{kind}/global_step3")]
        convert += ["--output_folder", str(root / f"universal/{kind}/global_step3")]
        subprocess.run(convert, check=True, capture_output=True, timeout=120, cwd=root)
    return root


@pytest.fixture(scope="session")
def sharded(written, require) -> Path:
    """Return a folder with the same model as plain file, FSDP1, FSDP2, tensor-parallel and Lightning checkpoints."""
    require("lightning")
    root = written("sharded")
    if (root / "lightning.ckpt").exists():
        return root
    launch(WRITERS / "write_sharded.py", 2, str(root), "fsdp1", "fsdp2", "tensor")
    launch(WRITERS / "write_sharded.py", 2, str(root), "lightning")
    return root
