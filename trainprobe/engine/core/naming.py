"""One name for a module or parameter, whatever wrappers stand around the model.

`module.` (DDP, Megatron, DeepSpeed), `_orig_mod.` (torch.compile), `_fsdp_wrapped_module.` (FSDP1) and
`_checkpoint_wrapped_module.` (activation checkpointing) are taken out; an integration may add its own rule, such as local
to global layer numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from trainprobe.engine.core.guard import attempt

INNER = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module"})  # what a wrapper that only forwards calls its child
WRAPPERS = INNER | {"_orig_mod"}
LEFT_OUT = "left out, as looking at it could change"  # begins a note of a step that names calls without their values
_CONTROL = {number: repr(chr(number))[1:-1] for number in (*range(32), *range(127, 160))}
ROOT = "root"  # the name under which the model itself is recorded
TORCH_PARAMETERS = {  # as cells of MindSpore call them → as modules of torch do
    **{"gamma": "weight", "beta": "bias", "embedding_table": "weight"},
    **{"moving_mean": "running_mean", "moving_variance": "running_var"},
}
Rename = Callable[[str], str]


def utf8(text: str) -> str:
    r"""Return text as one line of UTF-8: a control character becomes its escape, such as `\n`, and half of a surrogate pair."""
    return text if text.isprintable() else text.translate(_CONTROL).encode(errors="backslashreplace").decode()


def logical_name(name: str, *, outer_wrappers: int = 0) -> str:
    """Return the name free of wrappers; `outer_wrappers` leading `module` parts belong to wrappers and go too."""
    parts = [part for part in name.split(".") if part and part not in WRAPPERS]
    while outer_wrappers and parts and parts[0] == "module":
        parts.pop(0)
        outer_wrappers -= 1
    return utf8(".".join(parts))


def is_outer_wrapper(name: str, outer_wrappers: int) -> bool:
    """Tell whether the module with this raw name is one of the `outer_wrappers` modules around the model itself."""
    return len([part for part in name.split(".") if part and part not in WRAPPERS]) < outer_wrappers


def count_outer_wrappers(names: Iterable[str]) -> int:
    """Count how many leading `module` parts all names share: a wrapper holds exactly one child, called `module`.

    names: the dotted names of all modules but the root.
    """
    split = [[p for p in n.split(".") if p and p not in WRAPPERS] for n in names]
    split = [s for s in split if s]
    depth = 0
    while split and all(s[0] == "module" for s in split):
        depth += 1
        split = [s[1:] for s in split if len(s) > 1]
    return depth


def torch_parameter(name: str) -> str:
    """Return the name of a parameter of MindSpore as torch has it."""
    module, dot, last = name.rpartition(".")
    return f"{module}{dot}{TORCH_PARAMETERS.get(last, last)}"


def in_training(module: Any) -> bool:
    """Return whether a module is in training mode; False where it has no mode, such as TorchScript that was frozen."""
    return bool(attempt(getattr, module, "training", False, otherwise=lambda _: False))


def chunks_of(model: Any) -> list[Any]:
    """Return the chunks of a model, which is a module or a list of chunks."""
    return list(model) if isinstance(model, list | tuple) else [model]  # pyright: ignore[reportUnknownArgumentType]
