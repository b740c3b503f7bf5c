"""A mask of padding hides the padding.

Relation, for masks over the tokens [rows, time] that an embedding with `padding_idx` looked up (`key_padding_mask` of torch's
attention, where True hides), and for the `attention_mask` of a model whose `config` names its `pad_token_id` (where 0 hides):
not every row that has both padding and other tokens is hidden the wrong way round, all of its other tokens and none of its
padding. At least four such rows in a step. Tolerance none. Reported as a warning.
Usually caused by a mask that is True where a token is real, handed to torch's attention, for which True means hidden (pytorch
issue 39321), or by the reverse elsewhere: the model then sees padding only, and the loss falls all the same. A mask that is
made of the tokens for what it is given to cannot violate this.
"""

from __future__ import annotations

from trainprobe.engine.core.records import Finding
from trainprobe.monitor.audit.evidence import Evidence
from trainprobe.monitor.audit.facts.calls import GivenInputs

COST = frozenset({"host"})
OBSERVERS = frozenset({"module_inputs"})
STAGE = "data"
_FEWEST = 4


def check(evidence: Evidence) -> list[Finding]:
    """Find the first mask that is inverted in every row."""
    mask = next((m for m in evidence.of(GivenInputs).masks if m.inverted == m.rows >= _FEWEST), None)
    if mask is None:
        return []
    where = f"in each of the {mask.rows} rows that have both"
    text = f"{mask.argument} of {mask.name} hides all but the padding {where}: it is inverted"
    keeps = "1 where a token is real, 0 where it pads" if mask.argument == "attention_mask" else "True where a token pads"
    hint = f"invert the mask: it must be {keeps}"
    return [evidence.found(text, mask.name, "input", next=hint, measured=float(mask.inverted), expected=0.0, kind="module")]
