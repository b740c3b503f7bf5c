"""Settings of the data-parallel wrappers of torch, read from their attributes without torch."""

from __future__ import annotations

from typing import Any

from trainprobe.config_check.capture.plain_values import plain

WRAPPERS = {
    "DistributedDataParallel": (
        *("bucket_cap_mb", "static_graph", "find_unused_parameters", "gradient_as_bucket_view", "broadcast_buffers"),
        *("mixed_precision", "skip_all_reduce_unused_params"),
    ),
    "FullyShardedDataParallel": (
        *(
            "sharding_strategy",
            "mixed_precision",
            "backward_prefetch",
            "forward_prefetch",
            "limit_all_gathers",
            "_use_orig_params",
        ),
    ),
}


def wrapper_values(model: Any) -> dict[str, Any]:
    """Return the settings of a data-parallel wrapper of torch, {} for any other module."""
    names = WRAPPERS.get(type(model).__name__, ())
    values = {name: plain(getattr(model, name, None)) for name in names if hasattr(model, name)}
    if "bucket_bytes_cap" in vars(model):
        values["bucket_cap_mb"] = vars(model)["bucket_bytes_cap"] / (1 << 20)
    hooks = vars(model).get("_comm_hooks")
    return {**values, "communication_hooks": [plain(hook[0]) for hook in hooks]} if hooks else values
