"""A batch of whatever form: which of its tensors have rows, what each is, and how rows, padding and tokens are changed."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import GetAttrKey, keystr, tree_flatten_with_path, tree_unflatten

from trainprobe.engine.core.guard import attempt
from trainprobe.errors import UsageError
from trainprobe.preflight.opened import Attribute, closed, is_listed, opened

TELL = """tell it by
    def loss(model, batch):
        return criterion(model(batch[0]), batch[1])  # the scalar of one batch, of tensors whose rows come first
    print(trainprobe.preflight(loss, model, batch))"""
_NAMES = {
    "mask": r"(attention|padding|pad|src|input|encoder_attention)?_?mask",
    "labels": r"(.*_)?(labels?|targets?|lm_labels|ys?)",
    "positions": r"position_?(ids?|s)?|positions",
    "documents": r"(doc(ument)?|segment|seq(uence)?)_?(ids?|idx|s)",
    "types": r"token_type_ids",
    "tokens": r"(.*_)?(input_ids|tokens?|idx|ids|xs?|inputs?|src)",
}
_EDGES = r".*edges?_?(label_)?index(_\d+)?|edges(_\d+)?"  # [2, edges]


class Batch:
    """A batch of tensors in nested containers. rows: how many samples it has. leaves: its tensors, rows first.

    by_row: which of them have rows. listed: which lists have an element for each row. brought: whether an object brought a
    tensor along, which the model may leave alone. ignored: the label that the loss leaves out. time: (steps, rows) where time
    is the first dimension, else None. There tensors are turned, and `tree` turns them back.
    """

    def __init__(self, tree: Any) -> None:
        flat, self._form = tree_flatten_with_path(opened(tree), is_leaf=is_listed)
        self.ignored = -100
        self.paths = [_name(path) for path, _ in flat]
        self.leaves = [leaf for _, leaf in flat]
        self.brought = [_is_brought(path[-1]) if path else False for path, _ in flat]
        sizes = Counter(len(x) for x in self.leaves if isinstance(x, Tensor) and x.dim() and not _is_sparse(x) and len(x))
        if not sizes:
            raise UsageError(f"the batch is a {type(tree).__name__} without a tensor: {TELL}")
        sizes.subtract(2 for path in self.paths if re.fullmatch(_EDGES, path.split(".")[-1]))
        self.time = self._time_first()
        self.rows = self.time[1] if self.time else max(sizes, key=lambda size: (sizes[size], size))
        self._turned = {i: self.leaves[i].shape for i, x in enumerate(self.leaves) if self.time and isinstance(x, Tensor)}
        self.leaves = [x if i not in self._turned else self.rows_first(x) for i, x in enumerate(self.leaves)]
        tensors = [(i, x) for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim() and not _is_sparse(x)]
        self.by_row = [i for i, x in tensors if x.shape[0] == self.rows]
        self.listed = [i for i, x in enumerate(self.leaves) if is_listed(x) and len(x) == self.rows]

    def _time_first(self) -> tuple[int, int] | None:
        """Return (time, rows) where labels of whole numbers are the tokens one place further along the first dimension."""
        whole = [x for x in self.leaves if isinstance(x, Tensor) and x.dim() and not _is_float(x) and x.dtype != torch.bool]
        texts = [(x, y) for x in whole for y in whole if x is not y and x.dim() == 2 and len(x) > 2 and x.numel() == y.numel()]
        later = (x for x, y in texts if torch.equal(x[1:], y.reshape(x.shape)[:-1]) and not torch.equal(x[1:], x[:-1]))
        return next(((x.shape[0], x.shape[1]) for x in later), None)

    def rows_first(self, x: Tensor) -> Tensor:
        """Return a tensor [time, rows, …], [time · rows, …] or [layers, rows, …] of this batch with its rows first."""
        if self.time and x.dim() and x.shape[0] == self.time[0] * self.rows:
            x = x.reshape(*self.time, *x.shape[1:])
        return x.transpose(0, 1) if self.time and x.dim() > 1 and x.shape[1] == self.rows else x

    def tree(self) -> Any:
        """Return the containers again, with copies of the tensors."""
        leaves = [x.detach().clone() if isinstance(x, Tensor) else x for x in self.leaves]
        for i, shape in self._turned.items():
            flat = len(shape) < leaves[i].dim()
            turned = leaves[i].transpose(0, 1) if i in self.by_row and leaves[i].dim() > 1 else leaves[i]
            leaves[i] = turned.flatten(0, 1) if flat else turned.contiguous()
        return closed(tree_unflatten(leaves, self._form))

    def with_leaves(self, changed: Mapping[int, Any]) -> Batch:
        """Return a batch in which some tensors are others."""
        self.roles  # noqa: B018  are those of this batch in the other, too
        other = copy(self)
        other.leaves = [changed.get(i, leaf) for i, leaf in enumerate(self.leaves)]
        other.rows = len(other.leaves[self.by_row[0]])
        if (tokens := other.of("tokens")) is not None and self.time:
            other.time = (tokens.shape[1], other.rows)
        return other

    def to(self, dtype: torch.dtype) -> Batch:
        """Return a batch whose floating-point tensors have this dtype."""
        held = {i: x for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.is_floating_point()}
        return self.with_leaves({i: x.to(dtype) for i, x in held.items()})

    def take(self, rows: Sequence[int]) -> Batch:
        """Return some of the rows, in this order."""
        lists = {i: type(self.leaves[i])(self.leaves[i][row] for row in rows) for i in self.listed}
        return self.with_leaves({**lists, **{i: self.leaves[i][list(rows)] for i in self.by_row}})

    def reversed(self) -> Batch:
        """Return the batch from its last row to its first."""
        return self.take(range(self.rows - 1, -1, -1))

    def split(self, count: int) -> list[Batch]:
        """Return so many micro-batches of neighbouring rows, whose sizes differ by one row at most."""
        bounds = [self.rows * i // count for i in range(count + 1)]
        return [self.take(range(a, b)) for a, b in pairwise(bounds)]

    @cached_property
    def roles(self) -> dict[str, int]:
        """Return role → place of the tensor: tokens, labels, mask, positions, documents, types."""
        found: dict[str, int] = {}
        for role, pattern in _NAMES.items():
            free = (i for i in self.by_row if i not in found.values())
            fits = [i for i in free if re.fullmatch(pattern, self._key(i)) and self._may_be(role, i)]
            found |= {role: fits[0]} if fits else {}
        texts = [i for i in self.texts() if i not in found.values()]
        found = {"tokens": texts[0], **found} if texts else found
        again = re.escape(self._key(found["tokens"])) + r"_\d+" if "tokens" in found else "$."  # tokens of another call
        left = [i for i in self.by_row if i not in found.values() and not _is_float(self.leaves[i])]
        left = [i for i in left if not re.fullmatch(again, self._key(i)) and not self._key(i).endswith("mask")]
        return {"labels": left[0], **found} if len(left) == 1 and len(self.by_row) > 1 else found

    def _key(self, i: int) -> str:
        return re.split(r"[.\[\]]+", self.paths[i].rstrip("]"))[-1].lower()

    def _may_be(self, role: str, i: int) -> bool:
        x = self.leaves[i]
        if role == "mask":
            return x.dim() == 2 and bool(((x == 0) | (x == 1)).all()) and not self._marks_padding(x)
        return not _is_float(x) and x.dim() == 2 if role != "labels" else True

    def _marks_padding(self, mask: Tensor) -> bool:
        """Tell whether a mask is 1 where padding is, as fairseq's are: all tokens there are the same, and others are not."""
        texts = [self.leaves[i] for i in self.texts() if self.leaves[i].shape == mask.shape and self.leaves[i] is not mask]
        return any(len(x[mask != 0].unique()) < 2 <= len(x[mask == 0].unique()) for x in texts)

    def texts(self) -> list[int]:
        """Return the places of the tensors [rows, time] of whole numbers."""
        whole = [i for i in self.by_row if not _is_float(self.leaves[i]) and self.leaves[i].dtype != torch.bool]
        return [i for i in whole if self.leaves[i].dim() == 2 and self.leaves[i].shape[1] > 1]

    def reading(self, i: int) -> Batch:
        """Return this batch where another one of its texts is that of the tokens."""
        other = copy(self)
        other.roles = {**{role: place for role, place in self.roles.items() if place != i}, "tokens": i}
        return other

    def of(self, role: str) -> Tensor | None:
        """Return the tensor of a role, None where the batch has none."""
        return self.leaves[self.roles[role]] if role in self.roles else None

    @property
    def grouped(self) -> str:
        """Why rows cannot be told from each other, as where a tensor has one element for several of them; else ""."""
        if listed := self._listed():
            return f"{listed} has a tensor for each row, of different lengths"
        others = [i for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim() and i not in self.by_row]
        if (sparse := next((i for i in others if _is_sparse(self.leaves[i])), None)) is not None:
            return f"{self.paths[sparse]} is a sparse matrix, which names rows by their numbers"
        edges = (i for i in others if self.leaves[i].shape[0] == 2 == self.leaves[i].dim() and not _is_float(self.leaves[i]))
        if (graph := next((i for i in edges if 2 < int(self.leaves[i].max()) + 1 <= self.rows), None)) is not None:
            return f"{self.paths[graph]} names rows by their numbers, as edges of a graph do"
        if (number := next((i for i in self.by_row if self._key(i) == "batch" and self._counts(i)), None)) is not None:
            return f"{self.paths[number]} says which sample each row belongs to"
        found = next((i for i in others if len(self.leaves[i]) > 1 and self.rows % len(self.leaves[i]) == 0), None)
        return "" if found is None else f"{self.paths[found]} has {len(self.leaves[found])} rows for {self.rows} of the batch"

    def _counts(self, i: int) -> bool:
        """Tell whether a tensor numbers rows in groups from 0 on, as those of each graph."""
        x = self.leaves[i]
        steps = x.diff() if x.dim() == 1 and not _is_float(x) and x.dtype != torch.bool else None
        return steps is not None and not int(x[0]) and bool(((steps == 0) | (steps == 1)).all()) and bool((steps == 0).any())

    def _listed(self) -> str:
        """Return the name of tensors that a list has one of for each row, as boxes of pictures; "" where there are none."""
        lengths: dict[str, set[int]] = {}
        for path, x in zip(self.paths, self.leaves, strict=True):
            if isinstance(x, Tensor) and x.dim():
                lengths.setdefault(re.sub(r"\b\d+\.|(_|\b)\d+$", "", path), set()).add(len(x))
        return next((name for name, found in lengths.items() if name and len(found) > 1), "")

    @property
    def several(self) -> str:
        """What else has elements for rows, so that the tensors of the batch alone say little; "" where nothing has."""
        if self.listed:  # or a height and a width
            return f"{self.paths[self.listed[0]]} may have an element for each row, and is no tensor"
        others = (i for i, x in enumerate(self.leaves) if isinstance(x, Tensor) and x.dim() and i not in self.by_row)
        found = next((i for i in others if len(self.leaves[i]) > self.rows and len(self.leaves[i]) % self.rows == 0), None)
        if found is None:
            return ""
        count = len(self.leaves[found])
        return f"{self.paths[found]} has {count} rows, {count // self.rows} for each of the batch"

    @property
    def text_labels(self) -> Tensor | None:
        """The labels where they stand beside the tokens, [rows, time]."""
        tokens, labels = self.of("tokens"), self.of("labels")
        return labels if tokens is not None and labels is not None and labels.shape == tokens.shape else None

    def targets(self) -> int:
        """Return how many labels are not ignored; the rows where labels do not stand in time."""
        labels = self.of("labels")
        in_time = labels is not None and labels.dim() > 1 and not _is_float(labels)
        return int((labels != self.ignored).sum()) if in_time else self.rows

    def tokens(self) -> int:
        """Return how many tokens the mask lets through; all of them without one."""
        mask, tokens = self.of("mask"), self.of("tokens")
        return int(mask.sum()) if mask is not None else tokens.numel() if tokens is not None else self.rows

    def with_role(self, role: str, tensor: Tensor) -> Batch:
        """Return a batch in which the tensor of a role is another one."""
        return self.with_leaves({self.roles[role]: tensor})

    def other_tokens(self, where: Tensor) -> Tensor:
        """Return the tokens with other ones, of those that the batch has, in these places, a mask [rows, time]."""
        tokens = self.leaves[self.roles["tokens"]]
        known = tokens.unique()
        step = torch.randint(1, max(len(known), 2), tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens.device)
        at = torch.searchsorted(known, tokens.contiguous())
        return torch.where(where, known[(at + step) % len(known)], tokens)

    def with_other_last(self, larger: bool = True, hidden: bool = True) -> Batch:
        """Return a batch whose last row has the inputs of the first and no target in time.

        larger: if they are no tokens. hidden: the mask of that row is 0, where labels stand in time.
        """
        changed: dict[int, Tensor] = {}
        for i in self.by_row:
            is_label, text = i == self.roles.get("labels"), self.text_labels is not None
            if is_label and not text:
                continue
            changed[i] = x = self.leaves[i].clone()
            x[-1] = self.ignored if is_label else 0 if hidden and text and i == self.roles.get("mask") else x[0]
            if larger and x.is_floating_point():  # what is taken from the largest row is seen
                x[-1] += 2 * x.abs().max()
        return self.with_leaves(changed)

    def padded(self, columns: int, left: bool) -> Batch:
        """Return a batch with so many more columns of padding: the mask is 0 there and labels are ignored."""
        tokens, mask = self.of("tokens"), self.of("mask")
        assert tokens is not None
        pad = tokens[mask == 0][0] if mask is not None and bool((mask == 0).any()) else tokens.flatten()[0]
        changed, fills = dict[int, Tensor](), {"tokens": pad, "labels": self.ignored, "mask": 0}
        for i in self.by_row:
            x = self.leaves[i]
            if x.dim() < 2 or x.shape[1] != tokens.shape[1]:
                continue
            more = (x[:, :1] if left else x[:, -1:]).expand(-1, columns, *x.shape[2:]).clone()
            other = int(self._marks_padding(x)) if self._key(i).endswith("mask") else None
            fill = next((fills[name] for name, place in self.roles.items() if place == i and name in fills), other)
            more = more if fill is None else torch.full_like(more, int(fill))
            changed[i] = torch.cat([more, x] if left else [x, more], dim=1)
        return self.with_leaves(changed)


