"""The weights and data of a small GLM-like model, the same for PyTorch and MindSpore: drawn by NumPy, by the names of torch."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from trainprobe.monitor.run_folder import read_frames

LAYERS, WIDTH, HEADS, WORDS, LENGTH, BATCH, INNER = 2, 16, 2, 23, 5, 2, 24
STEPS = 2


def weights() -> dict[str, np.ndarray]:
    """Return parameter → float32 array, by the names of the model in PyTorch; linear layers as [out, in]."""
    draw = np.random.default_rng(11)

    def normal(*shape: int) -> np.ndarray:
        return (draw.standard_normal(shape) * 0.2).astype(np.float32)

    found = {"embedding.weight": normal(WORDS, WIDTH)}
    for i in range(LAYERS):
        at = f"layers.{i}"
        found |= {f"{at}.{norm}.weight": 1 + normal(WIDTH) for norm in ("input_norm", "post_norm")}
        found |= {
            f"{at}.attention.query_key_value.weight": normal(3 * WIDTH, WIDTH),
            f"{at}.attention.query_key_value.bias": normal(3 * WIDTH),
            f"{at}.attention.dense.weight": normal(WIDTH, WIDTH),
            f"{at}.mlp.dense_h_to_4h.weight": normal(2 * INNER, WIDTH),
            f"{at}.mlp.dense_4h_to_h.weight": normal(WIDTH, INNER),
        }
    return {
        **found,
        "final_norm.weight": 1 + normal(WIDTH),
        "final_norm.bias": normal(WIDTH),
        "head.weight": normal(WORDS, WIDTH),
    }


def tokens(step: int) -> np.ndarray:
    """Return the batch of a step, int32 [BATCH, LENGTH + 1]: the model predicts each next token."""
    return np.random.default_rng(100 + step).integers(0, WORDS, (BATCH, LENGTH + 1)).astype(np.int32)


def mask() -> np.ndarray:
    """Return what is added to the scores, float32 [LENGTH, LENGTH]: -1e4 above the diagonal."""
    return np.triu(np.full((LENGTH, LENGTH), -1e4, np.float32), 1)


def losses(folder: str) -> list[float]:
    """Return the losses that a run recorded."""
    return [frame.scalars["loss"] for frame in read_frames(Path(folder))]
