"""The pages of messages hold what the code says, with examples that tests made; each sentence is short and in plain words."""

from __future__ import annotations

import re

from tests.messages_page import ALL, COMMAND, PAGE, all_texts, examples, page, words_of
from tests.test_first_lines import CASES as FIRST_LINES
from tests.test_first_lines import WITHOUT_A_VERDICT
from trainprobe.monitor.audit.relations import relation_names
from trainprobe.monitor.rules import rule_names

NAMES = (*rule_names(), *relation_names())
READ_IN_A_QUARTER = 3750  # words, of an hour: 250 a minute
LONGEST = 25  # words of a sentence
MENDED = (
    r"\barose\b", r"\bthe two part\b", r"\bruns part\b", r"gradient is that of the whole batch",
    r"\bown rounding\b(?! (?:\(limit |[\d.]+e))",
    r"\bof which\b",
    r"\bcame apart\b", r"\b(?:stands?|stood) (?:at|still|where)\b", r"\blies? in\b", r"\bas a whole one\b", r"\btook no part\b",
)  # fmt: skip


def said(name: str) -> list[str]:
    """Return the lines of the examples of a rule."""
    known = examples().get(name, {}).get("examples", [])
    return [line for example in known for line in (example["message"], example["next"]) if line]


def test_the_pages_are_what_the_code_and_the_examples_say():
    assert PAGE.read_text(encoding="utf-8") == page(), f"docs/messages.md is stale: {COMMAND} writes it anew"
    assert ALL.read_text(encoding="utf-8") == all_texts(), f"docs/all_messages.md is stale: {COMMAND} writes it anew"


def test_the_examples_are_of_the_words_that_the_code_has_now():
    stale = [name for name, known in examples().items() if known["words"] != words_of(name)]
    assert stale == [], f"{COMMAND} runs their tests anew"


def test_every_rule_and_relation_and_command_has_an_example():
    lacking = sorted({*NAMES, *(f"trainprobe {verb}" for verb in FIRST_LINES if verb not in WITHOUT_A_VERDICT)} - {*examples()})
    assert lacking == [], f"{COMMAND} tests/… runs tests that find it"


def test_a_person_can_read_the_page_in_a_quarter_of_an_hour():
    """Numbers are not counted, as in the length of a sentence."""
    assert sum(bool(re.search(r"[A-Za-z]", word)) for word in page().split()) <= READ_IN_A_QUARTER


def test_a_sentence_of_a_finding_has_at_most_25_words_and_a_finding_two_lines():
    """Numbers are not counted, nor is code. A finding is its message and what to do next, a line each."""
    long = []
    for line in (line for name in examples() for line in said(name)):
        assert "\n" not in line
        for sentence in re.split(r"(?<=[.?!])\s+", re.sub(r"`[^`]*`", "0", line)):
            words = [word for word in sentence.split() if re.search(r"[A-Za-z]", word)]
            long += [sentence] if len(words) > LONGEST else []
    assert long == []


def test_the_texts_have_every_rule_and_relation_and_a_line_of_each_kind():
    text = " ".join(all_texts().split())
    assert {"**nonfinite**", "**ownership**", "**spike**"} <= set(re.findall(r"\*\*\w+\*\*", text))
    for line in ("nothing was written to disk", "further findings of {rule} are in the run's folder", "holds no run: {LACKS}"):
        assert line in text


def test_words_that_were_mended_do_not_come_back():
    text = "\n".join([page(), all_texts(), *(line for name in NAMES for line in said(name))])
    assert [words for words in MENDED if re.search(words, text)] == []
