"""What a probe could leave behind on a model, on torch and on the process, as one comparable dict."""

from __future__ import annotations

import gc
import sys
import threading
from typing import Any

import torch
import torch.distributed
import torch.utils.checkpoint
from torch import nn
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

# places where a tool can put itself between a training and torch
PATCHABLE = (
    torch,
    torch.nn.functional,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.utils.stateless,
    torch.optim.Optimizer,
    torch.autograd,
    torch.autograd.Function,
    torch.autograd.graph,
    torch.overrides,
    torch.utils.checkpoint,
    torch._C._VariableFunctionsClass,
    torch.distributed,
)


def traces(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return every hook, patch, mode and thread that is in place, by name; equal dicts mean that nothing was left."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[f"attributes of module {name!r}"] = sorted(vars(module))
        found[f"class of module {name!r}"] = type(module)
        for key, value in vars(module).items():
            if "hook" in key:
                found[f"{key} of module {name!r}"] = list(value.values()) if hasattr(value, "values") else value
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        hooks = [tensor._backward_hooks, getattr(tensor, "_post_accumulate_grad_hooks", None)]
        found[f"hooks of {name!r}"] = [list(h.values()) if h else [] for h in hooks]
        found[f"class and attributes of {name!r}"] = (type(tensor), sorted(vars(tensor)))
    if optimizer is not None:
        found["attributes of the optimizer"] = sorted(vars(optimizer))
        found |= {f"optimizer {k}": list(v.values()) for k, v in vars(optimizer).items() if k.endswith("hooks")}
    for place in PATCHABLE:
        found |= {f"{place.__name__}.{key}": id(value) for key, value in vars(place).items() if callable(value)}
    for key in dir(nn.modules.module):
        if key.startswith("_global_") and "hook" in key:
            found[key] = list(getattr(nn.modules.module, key).values()) if key.endswith("hooks") else None
    found["function modes"] = list(_get_current_function_mode_stack())
    found["dispatch modes"] = list(_get_current_dispatch_mode_stack())
    saved_tensor_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)  # torch 2.4 cannot be asked
    found["saved-tensor hooks"] = saved_tensor_hooks and saved_tensor_hooks(True)
    found["collector callbacks"], found["collector"] = list(gc.callbacks), gc.isenabled()
    found["trace and profile"] = (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile())
    found["threads"] = sorted(t.name for t in threading.enumerate())
    return found


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what changed, by name: (before, after)."""
    names = {**before, **after}
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}
