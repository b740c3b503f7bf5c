"""Memory that a call is handed to be written is no input: what it holds before has a note, and no statistics."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch.nn import functional

import trainprobe
from trainprobe.cli import main
from trainprobe.engine.core.records import NOT_WRITTEN


def gathered(x):
    """Rows of a padded batch, as a collate function puts them together."""
    batch = torch.empty(3, 4)
    for row in range(3):
        batch[row] = x[row]
    return batch.view(12)


def cached(x):
    cache = x.new_empty(2, 3, 4)
    cache[0].copy_(x)
    cache.select(0, 1).copy_(2 * x)
    return cache.reshape(6, 4) + 1


def dropped(x):
    return x * torch.empty_like(x).bernoulli_(0.5, generator=torch.Generator().manual_seed(0))


def by_out(x):
    into, lower = torch.empty(3, 4), torch.empty(3, 1)
    torch.mul(x, 3, out=into)
    torch.min(into, 1, keepdim=True, out=(lower, torch.empty(3, 1, dtype=torch.int64)))
    return into - lower


def grown(x):
    """As FSDP2 takes and frees the memory of whole parameters."""
    whole = torch.ones(12)
    whole.untyped_storage().resize_(0)
    whole.untyped_storage().resize_(48)
    rows = whole.view(3, 4)
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(rows):
        torch.add(x, 1, out=rows)
    return rows.view(4, 3) * 2


USES = [gathered, cached, dropped, by_out, grown]


def recorded(folder, use, level="L1", **plan):
    """Record one call. What torch.empty hands out is NaN here, and what a storage grows by is as it was."""
    torch.use_deterministic_algorithms(True)  # fills new memory
    try:
        with trainprobe.watch(torch.nn.Identity(), output=folder, level=level, step=[0], on_error="raise", **plan) as probe:
            probe.begin_step()
            result = use(torch.arange(12.0).view(3, 4))
            step = probe.end_step()
    finally:
        torch.use_deterministic_algorithms(False)
    return result, step


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("native", [True, False])
def test_no_statistic_is_of_memory_that_nobody_has_written(use, native, tmp_path):
    result, step = recorded(tmp_path / "out", use, native=native)
    assert torch.equal(result, use(torch.arange(12.0).view(3, 4)))  # nothing is changed
    assert not [record for record in step.records() if record.values.get("nan") or math.isnan(record.values.get("max", 0.0))]
    assert use is dropped or [record for record in step.records() if record.note == NOT_WRITTEN]
    last = step.calls[-1]
    numbers = step.numbers()["max"]
    assert numbers[(last.out[0] if isinstance(last.out, list) else last.out).row] == result.max().item()


@pytest.mark.parametrize("sink", ["dump", "parquet", "jsonl"])
def test_no_file_holds_what_was_there_before(sink, tmp_path):
    recorded(tmp_path / "out", cached, sinks=[sink], summary="both")
    if sink == "parquet":
        import pyarrow.parquet as pq

        rows = [row for path in (tmp_path / "out").rglob("*.parquet") for row in pq.read_table(path).to_pylist()]
        assert rows
        assert [row for row in rows if row.get("note") == NOT_WRITTEN]
        assert not [row for row in rows if isinstance(row.get("max"), float) and math.isnan(row["max"])]
        return
    text = "".join(path.read_text() for path in (tmp_path / "out").rglob("*.json*") if path.is_file())
    assert "aten" in text.lower() or "Tensor.copy_" in text
    assert "NaN" not in text
    assert NOT_WRITTEN in text or sink == "jsonl"


def test_a_call_keeps_the_keys_of_what_it_is_handed(tmp_path):
    recorded(tmp_path / "out", by_out)
    data = json.loads((tmp_path / "out" / "step0" / "rank0" / "dump.json").read_text())["data"]
    call = data["Torch.mul.0.forward"]
    assert call["input_kwargs"]["out"]["shape"] == [3, 4]
    assert call["input_kwargs"]["out"]["note"] == NOT_WRITTEN
    assert call["output"][0]["Max"] == 33.0
    assert data["Torch.min.0.forward"]["input_kwargs"]["out"][0]["note"] == NOT_WRITTEN


def test_what_is_computed_of_memory_that_nobody_has_written_is_shown(tmp_path):
    _, step = recorded(tmp_path / "out", lambda x: torch.empty(3, 4).add(x))
    shown = [record for record in step.records() if record.site.name == "Tensor.add"]
    assert [math.isnan(record.values["max"]) for record in shown] == [True, False, True]


def test_memory_that_a_kernel_has_filled_without_a_trace_is_shown_as_soon_as_it_is_used(tmp_path):
    def kernel(x):
        made = torch.empty(3, 4)
        made.untyped_storage().copy_(x.untyped_storage())  # as a kernel that takes addresses
        return functional.relu(made.view(4, 3)) + 1

    result, step = recorded(tmp_path / "out", kernel)
    shown = {(record.site.name, record.site.slot): record for record in step.records()}
    assert shown["Tensor.view", "output"].note == NOT_WRITTEN  # nothing has told of the kernel
    assert shown["Functional.relu", "input.0"].values["max"] == 11.0 == result.max().item() - 1


def test_a_module_is_shown_what_it_is_given(tmp_path):
    model = torch.nn.Linear(4, 2)
    with trainprobe.watch(model, output=tmp_path, level="mix", step=[0], on_error="raise") as probe:
        probe.begin_step()
        model(torch.empty(3, 4).untyped_storage().fill_(0) and torch.empty(3, 4).fill_(2.0))
        step = probe.end_step()
    (given,) = [r for r in step.records() if r.site.kind == "module" and r.site.slot == "input.0" and r.step.phase == "forward"]
    assert given.values["max"] == 2.0


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("summary", ["statistics", "both"])
def test_two_equal_runs_are_equal_whatever_memory_held_before(use, summary, tmp_path):
    recorded(tmp_path / "a", use, summary=summary)
    with trainprobe.watch(torch.nn.Identity(), output=tmp_path / "b", level="L1", step=[0], summary=summary) as probe:
        probe.begin_step()
        use(torch.arange(12.0).view(3, 4))
        probe.end_step()
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 0


@pytest.mark.parametrize("use", USES)
def test_what_is_written_there_is_compared(use, tmp_path):
    recorded(tmp_path / "a", use, summary="both")
    recorded(tmp_path / "b", lambda x: use(x * torch.tensor([1.0, 1.0, 1.1, 1.0])), summary="both")
    assert main(["dump-compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
