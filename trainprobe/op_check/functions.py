"""Which torch function an entry of a dump names.

The functions are looked up once, when this file is imported: what a program puts in their place afterwards is the thing under
test and never the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import ModuleType
from typing import Any

import torch
import torch.fft
import torch.linalg
import torch.nn.functional as functional
import torch.overrides
import torch.special

Function = Callable[..., Any]
_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_OPS: Any = torch.ops.aten
_Packet, _Overload = torch._ops.OpOverloadPacket, torch._ops.OpOverload
# operators have several names: what a tool that wraps them writes → what torch has
_OTHER_NAMES = {"__truediv__": "__div__", "__rtruediv__": "__rdiv__"}


def _callables(owner: Any) -> dict[str, Function]:
    found: dict[str, Function] = {}
    for name in dir(owner):
        member = getattr(owner, name, None)
        if callable(member) and not isinstance(member, (type, ModuleType)):
            found[name] = member
    return found


def _captured() -> dict[str, Mapping[str, Function]]:
    """Return prefix of an entry → name → function."""
    plain = _callables(_C._VariableFunctions)
    for owner in (torch.fft, torch.linalg, torch.special):
        found = _callables(owner)
        plain |= {**found, **{f.__name__: f for f in found.values() if hasattr(f, "__name__")}}
    operators = {f.__name__ for f in torch.overrides.get_overridable_functions()[torch]} | _NOT_OVERRIDABLE
    of_torch = {name: f for name, f in _callables(torch).items() if name in operators}
    for name in _FILES:
        plain.pop(name, None)
    return {
        "Torch": {**plain, **of_torch},
        "Tensor": {**_callables(_C.TensorBase), **_callables(torch.Tensor)},
        "Functional": {**_callables(_C._nn), **_callables(functional)},
    }


# of torch: everything else there that no operator is loads files, compiles, or changes settings of the whole process
_NOT_OVERRIDABLE = {"unique", "lu", "pca_lowrank", "svd_lowrank", "broadcast_shapes"}
_FILES = {"from_file"}
_FILE_ARGUMENTS = {"filename", "file_name", "fname", "path"}
_FUNCTIONS = _captured()
NAMESPACES = {"Aten": "aten", "Prims": "prims", "NPU": "npu"}


@lru_cache(maxsize=4096)
def api(name: str) -> str:
    """Return what an entry calls without prefix and underscores: `softmax` of `Functional.softmax`, `add` of `Tensor.add_`.

    An overload is dropped: `mm` of `Aten.mm.default`.
    """
    bare = name.partition(".")[2].partition(".")[0]
    if bare.startswith("__") and bare.endswith("__"):
        bare = bare.strip("_")
        return bare[1:] if bare[:1] == "i" and bare[1:] in {"add", "sub", "mul", "div", "truediv", "pow", "and", "or"} else bare
    return bare.rstrip("_") or bare


def is_in_place(name: str) -> bool:
    """Return whether an entry's function writes its first argument, by the convention of torch's names."""
    bare = name.partition(".")[2].partition(".")[0]
    return bare.startswith("__i") or bare == "__setitem__" or (bare.endswith("_") and not bare.endswith("__"))


def function(name: str) -> Function | None:
    """Return the function that an entry such as `Functional.linear` names, None where this torch has none.

    Only operators are returned: a name in a dump cannot make torch load a file or change its settings.
    """
    prefix, _, rest = name.partition(".")
    if rest.startswith("_foreach_"):
        single = _FUNCTIONS["Torch"].get(api(name).removeprefix("_foreach_"))
        if single is not None:
            return _one_by_one(single)
    known = _FUNCTIONS.get(prefix)
    if known is not None:
        return known.get(rest) or known.get(_OTHER_NAMES.get(rest, f"__{rest}__"))
    return _dispatched(getattr(torch.ops, NAMESPACES.get(prefix, prefix), None), rest)


def _dispatched(namespace: Any, rest: str) -> Function | None:
    """Return an operator of torch's dispatcher, None where there is none of this name or where it reads or writes files."""
    found = namespace if isinstance(namespace, _OPS.__class__) else None
    for part in rest.split("."):
        try:
            found = getattr(found, part)
        except (AttributeError, RuntimeError):
            return None
    packet = found if isinstance(found, _Packet) else getattr(found, "overloadpacket", None)
    if not isinstance(packet, _Packet) or not isinstance(found, (_Packet, _Overload)):
        return None
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return None if any(a.name in _FILE_ARGUMENTS for schema in schemas for a in schema.arguments) else found


def writes(name: str) -> frozenset[str] | None:
    """Return the positions and keywords that an operator's schema says it writes; None for an operator that is not here."""
    prefix, _, rest = name.partition(".")
    namespace = _OPS if prefix in _FUNCTIONS else getattr(torch.ops, NAMESPACES.get(prefix, prefix))
    packet = getattr(namespace, rest.partition(".")[0], None)
    if not isinstance(packet, _Packet):  # a function of torch made of others, which version counters tell of
        return frozenset() if prefix in _FUNCTIONS else None
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    each = ((i, a) for schema in schemas for i, a in enumerate(schema.arguments) if not a.kwarg_only)
    return frozenset(text for i, a in each if a.alias_info is not None and a.alias_info.is_write for text in (str(i), a.name))


def _one_by_one(single: Function) -> Function:
    """Return what a function for lists of tensors does, by the function for one."""

    def for_each(first: Sequence[Any], *given: Any, **named: Any) -> list[Any]:
        rest = list(given)
        if len(rest) == 3:  # the factor of addcmul and addcdiv, which stands last here
            named["value"] = rest.pop()
        results: list[Any] = []
        for i, x in enumerate(first):
            own = [r[i] if isinstance(r, (list, tuple)) else r for r in rest]
            results.append(single(x, *own, **{k: v[i] if isinstance(v, (list, tuple)) else v for k, v in named.items()}))
        return results

    return for_each
