"""The table of columns in docs/run_log.md is that of the schema, and its queries are answered."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.engine.storage.sinks.collected_steps import plan_for, small_step
from trainprobe.engine.core.records import Finding, Place
from trainprobe.engine.storage.run_log.schema import COLUMNS
from trainprobe.engine.storage.writer import open_writer

PAGE = Path(__file__).resolve().parents[4] / "docs/run_log.md"


def table() -> str:
    rows = [f"| `{name}` | {kind} | {text} |" for name, (kind, text) in COLUMNS.items()]
    return "\n".join(["| column | type | what |", "|---|---|---|", *rows]).replace(
        "dictionary<values=string, indices=int32, ordered=0>", "string"
    )


def test_the_columns_of_the_page_are_those_of_the_schema():
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(r"<!-- made from .*? -->\n(.*?)\n<!-- end of the columns -->", text, re.S)
    assert found is not None
    assert found[1] == table(), f"put this table there:\n{table()}"


QUERIES = re.search(r"```sql\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S)[1].split(";")[:-1]  # pyright: ignore


@pytest.mark.parametrize("number", range(len(QUERIES)))
def test_the_queries_of_the_page_are_answered(number, tmp_path):
    duckdb = pytest.importorskip("duckdb", reason="requirements/oldest.txt is without DuckDB")
    writer = open_writer(plan_for(tmp_path / "probe_out", sinks=["parquet"]), Place())
    writer.submit(small_step(4))
    for count in (1, 3):
        writer.submit_findings([Finding("spike", "warning", "the loss spiked", step=4, count=count)])
    writer.close()
    query = (
        QUERIES[number].replace("probe_out", str(tmp_path / "probe_out")).replace("layers.17.mlp.up.weight", "layers.0.weight")
    )
    answer = duckdb.sql(query.replace(" and micro is null", "")).fetchall()
    expected = {
        1: [(4, 0, 6, "backward", "op", "Functional.linear", "grad_output.0")],
        2: [(4, 0.5)],
        3: [(4, 0.5)],
        4: [("spike", "warning", 4, "the loss spiked", 3)],
    }
    assert answer == expected.get(number, answer)
    assert len(answer) == 1
    if number == 5:
        assert answer[0][1:] == (5, 1)
