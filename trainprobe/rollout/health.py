"""`note_rollout(probe, batch)`: the health of a batch of rollouts as series of the step, which the rule `rollout` judges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainprobe.engine.core.findings import Finding
from trainprobe.engine.core.guard import attempt, fault_text
from trainprobe.engine.core.words import and_more
from trainprobe.errors import UsageError, did_you_mean
from trainprobe.rollout.batches import OF_A_BATCH, columns_of

SPAN = 4  # tokens of an n-gram
EQUAL = 1e-6  # rewards that differ by less, relative to their size, are equal


def note_rollout(
    probe: Any, batch: Mapping[str, Any], *, group_size: int | None = None, end_token: int | Sequence[int] | None = None
) -> None:
    """Note how healthy a batch of rollouts is. Costs nothing at a step that is not collected.

    probe: of `watch`, or the callback of a framework. batch: name → tensor, by our names or by those of TRL, verl, slime,
    OpenRLHF and AReaL; verl's DataProto and OpenRLHF's Experience are taken as they are, and lists of sequences are padded. Of
    n rollouts with at most t tokens: `tokens` [n, t], `mask` [n, t], `rewards` [n], `advantages` [n] or [n, t], `prompts`
    [n, any] or `groups` [n] of numbers or texts, `trainer_logprobs`, `engine_logprobs` and `entropy` [n, t] in nats; what is
    absent is not judged. group_size: rollouts of a prompt, where they stand together and neither prompts nor groups are given.
    end_token: what ends a response, one or several.

    Only tensors of the batch are read, on their device; the host sees the numbers as the step ends. A batch without any known
    name, or with shapes that do not fit, is a finding of the run, and the training goes on.
    """
    session = getattr(probe, "session", probe)
    watched = getattr(session, "probe", session)
    if watched is None or watched.tape is None:
        return

    def noted() -> str:
        for name, value in rollout_numbers(batch, group_size=group_size, end_token=end_token).items():
            session.note(f"rollout/{name}", value)
        return ""

    why = attempt(noted, otherwise=fault_text)
    if why:
        message = f"a batch of rollouts was not judged: {why}"
        watched.report_once(Finding("probe", "warning", message, step=watched.step_number, place=watched.place))


def rollout_numbers(
    batch: Mapping[str, Any], *, group_size: int | None = None, end_token: int | Sequence[int] | None = None
) -> dict[str, Any]:
    """Return the series of `note_rollout` as tensors of one element, without the prefix `rollout/`. Raises UsageError."""
    import torch

    with torch.no_grad():
        found = _found(columns_of(batch))
        texts = {kind for kind in ("groups", "prompts") if kind in found and _is_text(found[kind][1])}
        columns = {kind: x if kind in texts else torch.as_tensor(x) for kind, (_, x) in found.items()}
        rows = _rows(found, columns)
        mask = columns["mask"] > 0 if "mask" in columns else None
        numbers: dict[str, Any] = {}
        if mask is not None:
            numbers["length"] = mask.sum(1).double().mean()
        if "tokens" in columns:
            numbers |= _of_tokens(columns["tokens"], mask, end_token)
        for kind in ("trainer", "entropy"):
            if kind in columns:
                numbers["logprob" if kind == "trainer" else kind] = _mean(columns[kind], mask)
        if "trainer" in columns and "engine" in columns:
            numbers |= _of_weights(columns["trainer"], columns["engine"], mask)
        groups = _groups(columns, rows, group_size)
        if groups is not None and "tokens" in columns:
            numbers["alike"] = _alike(columns["tokens"], mask, groups)
        numbers |= _of_rewards(columns, groups)
    return numbers


def _found(batch: Mapping[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return kind → name and value of what the batch has."""
    found: dict[str, tuple[str, Any]] = {}
    for kind, names in OF_A_BATCH.items():
        given = next((name for name in names if name in batch and batch[name] is not None), None)
        if given is not None:
            found[kind] = given, batch[given]
    if not found:
        hint = did_you_mean("rewards", list(batch))
        raise UsageError(
            f"the batch has no name that is known{hint}: it has {and_more(sorted(map(str, batch)), shown=12)}; "
            "give tokens, mask, rewards, advantages, prompts, trainer_logprobs, engine_logprobs or entropy"
        )
    return found


