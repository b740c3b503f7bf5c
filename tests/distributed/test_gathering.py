"""The audit's collective between real processes."""

from __future__ import annotations

from tests.distributed.launch import launch


def test_words_of_every_rank_reach_every_rank_and_no_thread_holds_them_afterwards(tmp_path):
    launch("gather_words.py", 2, folder=tmp_path)
