"""What a page says of a finding whose step was dumped: the line of this file, the class, the dump."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import trainprobe
from trainprobe.engine.core.records import Site
from trainprobe.monitor.report.page import render_page
from trainprobe.monitor.report.traces import dumps_of, trace_of
from trainprobe.monitor.report_command import view_of_run


class Net(nn.Module):
    """Its second layer is given one infinity where that is wanted."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return self.second(self.first(x) * factor)


def test_a_finding_leads_to_the_line_the_class_and_the_dump(tmp_path):
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainprobe.watch(model, optimizer, output=tmp_path, level="mix", step=[1, 2], monitor=True, console=False) as probe:
        for step in range(3):
            with probe.step():
                optimizer.zero_grad()
                model(torch.randn(8, 4), float("inf") if step == 2 else 1.0).square().mean().backward()
                optimizer.step()
    dumps = dumps_of(tmp_path)
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "self.second(self.first" in text)
    weight, module = Site("parameter", "second.weight", "value"), Site("module", "second", "output.0")
    assert trace_of(dumps, 1, 0, weight) == [("of class ", "Linear"), ("dump ", "step1/rank0")]
    told = dict(trace_of(dumps, 1, 0, module))
    assert told["in the code "].startswith(f"{__file__}:{line}: ") and told["of class "] == "Linear"
    assert trace_of(dumps, 0, 0, weight) == trace_of(dumps, 1, 7, weight) == trace_of(dumps, None, 0, None) == []
    page = render_page(view_of_run(tmp_path))
    assert "dump <code>step2/rank0</code>" in page and f"test_traces.py:{line}" in page


def test_a_folder_without_a_dump_and_a_dump_that_cannot_be_read_cost_nothing(tmp_path):
    site = Site("module", "second", "output.0")
    assert trace_of(dumps_of(tmp_path), 1, 0, site) == []
    dump = tmp_path / "step1" / "rank0"
    dump.mkdir(parents=True)
    (dump / "dump.json").write_text("{")
    assert trace_of({1: {0: dump}}, 1, 0, site) == [("dump ", "step1/rank0")]