def _rows(found: Mapping[str, tuple[str, Any]], columns: Mapping[str, Any]) -> int:
    """Return the number of rollouts. Raises UsageError where columns do not agree about it."""
    single = [found[kind][0] for kind, x in columns.items() if getattr(x, "ndim", 1) == 0]
    if single:
        raise UsageError(f"{and_more(single)} of the batch is one number: give one for each rollout, [rollouts, …]")
    sizes = {found[kind][0]: len(x) for kind, x in columns.items()}
    if len(set(sizes.values())) > 1:
        raise UsageError(f"the columns of the batch have different numbers of rollouts: {sizes}")
    wide = {found[kind][0]: tuple(columns[kind].shape) for kind in ("tokens", "mask", "trainer", "engine") if kind in columns}
    if any(len(shape) != 2 for shape in wide.values()) or len(set(wide.values())) > 1:
        raise UsageError(f"the tokens of the batch have different shapes, and all must be [rollouts, length]: {wide}")
    return next(iter(sizes.values()))


def _mean(x: Any, mask: Any) -> Any:
    """Return the mean over the counted tokens; over all without a mask."""
    if mask is None or mask.shape != x.shape:
        return x.double().mean()
    return x.double().masked_fill(~mask, 0.0).sum() / mask.sum().clamp(min=1)


def _of_tokens(tokens: Any, mask: Any, end_token: int | Sequence[int] | None) -> dict[str, Any]:
    """Return the share of n-grams that came before in their response, of responses that end, and what is counted behind."""
    import torch

    counted = mask if mask is not None else torch.ones_like(tokens, dtype=torch.bool)
    numbers: dict[str, Any] = {}
    if tokens.shape[1] > SPAN:
        grams = _hashed(tokens.unfold(1, SPAN, 1))
        whole = counted.unfold(1, SPAN, 1).all(-1)
        # each n-gram that does not count is unlike all others
        unlike = -1 - torch.arange(grams.shape[1], device=grams.device).expand_as(grams)
        ordered = torch.where(whole, grams & (2**62 - 1), unlike).sort(1).values
        again = ((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)).sum(1)
        numbers["repeated"] = again.sum() / whole.sum().clamp(min=1)
    if end_token is not None:
        ends = torch.isin(tokens, torch.as_tensor(end_token, device=tokens.device).reshape(-1))
        behind = ends.cumsum(1) - ends.long() > 0
        numbers["ended"] = (ends & counted).any(1).double().mean()
        if mask is not None:
            numbers["behind_end"] = (behind & counted).sum().double()
    return numbers


def _hashed(x: Any) -> Any:
    """Return a 64-bit hash of the last axis of whole numbers."""
    import torch

    found = torch.zeros(x.shape[:-1], dtype=torch.int64, device=x.device)
    for i in range(x.shape[-1]):
        found = (found ^ (found >> 29)) * 6364136223846793005 + (x[..., i].long() + 1) * 2862933555777941757
    return found


def _of_weights(trainer: Any, engine: Any, mask: Any) -> dict[str, Any]:
    """Return the gap and the importance weights before any clamp: the largest of a token, and the effective sample size."""
    import torch

    log_ratio = (trainer - engine).double()
    usable = torch.isfinite(log_ratio) & (mask if mask is not None else True)
    count = usable.sum().clamp(min=1)
    log_ratio = log_ratio.masked_fill(~usable, 0.0)
    weight = log_ratio.exp().masked_fill(~usable, 0.0)
    return {
        "gap": log_ratio.abs().sum() / count,
        "weight_max": weight.max(),
        "effective_share": weight.sum() ** 2 / (weight**2).sum().clamp(min=1e-300) / count,
    }


def _groups(columns: Mapping[str, Any], rows: int, group_size: int | None) -> Any:
    """Return the number of each rollout's group, [n], below n; None where it is not known."""
    import torch

    given = columns.get("groups", columns.get("prompts"))
    if _is_text(given):
        numbers: dict[str, int] = {}
        keys = [str(each.tolist() if hasattr(each, "tolist") else each) for each in given]
        return torch.tensor([numbers.setdefault(key, len(numbers)) for key in keys])
    if "groups" in columns:
        key = given.reshape(rows, -1)[:, 0].long()
    elif "prompts" in columns and columns["prompts"].dim() == 2:
        key = _hashed(columns["prompts"])
    elif group_size is not None:
        return torch.arange(rows) // group_size
    else:
        return None
    ordered, order = key.sort()
    number = torch.cat([ordered.new_zeros(1), (ordered[1:] != ordered[:-1]).long()]).cumsum(0)
    return torch.empty_like(number).scatter_(0, order, number)


