"""`trainprobe top RUN`: a live view of a run in the terminal, read from what the run writes."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np
import typer
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from trainprobe.engine.core.findings import place_in_words
from trainprobe.engine.core.records import Finding
from trainprobe.engine.storage.dumps.findings_file import read_findings
from trainprobe.engine.storage.dumps.log import read_lines
from trainprobe.engine.storage.dumps.record_log import decode
from trainprobe.engine.storage.left_out import damaged_as
from trainprobe.errors import MissingExtra
from trainprobe.monitor.findings import all_findings, exit_code
from trainprobe.monitor.frames import F64, Frame, Series, SeriesTable, frame_of_step
from trainprobe.monitor.history import History
from trainprobe.monitor.looked_at import LookedAt
from trainprobe.monitor.remote_run import as_given, origin, refresh, run_folder
from trainprobe.monitor.report.from_run import worst_offenders
from trainprobe.monitor.rules_of_run import left_out, rules_of_run
from trainprobe.monitor.run_folder import check_one_run, find_logs, read_frames
from trainprobe.monitor.scalar_names import role_of
from trainprobe.monitor.watcher import Watcher, unjudged

if TYPE_CHECKING:
    from trainprobe.monitor.frames_of_run_log import RunLog

SHOWN = 8  # findings
BARS = "▁▂▃▄▅▆▇█"
_COLOURS = {"error": "bold red", "warning": "yellow", "info": "cyan"}


class Tail:
    """Follows the record logs of a run: remembers how far each was read, and reads only whole lines."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._read: dict[Path, int] = {}
        self._tables: dict[Path, SeriesTable] = {}
        self._columns: dict[Path, RunLog] = {}

    def frames(self) -> list[Frame]:
        """Return the frames that were written since the last call."""
        found: list[Frame] = []
        logs = find_logs(self.folder)
        check_one_run(self.folder, logs)
        for log in logs:
            if log.is_dir():
                with damaged_as(f"the run log in {log}"):
                    found += self._of_columns(log).frames()
                continue
            table = self._tables.setdefault(log, SeriesTable())

            def taken(line: bytes, log: Path = log, table: SeriesTable = table) -> Frame:
                self._read[log] = self._read.get(log, 0) + len(line)
                return frame_of_step(decode(line), table)

            found += read_lines(log, taken, self._read.get(log, 0))
        return found

    def _of_columns(self, log: Path) -> RunLog:
        from trainprobe.monitor.frames_of_run_log import RunLog

        return self._columns.setdefault(log, RunLog(log))


