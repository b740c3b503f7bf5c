"""`anomaly_detected/rank{R}/anomaly.json` of mindstudio-probe's monitor, which its `anomaly_processor` sorts.

An entry for each finding of the rules that its `alert` section can name, and for each value that the finding is about. A value
that stays wrong has one entry, at the first step at which it was seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainprobe.engine.core.records import Finding, Place, Site, StepData
from trainprobe.engine.plan.model import Plan
from trainprobe.engine.storage.safe_files import write_whole

RULES = {"mean_deviation": "AnomalyTurbulence", "nonfinite": "AnomalyNan", "threshold": "AnomalyNan"}
_PARAMETER = {"grad": "post_grad", "grad_unreduced": "pre_grad", "value": "param_origin", "value_after": "param_updated"}


class MsprobeAnomaly:
    """Writes that file anew whenever something was found."""

    def __init__(self, path: Path, place: Place) -> None:
        self._path = path
        self._place = place
        self._entries: dict[str, dict[str, Any]] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        self._write()

    def write(self, step_data: StepData) -> None:
        """Do nothing: the file holds findings."""

    def findings(self, findings: Sequence[Finding]) -> None:
        """Add findings of the rules that stand in `RULES`."""
        found = [finding for finding in findings if finding.rule in RULES and finding.site is not None]
        for finding in found:
            self._add(finding)
        if found:
            self._write()

    def _add(self, finding: Finding) -> None:
        assert finding.site is not None
        for name in finding.names or (finding.site.name,):
            tag, call, step = self._tag(finding.site, name), len(self._entries), finding.step or 0
            rank, axes = self._place.rank, self._place.axes
            self._entries[f"{tag}_step_{step}_call_{call}"] = {
                **{"rank": rank, "step": step, "micro_step": 0},
                **{"pp_stage": axes.get("pp", (0, 1))[0], "vpp_stage": axes.get("vpp", (0, 1))[0]},
                **{"call_id": call, "tag_name": tag, "group_mates": [rank]},
                "message": f"Rule {RULES[finding.rule]} reports anomaly signal in {tag} at step {step}: {finding.message}",
            }

    def _tag(self, site: Site, name: str) -> str:
        """Return a value's tag as that tool writes it: `0:embed.input:0/rank0/actv`."""
        first, _, rest = site.slot.partition(".")
        if site.kind == "parameter":
            kind = _PARAMETER.get(first, first)
        elif site.kind == "scalar":
            kind = "actv"
        else:
            kind = "actv_grad" if first.startswith("grad") else "actv"
            name = f"{name}.{first.removeprefix('grad_')}{f':{rest}' if rest else ''}"
        return f"{self._place.axes.get('vpp', (0, 1))[0]}:{name}/rank{self._place.rank}/{kind}"

    def _write(self) -> None:
        write_whole(self._path, json.dumps(self._entries, indent=1).encode())

    def close(self) -> None:
        """Do nothing: the file is whole after each finding."""


def open(folder: Path, plan: Plan, place: Place) -> MsprobeAnomaly:
    """Open the file of one rank."""
    return MsprobeAnomaly(folder / f"anomaly_detected/rank{place.rank}/anomaly.json", place)
