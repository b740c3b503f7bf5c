"""The audit's collective between real processes."""

from __future__ import annotations

from pathlib import Path

from tests.distributed.launch import launch


def test_words_of_every_rank_reach_every_rank_and_no_thread_holds_them_afterwards():
    launch(Path(__file__).with_name("gather_words.py"), 2)
