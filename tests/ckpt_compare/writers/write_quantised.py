"""Write `data/quantised`: weights as compressed-tensors, bitsandbytes and AutoAWQ store them, and what they decode them to.

    python -m tests.ckpt_compare.writers.write_quantised

needs compressed-tensors 0.20, bitsandbytes 0.50 and autoawq 0.2.9 on a CPU; the files are kept, as the tests do not have them.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.ckpt_bench.quantisers import available

FOLDER = Path(__file__).parents[1] / "data" / "quantised"


def main() -> None:
    """Write two files a layout."""
    FOLDER.mkdir(exist_ok=True)
    weight = 0.02 * torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    for name, quantise in available().items():
        if name.startswith(("compressed", "bitsandbytes", "AWQ")):
            parts, value, _ = quantise(weight)
            file = name.replace(" ", "_")
            save_file({f"m.proj.{k}": v.contiguous() for k, v in parts.items()}, FOLDER / f"{file}.safetensors")
            save_file({"m.proj.weight": value.contiguous()}, FOLDER / f"{file}.values.safetensors")


if __name__ == "__main__":
    main()