def joined(micros: list[Any]) -> Any:
    """Return the rows of all micro-batches as one batch, padded to one length; the first where they cannot be joined."""
    batches = [Batch(micro) for micro in micros]
    longest = max((tokens.shape[1] for b in batches if (tokens := b.of("tokens")) is not None), default=0)
    lengths = [longest if tokens is None else tokens.shape[1] for tokens in (b.of("tokens") for b in batches)]
    even = [b.padded(longest - n, left=False) if n < longest else b for b, n in zip(batches, lengths, strict=True)]

    def whole() -> Batch:
        lists = {i: type(even[0].leaves[i])(chain(*(batch.leaves[i] for batch in even))) for i in even[0].listed}
        return even[0].with_leaves({**lists, **{i: torch.cat([batch.leaves[i] for batch in even]) for i in even[0].by_row}})

    return attempt(whole, otherwise=lambda _: even[0]).tree()


def _is_float(x: Any) -> bool:
    return x.is_floating_point() or x.is_complex()


def _is_sparse(x: Tensor) -> bool:
    return x.layout != torch.strided


def _is_brought(key: Any) -> bool:
    return isinstance(key, GetAttrKey) or isinstance(getattr(key, "key", None), Attribute)


def _name(path: Any) -> str:
    return re.sub(r"\['?|'?\]", ".", keystr(path)).replace("..", ".").strip(".") or "batch"
