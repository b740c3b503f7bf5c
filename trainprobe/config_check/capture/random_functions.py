"""Which functions and methods draw random numbers, and what of a call is worth a word: all that the capture knows about them.

Of Python and NumPy nothing is listed: all functions that share the hidden global generator are found, and all methods of the
generator types. Of torch each function whose operator carries the tag `nondeterministic_seeded` is here, which a test holds.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

Describe = Callable[[tuple[Any, ...], Mapping[str, Any]], str | None]
_READS = frozenset({"getstate", "get_state", "get_bit_generator", "spawn", "bit_generator", "jumped"})
_TORCH = [
    *("rand", "randn", "randint", "randperm", "normal", "bernoulli", "multinomial", "poisson", "binomial"),
    *("rand_like", "randn_like", "randint_like", "_standard_gamma", "_sample_dirichlet"),
    *("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_"),
    *("feature_alpha_dropout", "feature_alpha_dropout_", "native_dropout", "_fused_dropout", "rrelu", "rrelu_"),
    *("manual_seed", "seed", "set_rng_state", "lstm", "gru", "rnn_tanh", "rnn_relu"),
]
_FUNCTIONAL = [
    *("dropout", "alpha_dropout", "dropout1d", "dropout2d", "dropout3d", "feature_alpha_dropout", "rrelu", "rrelu_"),
    *("gumbel_softmax", "scaled_dot_product_attention", "fractional_max_pool2d", "fractional_max_pool3d"),
]
_TENSOR = [
    *("normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "bernoulli_"),
    *("bernoulli", "multinomial"),
]
_RECURRENT = ["lstm", "gru", "rnn_tanh", "rnn_relu"]  # nn.LSTM and its kin call them here; dropout lies between their layers
_SEEDS = frozenset({"seed", "manual_seed", "manual_seed_all", "default_rng"})


def random_functions() -> Iterator[tuple[str, Any, str, Describe]]:
    """Yield (full name, owner, name in it, what to say of a call) of each function and method that draws or seeds."""
    yield from _of_python()
    yield from _of_numpy()
    for prefix, owner, names in (
        ("torch", torch, _TORCH),
        ("torch.nn.functional", torch.nn.functional, _FUNCTIONAL),
        ("torch.Tensor", torch.Tensor, _TENSOR),
        ("torch", torch._VF, _RECURRENT),
        ("torch.random", torch.random, ["manual_seed", "seed", "set_rng_state"]),
        ("torch.cuda", torch.cuda, ["manual_seed", "manual_seed_all", "seed", "seed_all"]),
        ("torch.npu", getattr(torch, "npu", None), ["manual_seed", "manual_seed_all", "seed", "seed_all"]),
    ):
        for name in names if owner is not None else ():
            yield f"{prefix}.{name}", owner, name, _DESCRIBE.get(name, describe_seed if name in _SEEDS else no_detail)
    yield "torch.Generator.manual_seed", torch.Generator, "manual_seed", _of_method(describe_seed)
    for name in ("seed", "set_state"):
        yield f"torch.Generator.{name}", torch.Generator, name, always


def _of_python() -> Iterator[tuple[str, Any, str, Describe]]:
    for name, value in list(vars(random).items()):
        if getattr(value, "__self__", None) is random._inst and name not in _READS:  # pyright: ignore[reportAttributeAccessIssue]
            yield f"random.{name}", random, name, describe_seed if name in _SEEDS else always
    for name in dir(random.Random):
        if not name.startswith("_") and name not in _READS and callable(getattr(random.Random, name)):
            yield f"random.Random.{name}", random.Random, name, _of_method(describe_seed) if name in _SEEDS else always


def _of_numpy() -> Iterator[tuple[str, Any, str, Describe]]:
    hidden = np.random.mtrand._rand  # pyright: ignore[reportAttributeAccessIssue]
    for name, value in list(vars(np.random).items()):
        shared = getattr(value, "__self__", None) is hidden or name in ("seed", "ranf", "sample", "default_rng")
        if shared and not name.startswith("_") and name not in _READS:
            yield f"numpy.random.{name}", np.random, name, describe_seed if name in _SEEDS else always
    for kind in (np.random.Generator, np.random.RandomState):
        for name, value in list(vars(kind).items()):
            if not name.startswith("_") and name not in _READS and callable(value):
                describe = _of_method(describe_seed) if name in _SEEDS else always
                yield f"numpy.random.{kind.__name__}.{name}", kind, name, describe


def always(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say nothing of a call that always draws."""
    return ""


def no_detail(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Say only whether a torch function was given a generator."""
    return "" if kwargs.get("generator") is None else "from a generator of its own"


def describe_seed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the seed that a call gives."""
    value = args[0] if args else next(iter(kwargs.values()), None)
    if isinstance(value, torch.Tensor):
        return "a tensor"
    return repr(value) if isinstance(value, int | float | str | np.integer) or value is None else type(value).__name__


def _of_method(describe: Describe) -> Describe:
    return lambda args, kwargs: describe(args[1:], kwargs)


def _describe_dropout(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return `p=0.1` of a dropout that draws numbers, None of one that does not."""
    p = kwargs.get("p", args[1] if len(args) > 1 else 0.5)
    training = kwargs.get("training", kwargs.get("train", args[2] if len(args) > 2 else True))
    return f"p={p}" if training and p else None


def _describe_recurrent(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return `p=0.1` where dropout lies between the layers; (…, layers, dropout, train, …) is the order of all of them."""
    at = next((i for i, value in enumerate(args) if isinstance(value, float)), None)
    if at is None or at + 1 >= len(args):
        return None
    return f"p={args[at]}" if args[at] and args[at + 1] and args[at - 1] > 1 else None


def _describe_attention(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    p = kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0)
    return f"p={p}" if p else None


def _describe_rrelu(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    return "" if kwargs.get("training", args[3] if len(args) > 3 else False) else None


def _describe_filling(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """Return the numbers that `normal_` and `uniform_` are given: mean and deviation, or both ends."""
    given = [*args[1:3], *(kwargs[k] for k in ("mean", "std", "from", "to") if k in kwargs)]
    numbers = ", ".join(f"{v:g}" for v in given if isinstance(v, int | float))
    return f"({numbers})" if numbers else no_detail(args, kwargs)


_DESCRIBE: dict[str, Describe] = {
    **{name: _describe_dropout for name in [*_TORCH, *_FUNCTIONAL] if "dropout" in name},
    **dict.fromkeys(_RECURRENT, _describe_recurrent),
    "scaled_dot_product_attention": _describe_attention,
    "rrelu": _describe_rrelu,
    "rrelu_": _describe_rrelu,
    "normal_": _describe_filling,
    "uniform_": _describe_filling,
}
