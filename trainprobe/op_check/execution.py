"""Runs an operator on this machine: on its recorded inputs, or on random inputs where a dump holds statistics alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch

from trainprobe.engine.arrays.without_dispatch import without_dispatch
from trainprobe.engine.core.records import Value
from trainprobe.op_check.cases import Case, NotChecked, Tensor, flat, laid, mapped, strides_of
from trainprobe.op_check.functions import function


def random_input(value: Value, limits: tuple[float, float]) -> Tensor:
    """Return a tensor of the value's shape and dtype, uniform between its recorded limits, which are two of its elements: those
    that it keeps when it is laid out with the value's strides.

    Whole numbers stay valid as indices, signs and range are kept; distribution and order are not.
    """
    dtype = getattr(torch, value.dtype.rpartition(".")[2].lower(), None)
    if not isinstance(dtype, torch.dtype) or dtype.is_complex:
        raise NotChecked(f"no inputs are made of dtype {value.dtype}")
    drawn = torch.Generator().manual_seed(zlib.crc32(repr((value.row, value.shape)).encode()))
    (least, most), shape = limits, value.shape
    if dtype == torch.bool:
        return torch.rand(shape, generator=drawn) < (least + most) / 2
    if not dtype.is_floating_point:
        return torch.randint(int(least), int(most) + 1, shape, generator=drawn, dtype=torch.int64).to(dtype)
    if not least <= most:  # NaN
        return torch.full(shape, float("nan"), dtype=dtype)
    low, high = max(least, -torch.finfo(dtype).max), min(most, torch.finfo(dtype).max)
    numbers = torch.rand(shape, generator=drawn, dtype=torch.float64) * (high - low) + low
    if numbers.numel():
        numbers[(0,) * numbers.ndim] = least
        numbers[tuple(0 if step == 0 else -1 for step in strides_of(value) or (1,) * numbers.ndim)] = most
    return numbers.to(dtype)


def operator_of(case: Case) -> Callable[..., Any]:
    """Return the function of a call. Raises NotChecked where this torch has none."""
    found = case.function or function(case.name)
    if found is None:
        raise NotChecked(f"there is no {case.name} in this installation of torch {torch.__version__}")
    return found


def run_here(case: Case, backward: bool) -> Case:
    """Return the call with the outputs, or gradients, that this machine's operator gives in the recorded formats."""
    call = operator_of(case)
    wanted = iter(case.requires_grad or [True] * len(case.tensors()))

    def entered(t: Tensor) -> Tensor:
        needs = next(wanted, True) and t.is_floating_point() and backward
        copy = t.detach().clone().requires_grad_(needs).clone()
        return copy if copy.stride() == t.stride() else laid(copy, t.stride())  # a copy leaves out what lies between

    try:
        with without_dispatch(), torch.set_grad_enabled(backward):
            args, kwargs = mapped((tuple(case.args), {k: v for k, v in case.kwargs.items() if k != "device"}), entered)
            out = list(flat(call(*args, **kwargs)))
            case.outputs = [o.detach().clone() for o in out]
            node: Any = next((o.grad_fn for o in out if o.grad_fn is not None), None)
            if not backward:
                return case
            if node is None:
                raise NotChecked("nothing of this call requires a gradient here")
            slots = max(1, len(node._input_metadata))
            with torch.no_grad():
                results = node(*[*(case.gradients or ()), *[None] * slots][:slots])
            case.results = [*results] if isinstance(results, tuple) else [results]
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise NotChecked(f"torch cannot run it here: {(str(error).splitlines() or [''])[0][:120]}") from None
    return case


def run_on(case: Case, backward: bool, call: Callable[..., Any], device: str) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Return the arguments on the device and what comes out, or the gradients of the tensor arguments.

    Raises NotChecked where a gradient is asked for and none of its results is recorded.
    """
    leaves: list[Tensor | None] = []
    wanted = [*case.requires_grad] or [True] * len(case.tensors())

    def given(t: Tensor) -> Tensor:
        x = t.detach().to(device)
        needs = backward and wanted[len(leaves)] and (x.is_floating_point() or x.is_complex())
        leaves.append(x.requires_grad_() if needs else None)
        return x.clone()  # an operator may write its argument

    held = {key: value for key, value in case.kwargs.items() if key not in ("device", "out")}
    args, kwargs = mapped((tuple(case.args), held), given)
    with torch.set_grad_enabled(backward):
        out = call(*args, **kwargs)
    if not backward:
        return args, kwargs, out
    able = [o for o in flat(args[0] if out is None and args else out) if o.requires_grad]
    pairs = [
        (o, g.to(device, o.dtype).reshape(o.shape))
        for o, g in zip(able, case.gradients or (), strict=False)
        if g is not None and g.numel() == o.numel()
    ]
    asked = [leaf for leaf in leaves if leaf is not None]
    if not pairs or not asked:
        raise NotChecked("the gradient of its result is not recorded")
    found = iter(torch.autograd.grad([o for o, _ in pairs], asked, [g for _, g in pairs], allow_unused=True))
    return args, kwargs, [None if leaf is None else next(found) for leaf in leaves]
