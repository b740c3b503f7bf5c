"""TRL's trainers that sample rollouts (GRPO, RLOO): each batch is noted as the series `rollout/*` of its step.

The callback of transformers calls this for a trainer that has TRL's methods. TRL itself is not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.integrations.session import Session

_SCORES, _SAMPLES = "_calculate_rewards", "_generate_and_score_completions"


def follow_rollouts(trainer: Any, session: Session) -> Callable[[], None]:
    """Note what a trainer samples while it trains; return what ends this. Does nothing for a trainer without rollouts."""
    if not (hasattr(trainer, _SCORES) and hasattr(trainer, _SAMPLES)):
        return lambda: None
    seen: dict[str, Any] = {}
    scores, samples = getattr(trainer, _SCORES), getattr(trainer, _SAMPLES)

    @wraps(scores)
    def calculate_rewards(*args: Any, **kwargs: Any) -> Any:
        seen["rewards"] = of_each = scores(*args, **kwargs)
        return of_each

    @wraps(samples)
    def generate_and_score_completions(*args: Any, **kwargs: Any) -> Any:
        batch = samples(*args, **kwargs)
        probe, of_each = session.probe, seen.pop("rewards", None)
        ended = generate_and_score_completions.ended  # type: ignore[attr-defined]
        if probe is not None and probe.tape is not None and trainer.model.training and not ended:
            probe.guard.run(_note, session, trainer, batch, of_each)
        return batch

    put = [Replaced(trainer, _SCORES, calculate_rewards), Replaced(trainer, _SAMPLES, generate_and_score_completions)]
    return lambda: [each.back() for each in put].clear()


def _note(session: Session, trainer: Any, batch: Any, of_each: Any) -> None:
    """Note one batch of this rank. of_each: [rollouts of all ranks, reward functions], NaN where one does not apply."""
    from trainprobe.rollout.health import note_rollout

    given = dict(batch)
    if of_each is not None:
        rank, rows = trainer.accelerator.process_index, len(batch["advantages"])
        weighed = of_each * trainer.reward_weights.to(of_each.device)
        rewards = weighed.nansum(1).masked_fill(of_each.isnan().all(1), float("nan"))
        given["rewards"] = rewards[rank * rows : (rank + 1) * rows]
    note_rollout(session, given, end_token=getattr(trainer, "eos_token_ids", None) or getattr(trainer, "eos_token_id", None))