class View:
    """What the terminal shows: series of every rank, and the findings: of the run itself, and of the rules applied here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.histories: dict[int, History] = {}
        self.judged: list[Finding] = []
        self._rules, self._left_out = rules_of_run(folder)
        self._watchers: dict[int, Watcher] = {}
        self._seen = LookedAt()
        self._tail = Tail(folder)
        self.code = 0  # 3 where the record was found to be incomplete, and nothing else

    def look(self, whole: bool = False) -> None:
        """Take in what was written since the last look. whole: also what is no log that grows."""
        refresh(self.folder)
        for frame in self._tail.frames() or (read_frames(self.folder) if whole else ()):
            self.add(frame)

    def add(self, frame: Frame) -> None:
        """Take one step in."""
        rank = frame.place.rank
        self._seen.add(frame)
        self.histories.setdefault(rank, History(capacity=1024, selected=lambda t: t.statistic in ("norm", "value"))).add(frame)
        self.judged += self._watchers.setdefault(rank, Watcher(self._rules)).judge(frame)

    def findings(self) -> list[Finding]:
        """Return what was found until now, causes first."""
        return [entry.finding for entry in all_findings(read_findings(self.folder), self.judged)]

    def render(self) -> Group:
        """Return the view as it is now."""
        found = self.findings()
        return Group(*self.numbers(found), _finding_panel(found, self.not_seen()))

    def numbers(self, found: Sequence[Finding]) -> list[RenderableType]:
        """Return what stands above the findings: the last step, the scalars, and the outliers."""
        short = self._seen.shortfall(self.folder)
        self.code = 3 if exit_code(found, bool(short)) == 3 else 0
        steps = [s.last_step for s in self.histories.values() if s.last_step is not None]
        head = Text.assemble(
            (f"{short}   " if short else "", "bold yellow"),
            (origin(self.folder), "bold"),
            f"   last step {max(steps) if steps else '—'}   ranks {len(self.histories)}",
        )
        return [head, self._scalars(), self._offenders()]

    def not_seen(self) -> list[str]:
        """Return sentences on what the findings do not speak of."""
        if not self._seen:
            return ["No step was recorded yet."]
        sentences = [*self._seen.lacking(), *filter(None, [left_out(self._left_out)])]
        return [*(f"{sentence}." for sentence in sentences), *filter(None, [unjudged(self._watchers.values())])]

    def _scalars(self) -> Table:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
        having: dict[Series, History] = {}  # scalars, and the first rank that has each: the last stage alone may know the loss
        for _, one in sorted(self.histories.items()):
            for series in one.series:
                if series.address.kind == "scalar":
                    having.setdefault(series, one)
        roles = ("loss", "gradient norm", "learning rate", "loss scale", None)
        for series in sorted(having, key=lambda t: roles.index(role_of(t.address.name)))[:8]:
            _, values = having[series].get(series)
            style = "bold red" if values.size and not math.isfinite(values[-1]) else "bold"
            table.add_row(series.address.name, Text(f"{values[-1]:.5g}", style=style), Text(spark(values), style="cyan"))
        return table

    def _offenders(self) -> Panel:
        table = Table(box=None, padding=(0, 2, 0, 0), show_header=True, header_style="dim")
        for column in ("series", "rank", "now", "× its median"):
            table.add_column(column, justify="left" if column == "series" else "right")
        for name, rank, value, ratio in worst_offenders(self.histories, 8):
            style = "bold red" if math.isinf(ratio) else "yellow" if ratio > 10 else ""
            table.add_row(name, str(rank), f"{value:.4g}", "not finite" if math.isinf(ratio) else f"{ratio:.3g}", style=style)
        return Panel(table, title="farthest from their own median", title_align="left", border_style="dim")


def _finding_panel(findings: list[Finding], not_seen: list[str]) -> Panel:
    lines = [line_of(finding) for finding in findings[:SHOWN]]
    if len(findings) > SHOWN:
        lines.append(Text(f"and {len(findings) - SHOWN} more: trainprobe judge", style="dim"))
    lines += [Text("nothing found", style="" if not_seen else "green")] if not findings else []
    lines += [Text(sentence, style="dim") for sentence in not_seen]
    return Panel(Group(*lines), title=f"findings: {len(findings)}", title_align="left", border_style="dim")


def line_of(finding: Finding) -> Text:
    """Return a finding as one line."""
    words = place_in_words(finding)
    where = f" ({words})" if words else ""
    return Text.assemble(
        (f"{finding.severity:<8}", _COLOURS[finding.severity]), (finding.rule, "bold"), f"{where}: {finding.message}"
    )


def spark(values: F64, width: int = 48) -> str:
    """Return the last values [n] as a line of bars; NaN and infinities are crosses."""
    shown = values[-4 * width :]
    groups = np.array_split(shown, min(width, shown.size)) if shown.size else []
    finite = shown[np.isfinite(shown)]
    low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 1.0)
    return "".join(_bar(group, low, high) for group in groups)


def _bar(group: F64, low: float, high: float) -> str:
    if not np.isfinite(group).all():
        return "×"
    share = (float(group.mean()) - low) / (high - low) if high > low else 0.0
    return BARS[min(len(BARS) - 1, int(share * len(BARS)))]


def top(
    folder: Annotated[Path, typer.Argument(help="folder that the run writes to, or its URL", metavar="RUN", parser=as_given)],
    once: Annotated[bool, typer.Option("--once", help="print one frame and exit")] = False,
    seconds: Annotated[float, typer.Option("--every", help="seconds between two updates", min=0.1)] = 2.0,
    keys: Annotated[bool, typer.Option("--keys", help="choose a finding with the arrow keys and see what it leads to")] = False,
) -> int:
    """Show the run in RUN live: last step, loss, gradient norm, outliers, findings. Ctrl-C ends it.

    Exit code: 0, or 3 there is nothing to show, or nothing was found and the record is incomplete.
    """
    folder = run_folder(folder)
    console = Console(highlight=False)
    view = View(folder)
    live = bool(find_logs(folder)) and not once
    view.look(whole=not live)
    if keys:
        _by_keys(view, seconds, live)
        return view.code
    if not live:
        console.print(view.render())
        return view.code
    try:
        with Live(console=console, screen=console.is_terminal, auto_refresh=False) as shown:
            while True:
                shown.update(view.render(), refresh=True)
                time.sleep(seconds)
                view.look()
    except KeyboardInterrupt:
        console.print(view.render())
    return view.code


def _by_keys(view: View, seconds: float, live: bool) -> None:
    try:
        from trainprobe.monitor.top_keys import TopKeys
    except ImportError:
        raise MissingExtra("textual", "top", "`trainprobe top --keys`") from None
    TopKeys(view, seconds if live else None).run()
