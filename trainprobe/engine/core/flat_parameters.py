"""Parameters that PyTorch's first `FullyShardedDataParallel` keeps: slices of one flat parameter for each wrapped module.

Each rank holds a piece of the flat parameter, and with it a slice of some of the original parameters. With `use_orig_params`
the optimizer steps views of those slices, without it the flat piece as a whole. Nothing here communicates or gathers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from trainprobe.engine.core.naming import logical_name
from trainprobe.engine.geometry.shards import Shard

FLAT = "_flat_param"  # the short name under which a module holds its flat parameter


@dataclass(frozen=True, slots=True)
class FlatSlice:
    """What this process holds of one original parameter.

    name: its logical name. owner: the tensor that the optimizer steps. start: the first element in it, None where all of it
    belongs to the parameter. count: how many elements, 0 where others hold it all. shard: their place in the parameter. flat:
    the unsharded flat parameter's elements that are the whole parameter, as a slice. shape: the parameter's own.
    """

    name: str
    owner: Any
    start: int | None
    count: int
    shard: Shard
    flat: slice
    shape: tuple[int, ...]

    def of(self, tensor: Any) -> Any:
        """Return the parameter's elements of a tensor that is laid out as `owner` is."""
        return tensor if self.start is None else tensor.detach().narrow(0, self.start, self.count)

    def whole(self, gradient: Any) -> Any:
        """Return the parameter's part of a gradient of the unsharded flat parameter, in the parameter's shape."""
        return gradient[self.flat].view(self.shape)


def is_flattened(p: Any) -> bool:
    """Tell whether a parameter is flat or a view of a flat one, or emptied by DeepSpeed's ZeRO 3 until its module runs.

    Its gradient accumulator must not be asked for outside a forward: it would be made for the piece that is there then, and
    refuse the gradient of the whole.
    """
    return getattr(p, "_fsdp_flattened", False) or (hasattr(p, "ds_shape") and p.ds_shape != p.shape)


def handles_of(models: Iterable[Any]) -> list[Any]:
    """Return what keeps the flat parameters of all wrapped modules, each once; `flat_param` is the parameter."""
    found = [getattr(module, "_handle", None) for model in models for module in model.modules()]
    return [handle for handle in dict.fromkeys(found) if hasattr(getattr(handle, "flat_param", None), "_shard_param_infos")]


def flat_slices_of(handle: Any, names: Mapping[int, str]) -> Iterator[FlatSlice]:
    """Yield the original parameters of a flat one in their order; those without a name are left out.

    names: id of parameter → logical name, where that of a flat parameter is its module's with `_flat_param` behind.
    """
    flat, cut = handle.flat_param, handle.uses_sharded_strategy
    ends = list(accumulate(flat._numels_with_padding))
    places = [ends[i] for i, padding in enumerate(flat._is_padding_mask) if not padding]
    for i, (end, held) in enumerate(zip(places, flat._shard_param_infos, strict=True)):
        owner = flat if flat._params is None else flat._params[i]
        known = names.get(id(owner))
        if known is None:
            continue
        name = known if owner is not flat else known.removesuffix(FLAT) + logical_name(flat._fqns[i])
        shape, count, here = tuple(flat._shapes[i]), int(flat._numels[i]), int(held.numel_in_shard or 0)
        if cut or owner is flat:
            shard = Shard((int(held.intra_param_start_idx or 0),), (here,), (count,), () if cut else ("dp",))
        else:
            shard = Shard((0,) * len(shape), shape, shape, ("dp",))
        start = int(held.offset_in_shard or 0) if owner is flat else None
        yield FlatSlice(name, owner, start, here, shard, slice(end - count, end), shape)
