"""What a model carries beside classes and weights: modes, hooks, replaced methods, compilation, settings of its wrappers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from trainprobe.config_check.capture.hyperparameters import is_scripted
from trainprobe.config_check.capture.plain_values import plain
from trainprobe.engine.core.naming import count_outer_wrappers, in_training, logical_name

HOOKS = {
    "_forward_pre_hooks": "forward pre-hook",
    "_forward_hooks": "forward hook",
    "_backward_pre_hooks": "backward pre-hook",
    "_backward_hooks": "backward hook",
}
_GLOBAL_HOOKS = {f"_global{attribute}": kind for attribute, kind in HOOKS.items()}
TENSOR_HOOKS = {"_backward_hooks": "gradient hook", "_post_accumulate_grad_hooks": "hook after accumulation"}
WHOLE = "the model"


def model_state(models: list[Any], compiled_with: dict[int, str]) -> dict[str, dict[str, str]]:
    """Return {"evaluation", "hooks", "methods", "compiled"}, each module or parameter → what is there.

    compiled_with: id of a module → the arguments that torch.compile was given for it.
    """
    found: dict[str, dict[str, str]] = {"evaluation": {}, "hooks": {}, "methods": {}, "compiled": {}}
    for name, module in _named(models):
        if not in_training(module):
            found["evaluation"][name] = type(module).__name__
        if hooks := [*_hooks(module, HOOKS)]:
            found["hooks"][f"module {name}"] = ", ".join(hooks)
        if "forward" in vars(module) and not is_compiled(module) and not is_scripted(module):
            found["methods"][name] = str(plain(vars(module)["forward"]))
        if is_compiled(module) or id(module) in compiled_with:
            found["compiled"][name] = compiled_with.get(id(module), "")
    if hooks := [*_hooks(torch.nn.modules.module, _GLOBAL_HOOKS)]:
        found["hooks"]["every module"] = ", ".join(hooks)
    for name, parameter in _parameters(models):
        if hooks := [*_hooks(parameter, TENSOR_HOOKS)]:
            found["hooks"][f"weight {name}"] = ", ".join(hooks)
    return found


def is_compiled(module: Any) -> bool:
    """Tell whether a module is what torch.compile made, or was compiled in place."""
    return "_orig_mod" in vars(module).get("_modules", {}) or vars(module).get("_compiled_call_impl") is not None


def scripted_modules(models: list[Any]) -> list[str]:
    """Return the outermost modules that are TorchScript: `the model`, or `module NAME`."""
    names: list[str] = []
    for name, module in _named(models):
        if is_scripted(module) and not any(outer == WHOLE or name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return [name if name == WHOLE else f"module {name}" for name in names]


def _named(models: list[Any]) -> Iterator[tuple[str, Any]]:
    for model in models:
        modules = list(model.named_modules())
        outer = count_outer_wrappers(name for name, _ in modules if name)
        for name, module in modules:
            yield (logical_name(name, outer_wrappers=outer) if name else "") or WHOLE, module


def _parameters(models: list[Any]) -> Iterator[tuple[str, Any]]:
    for model in models:
        outer = count_outer_wrappers(name for name, _ in model.named_modules() if name)
        for name, parameter in model.named_parameters():
            yield logical_name(name, outer_wrappers=outer), parameter


def _hooks(owner: Any, kinds: dict[str, str]) -> Iterable[str]:
    """Yield a word for each hook that this tool has not made."""
    for attribute, kind in kinds.items():
        for hook in list((getattr(owner, attribute, None) or {}).values()):
            if not str(getattr(hook, "__module__", "")).startswith("trainprobe."):
                yield f"{kind} {plain(hook)}"
