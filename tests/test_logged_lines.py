"""What is printed also goes to the logger `trainprobe`, and a terminal shows each line once."""

from __future__ import annotations

import json
import logging
import logging.handlers
import queue
import sys

import pytest
import torch

import trainprobe
from trainprobe.engine.core.log_lines import say

LOGGER = logging.getLogger("trainprobe")


@pytest.fixture
def handler():
    """Return what puts a handler on the root logger, or another, and takes it off behind the test."""
    put = []

    def add(new, level=logging.INFO, logger=LOGGER):
        put.append((logger, new, logger.level))
        logger.addHandler(new)
        logger.setLevel(level)
        return new

    yield add
    for logger, one, level in reversed(put):
        logger.removeHandler(one)
        logger.setLevel(level)


def train(folder):
    """Train four steps of which one has a NaN in its batch."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with trainprobe.watch(model, optimizer, output=folder, level="off", monitor=True) as probe:
        for i in range(4):
            with probe.step():
                loss = model(torch.full((2, 3), float("nan") if i == 2 else 1.0)).square().mean()
                loss.backward()
                optimizer.step()


class Keeps(logging.Handler):
    """Keeps records."""

    def __init__(self):
        super().__init__()
        self.records = []

    def emit(self, record):
        self.records.append(record)


def test_every_line_is_logged_by_its_severity_and_printed_as_well_where_no_handler_prints(tmp_path, capsys, handler):
    kept = handler(Keeps())
    train(tmp_path / "out")
    printed = capsys.readouterr().err.splitlines()
    assert [r.levelname for r in kept.records] == ["INFO", "ERROR", "INFO"]
    start, found, then, end = (line.removeprefix("trainprobe: ").strip() for line in printed)
    assert [r.getMessage() for r in kept.records] == [start, f"{found}; {then}", end]
    assert kept.records[1].finding.rule == "nonfinite"


@pytest.mark.parametrize("stream", ["stderr", "stdout"])
def test_a_handler_that_prints_shows_each_line_once(tmp_path, capsys, handler, stream):
    new = handler(logging.StreamHandler(getattr(sys, stream)))
    new.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    train(tmp_path / "out")
    both = capsys.readouterr()
    assert [line.split()[0] for line in getattr(both, f"{'out' if stream == 'stdout' else 'err'}").splitlines()] == [
        "INFO",
        "ERROR",
        "INFO",
    ]
    assert "trainprobe:" not in both.out + both.err


def test_what_the_level_of_a_printing_handler_leaves_out_is_printed(capsys, handler):
    handler(logging.StreamHandler(sys.stderr)).setLevel(logging.WARNING)
    say("a note")
    say("a warning", severity="warning")
    assert capsys.readouterr().err == "trainprobe: a note\na warning\n"


def test_a_queue_and_a_formatter_of_json_get_what_structured_logging_needs(tmp_path, handler):
    class AsJson(logging.Formatter):
        def format(self, record):
            about = getattr(record, "finding", None)
            rule = None if about is None else about.rule
            return json.dumps({"event": record.getMessage(), "level": record.levelname, "rule": rule})

    waiting: queue.Queue = queue.Queue()
    handler(logging.handlers.QueueHandler(waiting)).setFormatter(AsJson())
    train(tmp_path / "out")
    events = [json.loads(waiting.get_nowait().getMessage()) for _ in range(waiting.qsize())]
    assert [(event["level"], event["rule"]) for event in events] == [("INFO", None), ("ERROR", "nonfinite"), ("INFO", None)]


def test_where_nobody_logs_nothing_is_printed_twice(capfd, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    say("a warning", severity="warning")
    assert capfd.readouterr().err == "trainprobe: a warning\n"
