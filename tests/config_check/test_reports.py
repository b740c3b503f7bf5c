"""The reports say the sentence first, run nothing, and replace no file of anybody else."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest

from tests.config_check.made_packs import compare, pack, rank_pack, written
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.cli import main
from trainprobe.config_check.report import write_reports
from trainprobe.errors import MissingExtra, OutputError, UsageError

ALL = ["xlsx", "html", "json", "md"]
HARM = [
    "=1+1",
    "=cmd|' /C calc'!A0",
    "+1+1",
    "-1+1",
    "@SUM(1)",
    "\t=1",
    "<script>alert(1)</script>",
    "a|b\nc",
    "\x00\x07",
    "x" * 40_000,
]


def different():
    return compare(rank_pack(settings={"lr": 1e-4}), rank_pack(settings={"lr": 3e-4}))


def harmful():
    return compare(
        rank_pack(settings={f"{v[:20]}{i}": v for i, v in enumerate(HARM)}),
        rank_pack(settings={f"{v[:20]}{i}": "b" for i, v in enumerate(HARM)}),
    )


def test_the_first_cell_of_the_workbook_is_the_sentence_and_each_check_has_a_sheet(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    write_reports(different(), tmp_path, ["xlsx"])
    book = openpyxl.load_workbook(tmp_path / "result.xlsx")
    assert book["summary"]["A1"].value == "learning rate differs: 0.0001 and 0.0003"
    assert book.sheetnames == ["summary", "environment", "packages", "hyperparameters", "dataset", "weights", "randomness"]
    assert [c.value for c in book["hyperparameters"][2]] == [
        "arguments: argparse",
        "lr",
        "lr",
        "0.0001",
        "0.0003",
        "name",
        "0",
        "error",
    ]


def test_no_cell_is_a_formula_whatever_its_text(tmp_path):
    openpyxl = pytest.importorskip("openpyxl")
    write_reports(harmful(), tmp_path, ["xlsx"])
    book = openpyxl.load_workbook(tmp_path / "result.xlsx")
    cells = [cell for sheet in book for row in sheet.iter_rows() for cell in row if cell.value is not None]
    assert {cell.data_type for cell in cells} <= {"s", "n"}
    dangerous = [cell for cell in cells if isinstance(cell.value, str) and cell.value[0] in "=+-@\t\r"]
    assert len(dangerous) >= 6
    assert all(cell.quotePrefix for cell in dangerous)


def test_the_page_holds_no_markup_of_a_pack(tmp_path):
    write_reports(harmful(), tmp_path, ["html"])
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attributes: tags.append(tag)
    parser.feed((tmp_path / "result.html").read_text(encoding="utf-8"))
    assert tags.count("script") == 2, "the data and the program of the page"
    assert {"h1", "table"} <= set(tags)


@pytest.mark.slow
def test_a_browser_shows_what_a_pack_holds_as_text(tmp_path):
    browser = Browser(require_chromium())
    write_reports(harmful(), tmp_path, ["html"])
    try:
        browser.open(tmp_path / "result.html")
        assert "<script>alert(1)</script>" in browser.run("document.querySelector('main').innerText")
        assert browser.run("document.querySelectorAll('main script').length") == 0
        assert browser.run("document.querySelector('#summary .v-error').textContent") == "error"
        browser.run("(s => { s.value = '=cmd'; s.dispatchEvent(new Event('input')) })(document.getElementById('search'))")
        assert browser.run("document.querySelectorAll('main section:not([hidden]) tbody tr').length") == 6 + 1
        browser.resize(400, 800)
        assert browser.run("document.documentElement.scrollWidth") == 400
        assert browser.errors == []
    finally:
        browser.close()


CUT = """[...document.querySelectorAll('table tr > *, h1, p')].filter((cell) => cell.checkVisibility() && (
    cell.getBoundingClientRect().right > innerWidth || cell.scrollWidth > cell.clientWidth + 1
)).map((cell) => cell.textContent)"""


def test_ninety_weights_fit_a_phone_and_are_folded(tmp_path):
    names = [f"model.decoder.layers.{i}.self_attention.linear_query_key_value.lora_A.weight" for i in range(90)]
    a, b = (rank_pack(weights={name: [start, 2.0] for name in names}) for start in (1.0, 1.5))
    write_reports(compare(a, b), tmp_path, ["html"])
    browser = Browser(require_chromium(), 390, 844)
    try:
        browser.open(tmp_path / "result.html")
        assert browser.run(CUT) == []
        rows = "[...document.querySelectorAll('.differs tbody tr')].length"
        assert browser.run(rows) == 10
        assert browser.run("document.querySelector('.differs button.more').textContent") == "show 10 more of 80"
        browser.run("document.querySelector('.differs button.more').click()")
        assert browser.run(rows) == 20 and browser.run(CUT) == []
        cells = "[...document.querySelectorAll('.differs tbody tr:first-child td')]"
        labels = f"{cells}.map((cell) => [cell.dataset.label, cell.textContent])"
        assert ["weight", names[0]] in browser.run(labels)
        assert browser.errors == []
    finally:
        browser.close()


def test_the_page_loads_nothing_from_elsewhere(tmp_path):
    write_reports(different(), tmp_path, ["html"])
    assert not re.search(r"https?://|src=|@import|url\(", (tmp_path / "result.html").read_text(encoding="utf-8"))


def test_a_row_of_the_markdown_stays_one_row(tmp_path):
    write_reports(harmful(), tmp_path, ["md"])
    rows = [
        line for line in (tmp_path / "result.md").read_text(encoding="utf-8").splitlines() if line.startswith("| arguments")
    ]
    assert len(rows) == len(HARM)
    assert len({len(re.findall(r"(?<!\\)\|", row)) for row in rows}) == 1


def test_the_json_says_the_same(tmp_path):
    write_reports(different(), tmp_path, ["json"])
    read = json.loads((tmp_path / "result.json").read_text())
    assert (read["sentence"], read["exit_code"]) == ("learning rate differs: 0.0001 and 0.0003", 2)
    assert read["checks"]["hyperparameters"]["rows"][0]["cmp"] == "0.0003"
    assert read["checks"]["weights"]["verdict"] == "pass"


def test_other_files_in_the_folder_stay(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    write_reports(different(), tmp_path, ALL)
    write_reports(different(), tmp_path, ALL)
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["notes.txt", "result.html", "result.json", "result.md", "result.xlsx"]


@pytest.mark.parametrize("name", ALL)
def test_a_file_of_that_name_that_is_somebody_elses_is_not_replaced(tmp_path, name):
    (tmp_path / f"result.{name}").write_text("mine")
    with pytest.raises(OutputError, match="was not written by this tool"):
        write_reports(different(), tmp_path, ALL)
    assert [p.name for p in tmp_path.iterdir()] == [f"result.{name}"]
    assert (tmp_path / f"result.{name}").read_text() == "mine"


def test_an_unknown_format_is_refused_before_a_verdict_is_printed(tmp_path, capsys):
    pack = written(tmp_path, "a.zip")
    assert main(["config-check", "compare", str(pack), str(pack), "--format", "pdf"]) == 3
    said = capsys.readouterr()
    assert said.out == "" and "--format 'pdf' is not one" in said.err


def test_an_unknown_format_is_told_with_a_guess(tmp_path):
    with pytest.raises(UsageError, match="did you mean 'xlsx'"):
        write_reports(different(), tmp_path, ["xls"])


def test_without_openpyxl_the_message_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "openpyxl", None)
    with pytest.raises(MissingExtra, match=r"trainprobe\[xlsx\]"):
        write_reports(different(), tmp_path, ["xlsx"])


def test_rows_that_only_differ_in_rank_are_one_row(tmp_path):
    bench = pack(*(rank_pack(r) for r in range(8)))
    cmp = pack(*(rank_pack(r, weights={"fc.weight": [1.0, 3.0], "fc.bias": [0.5]}) for r in range(8)))
    write_reports(compare(bench, cmp), tmp_path, ["json"])
    rows = json.loads((tmp_path / "result.json").read_text())["checks"]["weights"]["rows"]
    assert [(row["rank"], row["level"]) for row in rows] == [("0–7", "error"), ("0–7", "pass")]


@pytest.mark.parametrize(
    ("other", "code"), [({}, 0), ({"NCCL_ALGO": "Tree"}, 1), ({"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring"}, 2)]
)
def test_the_exit_code_of_the_command_is_the_verdict(tmp_path, capsys, other, code):
    bench = written(tmp_path, "a.zip")
    cmp = written(tmp_path, "b.zip", environment={"variables": other or {"NCCL_ALGO": "Ring"}, "others": {}, "withheld": []})
    assert main(["config-check", "compare", str(bench), str(cmp), "-o", str(tmp_path / "out"), "--format", "json,md"]) == code
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["result.json", "result.md"]
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith(
        {0: "no difference found", 1: "NCCL_ALGO differs: Ring and Tree", 2: "CUBLAS_WORKSPACE_CONFIG differs"}[code]
    )


def test_the_first_line_is_whole_however_narrow_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    content = {"variables": {"CUBLAS_WORKSPACE_CONFIG": "[bold]:4096:8"}, "others": {}, "withheld": []}
    main(["config-check", "compare", str(written(tmp_path, "a.zip")), str(written(tmp_path, "b.zip", environment=content))])
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "CUBLAS_WORKSPACE_CONFIG differs: (not set) and [bold]:4096:8; NCCL_ALGO differs: Ring and (not set)"


def test_importing_the_package_imports_no_tensor_library():
    code = "import sys; from trainprobe import ConfigChecker; assert not {'torch', 'numpy', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_statistics_of_a_million_rows_are_cut_with_a_word(tmp_path, monkeypatch):
    openpyxl = pytest.importorskip("openpyxl")
    from trainprobe.config_check.report import spreadsheet

    monkeypatch.setattr(spreadsheet, "MOST_ROWS", 3)
    weights = {f"w{i}": [float(i)] for i in range(10)}
    write_reports(compare(rank_pack(weights=weights), rank_pack(weights=weights)), tmp_path, ["xlsx"])
    sheet = openpyxl.load_workbook(tmp_path / "result.xlsx")["weights"]
    assert [row[0].value for row in sheet.iter_rows()][-1] == "7 more rows were left out"
