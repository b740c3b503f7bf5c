"""Numbers of things are written in one way everywhere."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

import trainprobe
from trainprobe.engine.core.words import counted, numbered, spans


@pytest.mark.parametrize(
    ("numbers", "text"),
    [
        ((), ""),
        ((4,), "4"),
        ((0, 1), "0, 1"),
        ((0, 1, 2, 3, 7), "0–3, 7"),
        ((0, 2, 4), "0, 2, 4"),
        ((0, 1, 2, 5, 7, 8, 9, 9), "0–2, 5, 7–9"),
    ],
)
def test_numbers_are_written_briefly_whatever_their_order(numbers, text):
    shuffled = list(numbers)
    random.Random(1).shuffle(shuffled)
    assert spans(shuffled) == text


def test_a_noun_is_singular_for_one_alone():
    assert [counted(n, "rank") for n in (0, 1, 4096)] == ["0 ranks", "1 rank", "4,096 ranks"]
    assert [numbered("step", numbers) for numbers in ([3], {7, 2, 1, 0})] == ["step 3", "steps 0–2, 7"]


def test_no_other_file_counts_in_words_by_itself():
    folder = Path(trainprobe.__file__).parent
    by_hand = re.compile(r"""\}? ?(rank|step|finding|call)\{'s?' if|['"]ranks?['"] if len|"s" if|\{what\}\{''""")
    assert not [
        f"{file.relative_to(folder)}: {found[0]}"
        for file in folder.rglob("*.py")
        if (found := by_hand.search(file.read_text(encoding="utf-8")))
    ]
