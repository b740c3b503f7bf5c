"""No hook is registered twice on one parameter or module.

Relation: no function stands more than once among the hooks of a parameter (`register_hook`,
`register_post_accumulate_grad_hook`) or, of those that return something, of a module. Two functions made by the same lines over
the same objects are one. Tolerance none. Usually caused by set-up code that runs again after a resume, a new phase or an
evaluation: a hook that scales, masks or reduces gradients then does so twice, and nothing else looks wrong.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.engine.core.words import and_more
from trainprobe.monitor.audit.evidence import Evidence

COST = frozenset({"host"})
OBSERVERS: frozenset[str] = frozenset()
STAGE = "backward"
PYTORCH_ONLY = "hooks are compiled with a cell, and the tool does not read them"


def check(evidence: Evidence) -> list[Finding]:
    """Find hooks that are registered twice."""
    hooked = evidence.model.hooked
    if not hooked:
        return []
    name, function = hooked[0]
    known = {alias: p.name for p in evidence.model.parameters for alias in p.names}
    names = [one for one, _ in hooked]
    text = f"the hook {function} is registered more than once on {and_more(names)}: its effect is applied twice"
    hint = "keep the handle that register_hook returns, and remove() it before the hook is registered again"
    return [
        evidence.found(
            text,
            known.get(name, name),
            "grad" if name in known else "output",
            next=hint,
            measured="registered again",
            expected="once",
            kind="parameter" if name in known else "module",
            names=[known.get(one, one) for one in names],
        )
    ]
