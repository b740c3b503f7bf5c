"""The lines of docs/run_log.md for Polars, pandas and Spark answer as the run was, each as it stands on the page."""

from __future__ import annotations

import ast
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.storage.sinks.collected_steps import plan_for
from trainprobe.engine.core.records import Call, Place, StepData, Value
from trainprobe.engine.stats.partials import PARTIALS
from trainprobe.engine.storage.sinks import parquet

PAGE = Path(__file__).resolve().parents[2] / "docs/run_log.md"
LINES = dict(re.findall(r"```python\n# (\w+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.S))
STEPS, RANKS = range(3), range(2)


def norm(step: int, rank: int) -> float:
    return 10.0 * step + rank + 1


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a run of two ranks and three steps into the folder in which the lines are run."""
    monkeypatch.chdir(tmp_path)
    for rank in RANKS:
        sink = parquet.open(tmp_path / "probe_out", plan_for(tmp_path, sinks=["parquet"]), Place(rank, len(RANKS)))
        for step in STEPS:
            values = [Value(0, "torch.float32", (4,)), Value(1, "torch.float32", (4,))]
            call = Call("state", "head.weight", 0, "optimizer", micro=0)
            call.params = {"grad": values[0], "value": values[1]}
            partials = np.zeros((2, len(PARTIALS)))
            partials[:, PARTIALS.index("count")] = 4
            partials[:, PARTIALS.index("sumsq")] = norm(step, rank) ** 2, 1e6
            about = ("pytorch", "off", "statistics", [call], values, partials)
            sink.write(StepData(step, Place(rank, len(RANKS)), *about, scalars={"loss": step / 2}))
        sink.close()


def answer(library: str, **given: Any) -> Any:
    """Run the lines of a library and return what the last of them is worth."""
    *before, last = ast.parse(LINES[library]).body
    assert isinstance(last, ast.Expr)
    names = dict(given)
    exec(compile(ast.Module(before, []), str(PAGE), "exec"), names)
    return eval(compile(ast.Expression(last.value), str(PAGE), "eval"), names)


def test_polars_reads_the_scalars(run: None) -> None:
    pytest.importorskip("polars", reason="run by `make test-queries`, in an environment of its own")
    assert sorted(answer("Polars").rows()) == sorted((step, "loss", step / 2) for step in STEPS for _ in RANKS)


def test_pandas_reads_the_norms_of_one_gradient(run: None) -> None:
    pytest.importorskip("pandas", reason="run by `make test-queries`, in an environment of its own")
    found = sorted(answer("pandas").itertuples(index=False, name=None))
    assert found == [(step, pytest.approx(norm(step, rank))) for step in STEPS for rank in RANKS]


def test_spark_reads_the_largest_gradient_of_each_step(run: None) -> None:
    sql = pytest.importorskip("pyspark.sql", reason="run by `make test-queries`, in an environment of its own")
    if shutil.which("java") is None:
        pytest.skip("Spark needs Java")
    spark = sql.SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    try:
        found = [tuple(row) for row in answer("Spark", spark=spark).collect()]
    finally:
        spark.stop()
    assert found == [(step, pytest.approx(norm(step, RANKS[-1]))) for step in STEPS]


def test_each_library_of_the_page_has_a_test() -> None:
    assert LINES.keys() == {"Polars", "pandas", "Spark"}