def _is_text(column: Any) -> bool:
    """Return whether a column is of texts or other objects, such as lists of tokens."""
    return getattr(getattr(column, "dtype", None), "kind", None) in ("O", "U", "S") or isinstance(column, list | tuple)


def _alike(tokens: Any, mask: Any, groups: Any) -> Any:
    """Return the share of rollouts whose counted tokens are those of another rollout of their group."""
    import torch

    counted = tokens if mask is None else tokens.masked_fill(~mask, -1)
    key = _hashed(torch.cat([counted, groups.to(tokens.device)[:, None]], 1))
    same = key[:, None] == key[None, :]
    return ((same.sum(1) > 1) & (counted >= 0).any(1)).double().mean()


def _of_rewards(columns: Mapping[str, Any], groups: Any) -> dict[str, Any]:
    """Return how rewards and advantages vary, over all and within groups."""
    import torch

    numbers: dict[str, Any] = {}
    rewards = columns.get("rewards")
    advantages = columns.get("advantages")
    if rewards is not None:
        rewards = rewards.double().reshape(len(rewards), -1).sum(1)
        numbers |= {"reward": rewards.mean(), "reward_spread": rewards.std(unbiased=False)}
    if advantages is not None:
        advantages = _of_rows(advantages.double(), columns.get("mask"))
        numbers["advantage"] = (advantages**2).mean().sqrt()
    if groups is None or rewards is None:
        return numbers
    groups = groups.to(rewards.device)
    pair = (groups[:, None] == groups[None, :]) & ~torch.eye(len(groups), dtype=torch.bool, device=groups.device)
    near = EQUAL * (1 + rewards.abs())
    higher = pair & (rewards[:, None] - rewards[None, :] > near[:, None])
    varied = higher.any(1) | higher.any(0)  # rollouts with a rollout of another reward beside them
    in_group = pair.any(1)
    in_varied = (pair & varied[None, :]).any(1) | varied
    flat = in_group & ~in_varied
    numbers["flat_groups"] = flat.sum() / in_group.sum().clamp(min=1)
    if advantages is None:
        return numbers
    norm = numbers["advantage"].clamp(min=1e-30)
    means = (pair.double() @ advantages + advantages) / (pair.sum(1) + 1)
    numbers["off_centre"] = means.masked_fill(~in_varied, 0.0).abs().max() / norm
    numbers |= {name: x / norm for name, x in _off_blocks(advantages).items()}
    unlike = higher & (advantages[:, None] < advantages[None, :] - 1e-3 * norm)
    numbers["against_reward"] = unlike.sum() / higher.sum().clamp(min=1)
    differ = (pair & flat[:, None] & (rewards[:, None] != rewards[None, :])).any(1)
    same = ~(pair & (advantages[:, None] != advantages[None, :])).any(1)
    numbers["at_equal_rewards"] = advantages.abs().masked_fill(~(flat & (differ | same)), 0.0).max()
    return numbers


def _off_blocks(advantages: Any) -> dict[str, Any]:
    """Return the largest mean over equal blocks, at the blocks where it is least: neighbours, every k-th, shifted by one.

    Nothing of a number of rollouts that has no such blocks.
    """
    import torch

    n = len(advantages)
    sizes = [size for size in range(2, n // 2 + 1) if n % size == 0]
    tried = [
        blocks.mean(1).abs().max()
        for size in sizes
        for blocks in (
            advantages.view(-1, size),
            advantages.view(size, -1).T,
            advantages.roll(1).view(-1, size),
            advantages.roll(-1).view(-1, size),
        )
    ]
    return {"off_blocks": torch.stack(tried).min()} if tried else {}


def _of_rows(advantages: Any, mask: Any) -> Any:
    """Return one advantage for each rollout: of one for each token the mean over the counted tokens."""
    if advantages.dim() == 1:
        return advantages
    if mask is None or mask.shape != advantages.shape:
        return advantages.reshape(len(advantages), -1).mean(1)
    counted = mask > 0
    return advantages.masked_fill(~counted, 0.0).sum(1) / counted.sum(1).clamp(min=1)
