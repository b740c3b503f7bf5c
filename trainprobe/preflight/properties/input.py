"""Input: the model uses what it is given, and no two rows are the same."""

from __future__ import annotations

import sys

import torch
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler

from trainprobe.engine.capture.step_gradients import distance, relative
from trainprobe.engine.core.live_objects import instances_of, with_subclasses
from trainprobe.preflight.batches import Batch
from trainprobe.preflight.report import Line, broken, holds, not_applicable
from trainprobe.preflight.subject import Subject

TEXT = 80  # letters of a row that are told
_NO_CONTENT = ("labels", "mask", "positions", "documents", "types")


def examine(subject: Subject) -> Line:
    """Give each row the input of its neighbour, one tensor after the other, and look whether the outputs change."""
    batch = subject.batch
    if batch.rows < 2:
        return not_applicable("the batch has one row")
    content = content_of(batch)
    unused = [i for i in content if _is_unused(subject, i)]
    used = [i for i in content if i not in unused]
    if unused and batch.several:
        return not_applicable(batch.several)
    if faults := [i for i in unused if not (used and batch.brought[i])]:
        return broken(f"{batch.paths[faults[0]]} is not used: rows that are given that of another row have the same outputs")
    said = {"used": used, "not used": unused}
    told = [f"{', '.join(batch.paths[i] for i in places)} {what}" for what, places in said.items() if places]
    groups = [] if batch.grouped else _equal_rows([batch.leaves[i] for i in content])  # nodes of a graph may be alike
    if twins := [rows for rows in groups if len(rows) > 1]:
        told.append(f"rows {twins[0][0]} and {twins[0][1]} of the batch are the same")
        drawn = len({len(rows) for rows in groups}) > 2  # once, twice, three times: with replacement, as replays are
        if sum(map(len, twins)) * 2 >= batch.rows and not drawn:
            return broken(told[-1])
    if (mask := batch.of("mask")) is not None:
        told.append(f"{float((mask == 0).double().mean()):.0%} padding")
    if (labels := batch.text_labels) is not None:
        told.append(f"{float((labels == batch.ignored).double().mean()):.0%} of the targets ignored")
    told += [text for text in (_text(batch), _order()) if text]
    why = batch.grouped or "no tensor of the batch has content besides its labels"
    return holds(", ".join(told)) if told else not_applicable(why)


def _text(batch: Batch) -> str:
    """Return the first row and what is learnt of it as a person reads them, by a tokenizer of transformers that is alive."""
    known, tokens, labels = sys.modules.get("transformers.tokenization_utils_base"), batch.of("tokens"), batch.text_labels
    alive = instances_of(with_subclasses(known.PreTrainedTokenizerBase)) if known is not None else []
    if tokens is None or not (fits := [tokenizer for tokenizer in alive if len(tokenizer) > int(tokens.max())]):
        return ""
    mask = batch.of("mask")
    parts = [tokens[0] if mask is None else tokens[0][mask[0] != 0]]
    parts += [] if labels is None else [labels[0][labels[0] != batch.ignored]]
    return ", learnt is ".join([repr(fits[0].decode(part)[:TEXT]) for part in parts])


def _order() -> str:
    loaders = [loader for loader in instances_of(with_subclasses(DataLoader)) if loader.batch_size is not None]
    still = loaders and all(type(loader.sampler) is SequentialSampler for loader in loaders)
    return "no loader shuffles: each epoch has the same order" if still else ""


def content_of(batch: Batch) -> list[int]:
    """Return the places of the tensors that are neither labels nor say where something is."""
    others = {i for role, i in batch.roles.items() if role in _NO_CONTENT}
    return [i for i in batch.by_row if i not in others and batch.leaves[i].dim() > 1]


def _is_unused(subject: Subject, i: int) -> bool:
    x = subject.batch.leaves[i]
    if bool((x.roll(1, 0) == x).all()):
        return False
    # a loss that is a mean over rows does not see their order, but that all are the first
    return all(_same_with(subject, i, other) for other in (x.roll(1, 0), x[:1].expand_as(x).clone()))


def _same_with(subject: Subject, i: int, changed: Tensor) -> bool:
    other, base = subject.batch.with_leaves({i: changed}), subject.base
    seen = subject.run(other, backward=False)
    if seen.logits is None or base.logits is None or seen.logits.shape != base.logits.shape:
        return not subject.differs(subject.run(other))  # a loss over pairs may begin the same whatever they are
    at_zero = not bool(base.logits.any())  # the last layer begins so: those before it show what is used
    if distance(seen.logits, base.logits) > subject.eps or (at_zero and subject.first_difference(subject.batch, other)):
        return False
    return relative(seen.loss, base.loss) <= subject.eps  # where only the loss changes, it is a target


def _equal_rows(content: list[Tensor]) -> list[list[int]]:
    """Return the rows of the batch in groups: those of one group are equal in all tensors, to the bit."""
    flat = [x.detach().cpu().flatten(1).contiguous().view(torch.uint8).numpy() for x in content]
    found: dict[tuple[bytes, ...], list[int]] = {}
    for row in range(len(flat[0]) if flat else 0):
        found.setdefault(tuple(x[row].tobytes() for x in flat), []).append(row)
    return list(found.values())
