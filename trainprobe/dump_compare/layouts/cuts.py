"""Tensor-parallel parts of a value of which it is known which elements each rank holds, and what operators make of them.

A cut says it by the flat index of an element in the whole: rank `index % period // unit` holds it, in order. A split along a
dimension is one, and so is what a gated projection holds (a part of the gate and one of what it gates), or heads that were
merged with samples: a view keeps the flat index and with it the cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from trainprobe.dump_compare.arguments import plain_arguments
from trainprobe.dump_compare.layouts.rank_boxes import Box
from trainprobe.engine.core.records import Call, Opaque

Shape = tuple[int, ...]


class Cut(NamedTuple):
    """Rank `index % period // unit` holds the element with this flat index in the whole."""

    unit: int
    period: int


class Along(NamedTuple):
    """A cut along one dimension, counted from the last one, -1: rank `index % period // unit` holds what has this index."""

    dim: int
    unit: int
    period: int


Lay = Cut | Literal["copy", "sum"]  # parts; the same on all ranks; terms of a sum that nothing has added up
Given = Mapping[str, tuple[Shape, Lay]]  # slot → shape of the whole, and how the ranks hold it


def along(shape: Shape, cut: Cut) -> Along | None:
    """Return the dimension that a cut goes along, None where it is not one."""
    stride = 1
    if 0 in shape:
        return None
    for dim in range(-1, -len(shape) - 1, -1):
        whole = stride * shape[dim]
        if cut.unit % stride == 0 and cut.period <= whole and whole % cut.period == 0:
            return Along(dim, cut.unit // stride, cut.period // stride)
        stride = whole
    return None


def flat(shape: Shape, found: Along) -> Cut | None:
    """Return the cut of a whole of this shape along a dimension; None where it does not fit."""
    if -found.dim > len(shape) or found.period == 0 or shape[found.dim] % found.period:
        return None
    stride = math.prod(shape[len(shape) + found.dim + 1 :])
    return Cut(found.unit * stride, found.period * stride)


def shape_of_part(shape: Shape, cut: Cut) -> Shape | None:
    """Return the shape of what each rank holds."""
    found = along(shape, cut)
    if found is None:
        return None
    place = len(shape) + found.dim
    return (*shape[:place], shape[place] * found.unit // found.period, *shape[place + 1 :])


def cut_of_boxes(boxes: Sequence[Box | None], whole: Shape) -> Cut | None:
    """Return the cut that rectangles make, rank by rank; None where they make none."""
    known = [box for box in boxes if box is not None and not box.within and not box.term and len(box.shape) == len(whole)]
    if len(known) < len(boxes) or len(known) < 2 or len({box.shape for box in known}) > 1:
        return None
    shape = known[0].shape
    dims = [dim for dim in range(len(whole)) if shape[dim] != whole[dim]]
    if len(dims) != 1 or shape[dims[0]] * len(known) != whole[dims[0]]:
        return None
    dim = dims[0]
    if any(box.offset != tuple(i * shape[dim] if at == dim else 0 for at in range(len(whole))) for i, box in enumerate(known)):
        return None
    return flat(whole, Along(dim - len(whole), shape[dim], whole[dim]))


def boxes_of(shape: Shape, cut: Cut, ranks: int) -> list[Box]:
    """Return where the parts lie, where each is one rectangle; nothing where they are not."""
    found, part = along(shape, cut), shape_of_part(shape, cut)
    if found is None or part is None or found.period != shape[found.dim]:
        return []
    place = len(shape) + found.dim
    return [Box(tuple(i * found.unit if at == place else 0 for at in range(len(shape))), part) for i in range(ranks)]


def lays_of_results(last: str, call: Call, given: Given, results: Mapping[str, Shape]) -> dict[str, Lay] | None:
    """Return how ranks hold the results of an operator, None where that is not proven.

    last: the operator's name without its owner and underscores. given: what it makes use of, some of it in parts. results: the
    shapes of the whole.
    """
    rule = _RULES.get(last)
    if rule is None or any(lay == "sum" for _, lay in given.values()):
        return None
    found: dict[str, Lay] = {}
    for slot, shape in results.items():
        lay = rule(call, given, shape)
        if lay is None:
            return None
        found[slot] = lay
    return found


def unused(last: str, call: Call) -> str:
    """Return the slot of a tensor that an operator is given and makes no use of, or ""."""
    return "input.0" if last == "baddbmm" and plain_arguments(call).get("beta") == 0 else ""


Rule = Callable[[Call, Given, Shape], Lay | None]


def _cut_among(given: Given) -> tuple[Shape, Cut] | None:
    """Return the only tensor that is cut, None where there are none or several."""
    found = [(shape, lay) for shape, lay in given.values() if isinstance(lay, Cut)]
    return found[0] if len(found) == 1 else None


def _elementwise(call: Call, given: Given, shape: Shape) -> Lay | None:
    dims = {along(of, lay) for of, lay in given.values() if isinstance(lay, Cut)}
    found = dims.pop() if len(dims) == 1 else None
    if found is None:
        return None
    spread = all(len(of) < -found.dim or of[found.dim] == 1 for of, lay in given.values() if lay == "copy")
    return flat(shape, found) if spread else None


def drops_nothing(call: Call) -> bool:
    """Return whether an operator is a dropout that passes on what it is given."""
    arguments = plain_arguments(call)
    p, training = (
        arguments.get("p", arguments.get("argument 1", 0.5)),
        arguments.get("training", arguments.get("argument 2", True)),
    )
    return call.name.rpartition(".")[2] == "dropout" and (p == 0 or training is False)


def _dropout(call: Call, given: Given, shape: Shape) -> Lay | None:
    return _elementwise(call, given, shape) if drops_nothing(call) else None


def _view(call: Call, given: Given, shape: Shape) -> Lay | None:
    only = _cut_among(given)
    if only is None or math.prod(only[0]) != math.prod(shape):
        return None
    return only[1] if along(shape, only[1]) is not None else None


def _reordered(order: Callable[[Call, int], Sequence[int] | None]) -> Rule:
    """Return the rule of what only puts dimensions in another order. order: where each dimension of the result was."""

    def rule(call: Call, given: Given, shape: Shape) -> Lay | None:
        only = _cut_among(given)
        found = None if only is None else along(*only)
        if only is None or found is None:
            return None
        before = order(call, len(only[0]))
        if before is None or sorted(before) != [*range(len(shape))]:
            return None
        place = before.index(len(shape) + found.dim)
        return flat(shape, Along(place - len(shape), found.unit, found.period))

    return rule


def _transposed(call: Call, dims: int) -> Sequence[int] | None:
    arguments, order = plain_arguments(call), [*range(dims)]
    last = call.name.rpartition(".")[2]
    swapped = (
        (0, 1)
        if last == "t"
        else (arguments.get("argument 1", arguments.get("dim0")), arguments.get("argument 2", arguments.get("dim1")))
    )
    if dims < 2 or not all(isinstance(dim, int) and -dims <= dim < dims for dim in swapped):
        return None
    i, j = (dim % dims for dim in swapped if isinstance(dim, int))
    order[i], order[j] = order[j], order[i]
    return order


def _permuted(call: Call, dims: int) -> Sequence[int] | None:
    arguments = call.args[1:] if isinstance(call.args, list) else []
    flat_list = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list) else arguments
    return [dim % dims for dim in flat_list] if all(isinstance(dim, int) for dim in flat_list) and flat_list else None


def _keeping_dims(dim_of: Callable[[Call, int], int | None]) -> Rule:
    """Return the rule of what mixes along one dimension, or takes it apart. dim_of: that one, from the front."""

    def rule(call: Call, given: Given, shape: Shape) -> Lay | None:
        cuts = {(along(of, lay), len(of)) for of, lay in given.values() if isinstance(lay, Cut)}
        found, dims = cuts.pop() if len(cuts) == 1 else (None, 0)
        alike = all(isinstance(lay, Cut) or math.prod(of) == 0 for of, lay in given.values())
        dim = dim_of(call, dims)
        if found is None or dim is None or not alike or not -dims <= dim < dims or len(shape) != dims:
            return None
        return flat(shape, found) if dim % dims != dims + found.dim else None

    return rule


def _named_dim(place: int, default: int | None = None) -> Callable[[Call, int], int | None]:
    def dim_of(call: Call, dims: int) -> int | None:
        arguments = plain_arguments(call)
        dim = arguments.get("dim", arguments.get(f"argument {place}", default))
        return dim if isinstance(dim, int) and not isinstance(dim, bool) else None

    return dim_of


def _chunk(call: Call, given: Given, shape: Shape) -> Lay | None:
    """Chunks along the cut dimension are cut as the whole is, where each is some periods long, which `flat` sees to."""
    only = _cut_among(given)
    found = None if only is None else along(*only)
    if only is None or found is None or len(given) != 1 or len(shape) != len(only[0]):
        return None
    dim = _named_dim(2, 0)(call, len(shape))
    if dim is None:
        return None
    others = all(shape[at] == n for at, n in enumerate(only[0]) if at != dim % len(shape))
    return flat(shape, found) if others else None


def _getitem(call: Call, given: Given, shape: Shape) -> Lay | None:
    """Slices, where that of the cut dimension takes everything."""
    only = _cut_among(given)
    found = None if only is None else along(*only)
    if only is None or found is None or len(given) != 1 or not isinstance(call.args, list) or len(call.args) != 2:
        return None
    index = call.args[1] if isinstance(call.args[1], list) else [call.args[1]]
    first = next((i for i, item in enumerate(index) if _is_ellipsis(item)), len(index))
    before, behind = index[:first], index[first + 1 :]
    rest = len(only[0]) - len(before) - len(behind)
    if rest < 0 or not all(map(_is_slice, (*before, *behind))):
        return None
    return flat(shape, found) if _is_everything([*before, *([_ALL] * rest), *behind][found.dim]) else None


_ALL = Opaque("slice", [None, None, None])


def _is_ellipsis(item: Any) -> bool:
    return isinstance(item, Opaque) and item.type == "ellipsis"


def _is_slice(item: Any) -> bool:
    return isinstance(item, Opaque) and item.type == "slice"


def _is_everything(item: Any) -> bool:
    return _is_slice(item) and item.value == [None, None, None]


def _repeat_interleave(call: Call, given: Given, shape: Shape) -> Lay | None:
    only, arguments = _cut_among(given), plain_arguments(call)
    found = None if only is None else along(*only)
    times, dim = arguments.get("argument 1", arguments.get("repeats")), arguments.get("dim", arguments.get("argument 2"))
    if only is None or found is None or len(given) != 1 or not isinstance(times, int) or not isinstance(dim, int):
        return None
    of_cut = dim % len(shape) == len(shape) + found.dim
    return flat(shape, Along(found.dim, found.unit * times, found.period * times) if of_cut else found)


def _product(call: Call, given: Given, shape: Shape) -> Lay | None:
    if len(given) != 2:
        return None
    (of_x, lay_x), (of_y, lay_y) = given.values()
    x, y = (along(of, lay) if isinstance(lay, Cut) else None for of, lay in ((of_x, lay_x), (of_y, lay_y)))
    unclear = any(isinstance(lay, Cut) and each is None for lay, each in ((lay_x, x), (lay_y, y)))
    if len(of_x) < 2 or len(of_y) < 2 or unclear:
        return None
    return _of_product(x, y, of_y, shape)


def _of_product(x: Along | None, y: Along | None, of_y: Shape, shape: Shape) -> Lay | None:
    """Return how ranks hold x @ y. x, y: along which dimension they are cut, None of copies."""
    if x is not None and y is not None:
        if x.dim == -1 and y.dim == -2 and x[1:] == y[1:]:
            return "sum"
        return flat(shape, x) if x == y and x.dim <= -3 else None
    if x is not None:
        return flat(shape, x) if x.dim <= -2 and len(of_y) == 2 else None
    return flat(shape, y) if y is not None and y.dim == -1 else None


def _linear(call: Call, given: Given, shape: Shape) -> Lay | None:
    tensors = [*given.values()]
    if len(tensors) < 2 or len(tensors[1][0]) != 2:
        return None
    (of_x, lay_x), (of_w, lay_w) = tensors[:2]
    x = along(of_x, lay_x) if isinstance(lay_x, Cut) else None
    w = along(of_w, lay_w) if isinstance(lay_w, Cut) else None
    if (isinstance(lay_x, Cut) and x is None) or (isinstance(lay_w, Cut) and w is None):
        return None
    turned = None if w is None else Along(-3 - w.dim, w.unit, w.period)
    made = _of_product(x, turned, of_w[::-1], shape)
    for of_bias, lay in tensors[2:]:
        cut = along(of_bias, lay) if isinstance(lay, Cut) else None
        if made == "sum" or (turned is not None and cut != turned) or (turned is None and lay != "copy"):
            return None
    return made


def _baddbmm(call: Call, given: Given, shape: Shape) -> Lay | None:
    pair = {slot: each for slot, each in given.items() if slot != "input.0"}
    made = _product(call, pair, shape) if len(pair) == 2 else None
    added = given.get("input.0")
    return made if added is None or (added[0] == shape and added[1] == made) else None


def _normalised(call: Call, given: Given, shape: Shape) -> Lay | None:
    """Normalisation along the last dimensions, as many as a weight has or the argument says; weights are copies."""
    only = _cut_among(given)
    found = None if only is None else along(*only)
    sizes = call.args[1] if isinstance(call.args, list) and len(call.args) > 1 else None
    if only is None or found is None or not isinstance(sizes, list) or only[0] != next(iter(given.values()))[0]:
        return None
    return flat(shape, found) if -found.dim > len(sizes) else None


def _attention(call: Call, given: Given, shape: Shape) -> Lay | None:
    """Attention of some heads or samples: queries, keys and values are cut alike, and there is no mask."""
    cuts = {along(of, lay) if isinstance(lay, Cut) else None for of, lay in given.values()}
    found = cuts.pop() if len(cuts) == 1 and len(given) == 3 else None
    return flat(shape, found) if found is not None and found.dim <= -3 else None


ELEMENTWISE = (
    *("add", "sub", "rsub", "mul", "div", "neg", "abs", "pow", "sqrt", "rsqrt", "square", "reciprocal", "exp", "log", "log1p"),
    *("relu", "gelu", "silu", "sigmoid", "logsigmoid", "tanh", "softplus", "leaky_relu", "elu", "sin", "cos", "erf", "clamp"),
    *("where", "masked_fill", "lerp", "addcmul", "addcdiv", "maximum", "minimum", "eq", "ne", "lt", "le", "gt", "ge"),
    *("to", "type", "type_as", "float", "half", "bfloat16", "double", "clone", "contiguous", "detach"),
)
_RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys(("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze"), _view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims", "t"), _reordered(_transposed)),
    "permute": _reordered(_permuted),
    **dict.fromkeys(("softmax", "log_softmax"), _keeping_dims(_named_dim(1, -1))),
    **dict.fromkeys(("layer_norm", "rms_norm"), _normalised),
    "split": _keeping_dims(_named_dim(2, 0)),
    "chunk": _chunk,
    "cat": _keeping_dims(_named_dim(1, 0)),
    "repeat_interleave": _repeat_interleave,
    "getitem": _getitem,
    "dropout": _dropout,
    **dict.fromkeys(("matmul", "mm", "bmm"), _product),
    "linear": _linear,
    "scaled_dot_product_attention": _attention,
    "baddbmm": _baddbmm,
}
