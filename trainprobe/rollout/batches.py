"""What loops of reinforcement learning call a batch: verl's DataProto, OpenRLHF's Experience, lists of sequences, mappings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

from trainprobe.rollout.logprobs.columns import NAMES

# what a value is → the names that it has in trainers; the first is ours, and log-probabilities are named as in files
OF_A_BATCH: dict[str, tuple[str, ...]] = {
    "rewards": ("rewards", "reward", "scores", "token_level_rewards", "token_level_scores"),
    "advantages": ("advantages", "advantage"),
    "prompts": ("prompts", "prompt_ids", "prompt"),
    "groups": ("groups", "group", "uid", "group_index", "prompt_index"),
    **{kind: NAMES[kind] for kind in ("mask", "trainer", "engine")},
    "tokens": (*NAMES["tokens"], "sequences"),
    "entropy": (*NAMES["entropy"], "entropys"),
}
_WHOLE = ("input_ids", "sequences")  # of prompt and response
_A_TOKEN = frozenset(
    name for kind in ("tokens", "mask", "trainer", "engine", "entropy", "advantages") for name in OF_A_BATCH[kind]
)


def columns_of(batch: Any) -> dict[str, Any]:
    """Return name → column of a batch, without those that are None. Lists of tensors [length] become [rollouts, longest].

    Tokens of prompt and response are cut to the places that the mask has, the last of each. Raises what a batch of another kind
    raises when it is read.
    """
    if hasattr(batch, "non_tensor_batch"):  # verl
        given = {**dict(batch.batch.items()), **batch.non_tensor_batch}
    elif is_dataclass(batch):  # OpenRLHF
        given = vars(batch)
    else:
        if isinstance(batch, list | tuple):  # AReaL: a dictionary for each prompt
            names = [name for name in batch[0] if all(name in each for each in batch)]
            batch = {name: [row for each in batch for row in each[name]] for name in names}
        given = {name: batch[name] for name in batch.keys()}  # noqa: SIM118  (some mappings of tensors refuse `in`)
    found = {str(name): column for name, column in given.items() if column is not None}
    if found.get("prox_logp") is found.get("logprobs"):
        found.pop("prox_logp", None)
    elif {"prox_logp", "logprobs"} <= found.keys():  # AReaL, whose `logprobs` are those of the engine
        found |= {"trainer_logprobs": found.pop("prox_logp"), "engine_logprobs": found.pop("logprobs")}
    if {"kl_rewards", "input_ids"} <= found.keys():  # of AReaL behind the advantages: all but the tokens is a place earlier
        found["input_ids"] = [row.roll(-1) for row in found["input_ids"]]
    mask = next((found[name] for name in OF_A_BATCH["mask"] if name in found), None)
    lengths = [len(row) for row in mask] if mask is not None and _is_ragged(mask) else None
    for name in _A_TOKEN & found.keys():
        column = found[name]
        if _is_ragged(column):
            found[name] = _padded(column, lengths)
        elif name in _WHOLE and mask is not None and getattr(mask, "ndim", 0) == 2:
            found[name] = column[:, -mask.shape[1] :]
    return found


def _is_ragged(column: Any) -> bool:
    return isinstance(column, list | tuple) and bool(column) and all(getattr(row, "ndim", 0) == 1 for row in column)


def _padded(rows: Sequence[Any], lengths: Sequence[int] | None) -> Any:
    """Return rows as one tensor [rollouts, longest], of each as many of the last as it has places in the mask."""
    if lengths is not None and len(lengths) == len(rows):
        rows = [row[max(0, len(row) - n) :] for row, n in zip(rows, lengths, strict=True)]
    whole = rows[0].new_zeros((len(rows), max(map(len, rows))))
    for i, row in enumerate(rows):
        whole[i, : len(row)] = row
    return whole
