"""The columns of a file of log-probabilities: what each is called, and how they become one table of tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trainprobe.engine.core.words import and_more
from trainprobe.errors import FormatError, did_you_mean
from trainprobe.rollout.logprobs.tokens import ScoredTokens

Array = npt.NDArray[Any]
Column = Array | list[Array]  # [sequences, length], [tokens] or [sequences]; or an array for each sequence

# what a value is → the names that it has in files; the first is ours
NAMES: dict[str, tuple[str, ...]] = {
    "tokens": ("tokens", "token_ids", "engine_tokens", "response_ids", "completion_ids", "responses", "input_ids"),
    "trainer_tokens": ("trainer_tokens", "trainer_token_ids"),
    "mask": ("mask", "response_mask", "loss_mask", "loss_masks", "completion_mask", "action_mask"),
    "trainer": (
        *("trainer_logprobs", "old_log_probs", "old_per_token_logps", "prev_logprobs", "log_probs", "action_log_probs"),
        *("per_token_logps", "logprobs"),
    ),
    "engine": (
        *("engine_logprobs", "rollout_log_probs", "rollout_logprobs", "sampling_per_token_logps", "generation_logprobs"),
        *("inference_logprobs", "vllm_logprobs", "sglang_logprobs", "behavior_logprobs"),
    ),
    "repeated": ("repeated_logprobs",),
    "precise": ("precise_logprobs",),
    "entropy": ("entropy", "entropies"),
    "position": ("position", "positions", "position_ids"),
    "trainer_experts": ("trainer_experts",),
    "engine_experts": ("engine_experts", "routed_experts", "rollout_routed_experts"),
    "version": ("version", "versions", "policy_version", "weight_version", "weight_versions"),
    "micro_batch": ("micro_batch", "micro_batches"),
    "rank": ("rank", "ranks"),
    "sequence_weights": ("sequence_weights", "importance_weights", "sequence_is_weights"),
    "text": ("token_texts", "token_text"),
    "sequence": ("sequence", "sequences", "row", "sample"),
    "lengths": ("lengths", "response_lengths"),
}
PER_ROW = ("version", "micro_batch", "rank", "sequence_weights")
WIDE = ("trainer_experts", "engine_experts")  # several numbers a token
MOST = 1 << 24  # places of tokens in one file, padding included


def known_names() -> frozenset[str]:
    """Return all names of columns that are read."""
    return frozenset(name for names in NAMES.values() for name in names)


def gathered(columns: Mapping[str, Column], where: str) -> ScoredTokens:
    """Return the tokens of all sequences, one after the other. Raises FormatError that names the column that does not fit."""
    found = {kind: (name, columns[name]) for kind, names in NAMES.items() for name in names if name in columns}
    found = {kind: next((n, columns[n]) for n in NAMES[kind] if n in columns) for kind in found}
    for side in ("trainer", "engine"):
        if side not in found:
            hint = did_you_mean(NAMES[side][0], list(columns))
            there = f"it has {and_more(sorted(columns), shown=12)}" if columns else "it has no column"
            raise FormatError(
                f"{where} has no log-probabilities of the {side}: name a column {NAMES[side][0]!r}{hint}; {there}"
            )
    lengths = _lengths(found, where)
    total = int(lengths.sum())
    if total > MOST:
        raise FormatError(f"{where} has {total:,} places of tokens, and at most {MOST:,} are read: split the file")
    row = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    flat: dict[str, Any] = {}
    for kind, (name, column) in found.items():
        if kind in ("sequence", "lengths"):
            continue
        flat[kind] = _spread(column, kind, lengths, row, f"{where}: {name}")
    mask = flat.pop("mask", None)
    given = np.ones(total, np.bool_) if mask is None else np.nan_to_num(mask) > 0
    starts = np.concatenate([[0], np.cumsum(lengths)])
    experts = _flipped(flat.pop("trainer_experts", None), flat.pop("engine_experts", None))
    trainer, engine = (np.asarray(flat.pop(side), np.float64) for side in ("trainer", "engine"))
    return ScoredTokens(trainer, engine, row, starts, given, flipped=experts, masked=mask is not None, **flat)


def _lengths(found: Mapping[str, tuple[str, Column]], where: str) -> npt.NDArray[np.int64]:
    """Return the length of each sequence, from the shape of the trainer's log-probabilities or from a column that says it."""
    name, column = found["trainer"]
    if isinstance(column, list):
        return np.array([len(row) for row in column], np.int64)
    if column.ndim == 2:
        return np.full(column.shape[0], column.shape[1], np.int64)
    if column.ndim != 1:
        raise FormatError(f"{where}: {name} has shape {list(column.shape)}; give [sequences, length] or [tokens]")
    if "lengths" in found:
        lengths = np.asarray(found["lengths"][1]).astype(np.int64).reshape(-1)
        if lengths.min(initial=0) < 0 or lengths.sum() != len(column):
            raise FormatError(f"{where}: the lengths add up to {lengths.sum()}, and {name} has {len(column)} tokens")
        return lengths
    if "sequence" in found:
        number = np.asarray(found["sequence"][1]).reshape(-1)
        if len(number) != len(column):
            raise FormatError(f"{where}: {found['sequence'][0]} has {len(number)} values, and {name} has {len(column)} tokens")
        begins = np.concatenate([[True], number[1:] != number[:-1]]) if len(number) else np.zeros(0, np.bool_)
        if len(set(number[begins].tolist())) != int(begins.sum()):
            raise FormatError(f"{where}: the tokens of a sequence do not stand together: sort by {found['sequence'][0]}")
        return np.diff(np.append(np.flatnonzero(begins), len(number)))
    return np.array([len(column)], np.int64)


