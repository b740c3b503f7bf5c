"""docs/messages.md holds the messages of the code as it is, and none of the words that nobody understands."""

from __future__ import annotations

import re

import pytest

from tests.messages_page import COMMAND, PAGE, page


def test_the_page_is_what_the_code_says():
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/messages.md is stale: {COMMAND} writes it anew"


def test_the_page_knows_every_rule_and_relation_and_a_line_of_each_kind():
    text = " ".join(page().split())
    assert {"**nonfinite**", "**ownership**", "**spike**"} <= set(re.findall(r"\*\*\w+\*\*", text))
    for said in ("nothing was written to disk", "further findings of {rule} are in the run's folder", "holds no run: {LACKS}"):
        assert said in text


@pytest.mark.parametrize("words", [r"\barose\b", r"\bthe two part\b", r"\bruns part\b", r"gradient is that of the whole batch"])
def test_words_that_were_mended_do_not_come_back(words):
    assert re.findall(words, page()) == []
