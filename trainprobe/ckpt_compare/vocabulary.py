"""Which rows at the end of a vocabulary are padding, by what the checkpoints say of themselves and by nothing else.

Megatron pads a vocabulary to a multiple of `make_vocab_size_divisible_by` × tensor parallel size
(`megatron.training.tokenizer`, `vocab_size_with_padding`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def padding_reason(fewer: int, more: int, config_fewer: Mapping[str, Any], config_more: Mapping[str, Any]) -> str | None:
    """Say why rows fewer … more−1 of the side that has more are padding; None where no metadata says so.

    config_*: `vocab` (entries of the vocabulary) and `vocab_multiple` (what it is padded to) of each side, where known.
    """
    for config in (config_more, config_fewer):
        entries = int(config.get("vocab") or 0)
        if 0 < entries <= fewer:
            return f"the vocabulary has {entries} entries"
    multiple = int(config_more.get("vocab_multiple") or 0)
    # some vocabulary of at most `fewer` entries, and of more than more − multiple, is padded to `more` rows
    if multiple and more % multiple == 0 and fewer > more - multiple:
        return f"padded to a multiple of {multiple}"
    return None
