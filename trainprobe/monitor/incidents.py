"""One incident, one finding: what rules find of a training that has left its course is told once, until it is back.

The rules of `FAMILY` see the same event from different sides, and one after the other: a rate that jumps, the loss that
follows, levels that stay away, updates that are too large. The finding of the first place, in the first step, is the
incident's. What they find while it lasts, and for `CALM` collected steps after, is counted as that finding and not told again,
unless it is graver, or does something that the first did not (an action that only its rule has).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.rules import RuleOptions

FAMILY = frozenset({"spike", "drift", "blow_up", "update_ratio", "flow"})
CALM = 16
_GRAVITY = {"info": 0, "warning": 1, "error": 2}


class Incident:
    """What goes on in one rank.

    gravity: of what was told, -1 where nothing goes on. calm: collected steps since it held. told: as it was counted last.
    """

    def __init__(self) -> None:
        self.gravity, self.calm = -1, 0
        self.actions: frozenset[str] = frozenset()
        self.told: list[Finding] = []

    def fold(
        self,
        fresh: Sequence[Finding],
        lasts: bool,
        step: int,
        rules: Mapping[str, RuleOptions],
        count: Callable[[list[Finding], int], list[Finding]],
        order: Callable[[Sequence[Finding]], list[Finding]],
    ) -> list[Finding]:
        """Return what is to be told of the findings of a step. lasts: whether what was found before still holds."""
        kin = [finding for finding in fresh if finding.rule in FAMILY]
        if self.gravity >= 0 and (kin or lasts) and self.told:
            self.told = count(self.told, step)
        self.calm = 0 if kin or lasts else self.calm + 1
        if self.calm > CALM:
            self.gravity, self.actions, self.told = -1, frozenset(), []
        fresh_ones: list[Finding] = []
        for finding in order(kin):
            actions = frozenset(rules[finding.rule].actions)
            if _GRAVITY[finding.severity] > self.gravity or actions - self.actions:
                fresh_ones.append(finding)
                self.gravity, self.actions = max(self.gravity, _GRAVITY[finding.severity]), self.actions | actions
        self.told = fresh_ones or self.told
        return [finding for finding in fresh if finding.rule not in FAMILY or finding in fresh_ones]

    def state(self) -> dict[str, object]:
        """Return what is to be remembered over a restart, as JSON values."""
        return {"gravity": self.gravity, "calm": self.calm, "actions": sorted(self.actions)}

    def restore(self, state: Mapping[str, object]) -> None:
        """Go on from what `state` returned."""
        gravity, calm, actions = state.get("gravity"), state.get("calm"), state.get("actions")
        if isinstance(gravity, int) and isinstance(calm, int) and isinstance(actions, Collection):
            self.gravity, self.calm, self.actions = gravity, calm, frozenset(map(str, actions))
