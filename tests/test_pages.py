"""The HTML pages share one template: colours, data, headings and tables are written once, and a verdict has one colour."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trainprobe.dump_compare.page.document import VERDICTS
from trainprobe.engine.storage.html_page import make_page, shared
from trainprobe.monitor.fleet.page import STATES
from trainprobe.op_check.judge import OUTCOMES

PACKAGE = Path(__file__).parents[1] / "trainprobe"
SHARED = PACKAGE / "engine/storage/html_page"
OWN = sorted(
    path
    for path in PACKAGE.rglob("*")
    if path.suffix in (".html", ".css", ".js") and SHARED not in path.parents and "__pycache__" not in path.parts
)
RULES = shared("page.css").read_text(encoding="utf-8")
CONFIG_CHECK, CKPT_COMPARE = ("pass", "note", "warning", "error", "not captured"), ("identical", "rounding", "differ", "shape")


def test_there_are_pages_to_look_at():
    assert {"body.html", "page.html", "main.js", "fleet.js", "page.js", "style.css"} <= {path.name for path in OWN}


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.relative_to(PACKAGE).as_posix())
def test_a_page_adds_only_what_is_its_own(path):
    text = path.read_text(encoding="utf-8")
    again = r"<!doctype|<head|DecompressionStream|JSON\.parse|createElement\(\"(?:table|tr|td)|matchMedia\(\"\(prefers-color"
    assert re.findall(again, text) == []
    defined = set(re.findall(r"(--[a-z]+):", RULES))
    assert defined & set(re.findall(r"(--[a-z]+):", text)) == set(), "a colour of all pages is another one here"


@pytest.mark.parametrize("name", sorted({*VERDICTS, *OUTCOMES, *CONFIG_CHECK, *CKPT_COMPARE}))
def test_every_verdict_has_its_colour_in_the_shared_rules(name):
    assert re.search(rf"\.v-{name.replace(' ', '-')}[ ,][^}}]*--tone: ", RULES), name


def test_the_states_of_a_fleet_have_colours_of_the_shared_rules():
    assert {colour for _, colour in STATES} - set(re.findall(r"(--[a-z]+):", RULES)) == {"--calm", "--unseen"}


def test_text_in_the_data_of_a_page_is_no_markup():
    page = make_page("<b>", "report", [], {"name": "</script><script>alert(1)</script>"})
    assert "<title>&lt;b&gt; · trainprobe</title>" in page
    assert page.count("<script") == 2
