"""Names in checkpoints of MindSpore: an optimizer's states carry the parameter's name behind a prefix (`adam_m.`, …)."""

from __future__ import annotations

_SLOTS = {
    "adam_m": "exp_avg", "moment1": "exp_avg", "moments1": "exp_avg", "exp_avg": "exp_avg", "adam_v": "exp_avg_sq",
    "moment2": "exp_avg_sq", "moments2": "exp_avg_sq", "exp_avg_sq": "exp_avg_sq", "moments": "momentum_buffer",
    "accum": "momentum_buffer", "momentum_buf": "momentum_buffer", "fp32_param": "master", "accu_grads": "accumulated_grad",
}  # fmt: skip
_SCALARS = (
    *("step", "epoch", "iteration", "loss_scale", "scale_sense", "global_batch_size", "learning_rate", "scale_window"),
    *("beta1", "beta2"),
)


def is_scalar(name: str, shape: tuple[int, ...]) -> bool:
    """Whether this is a number of the training, and no tensor of the model or the optimizer."""
    short = shape in ((), (1,))
    return short and "." not in name and any(word in name for word in _SCALARS)


def split(name: str) -> tuple[str, str]:
    """Return the slot of the optimizer, empty for a weight, and the parameter's name."""
    prefix, dot, rest = name.partition(".")
    return (_SLOTS[prefix], rest) if dot and prefix in _SLOTS else ("", name)