def _spread(column: Column, kind: str, lengths: npt.NDArray[np.int64], row: npt.NDArray[np.int32], where: str) -> Array:
    """Return a column as one value a token; the experts as [tokens, numbers]."""
    total, rows = int(lengths.sum()), len(lengths)
    array = _one_array(column, kind, lengths, where) if isinstance(column, list) else np.asarray(column)
    if isinstance(column, list) and not rows:
        return array
    if kind in WIDE:
        width = array.size // total if total else 1
        if total and (array.size != total * width or not width):
            raise FormatError(f"{where} has shape {list(array.shape)}, which does not fit {total} tokens")
        return array.reshape(total, -1) if total else array.reshape(0, 1)
    if kind in PER_ROW and array.size == rows and (array.ndim == 1 or array.shape[1:] == (1,)):
        array = array.reshape(-1)[row]
    if array.size != total or array.ndim > 2:
        raise FormatError(f"{where} has shape {list(array.shape)}, which does not fit {total} tokens of {rows} sequences")
    if kind != "text" and array.dtype.kind not in "biuf":
        raise FormatError(f"{where} holds {array.dtype}, and numbers are expected")
    return array.reshape(-1)


def _one_array(column: list[Array], kind: str, lengths: npt.NDArray[np.int64], where: str) -> Array:
    """Join a column that has an array for each sequence."""
    total, rows = int(lengths.sum()), len(lengths)
    if kind in ("tokens", "trainer_tokens"):  # some loops keep prompt and response together
        column = [part[len(part) - n :] for part, n in zip(column, lengths, strict=False) if len(part) >= n]
    per_row = kind in PER_ROW and all(part.size == 1 for part in column)
    whole = len(column) == rows and (per_row or all(len(p) == n for p, n in zip(column, lengths, strict=False) if p.ndim))
    if not whole or (not per_row and any(p.ndim == 0 for p in column)):
        raise FormatError(f"{where} does not have a value for each of the {total} tokens of {rows} sequences")
    if not column:
        return np.zeros(0)
    try:
        return np.concatenate([part.reshape(1) for part in column]) if per_row else np.concatenate(column)
    except ValueError as error:
        raise FormatError(f"{where} has rows of several shapes: {error}") from None


def _flipped(trainer: Array | None, engine: Array | None) -> npt.NDArray[np.bool_] | None:
    """Return where both sides chose other experts, in any order; None where the choices of one side are not known."""
    if trainer is None or engine is None or trainer.shape != engine.shape:
        return None
    return (np.sort(trainer, axis=1) != np.sort(engine, axis=1)).any(axis=1)


def wanted(names: Sequence[str]) -> list[str]:
    """Return those names that are columns of ours."""
    return [name for name in names if name in known_names()]
