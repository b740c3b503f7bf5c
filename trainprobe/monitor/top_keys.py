"""`trainprobe top RUN --keys`: arrow keys choose a finding, Enter shows what it leads to, q ends it."""

from __future__ import annotations

from rich.console import Group
from rich.text import Text
from textual.app import App, ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Footer, OptionList, Static

from trainprobe.engine.core.findings import Cause, cause_of
from trainprobe.engine.core.records import Finding
from trainprobe.monitor.report.traces import dumps_of, trace_of
from trainprobe.monitor.top_command import View, line_of


class TopKeys(App[None]):  # pyright: ignore[reportUntypedBaseClass]
    """The view of `top` with its findings as a list. seconds: between two looks at the run; None for a run that is over."""

    BINDINGS = [("q", "quit", "end"), ("escape", "close", "close what Enter showed")]  # noqa: RUF012
    CSS = """
    #numbers { height: auto; max-height: 50%; }
    #findings { height: 1fr; }
    #about { height: auto; max-height: 50%; display: none; border-top: solid $accent; }
    """

    def __init__(self, view: View, seconds: float | None) -> None:
        super().__init__()
        self._view, self._seconds = view, seconds
        self._found: list[Finding] = []

    def compose(self) -> ComposeResult:
        """Lay out the numbers, the list, and what Enter shows."""
        yield VerticalScroll(Static(id="run"), id="numbers", can_focus=False)
        yield OptionList(id="findings")
        yield VerticalScroll(Static(id="leads"), id="about", can_focus=False)
        yield Footer()

    def on_mount(self) -> None:
        """Show the run, and look again from time to time."""
        self._show()
        self.query_one(OptionList).focus()
        if self._seconds is not None:
            self.set_interval(self._seconds, self._look)

    def _look(self) -> None:
        self._view.look()
        self._show()

    def _show(self) -> None:
        """Show what is known now; the finding that was chosen stays chosen."""
        choices, found = self.query_one(OptionList), self._view.findings()
        notes = [Text(sentence, style="dim") for sentence in self._view.not_seen()]
        none = [] if found else [Text("nothing found")]
        self.query_one("#run", Static).update(Group(*self._view.numbers(found), *none, *notes))
        if found == self._found:
            return
        chosen = self._chosen()
        self._found = found
        choices.clear_options()
        choices.add_options(map(line_of, found))
        causes = [cause_of(finding) for finding in found]
        choices.highlighted = causes.index(chosen) if chosen in causes else 0

    def _chosen(self) -> Cause | None:
        place = self.query_one(OptionList).highlighted
        return None if place is None else cause_of(self._found[place])

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Show what a finding leads to."""
        self.query_one("#leads", Static).update(about(self._view, self._found[event.option_index]))
        self.query_one("#about").display = True

    def action_close(self) -> None:
        """Hide what a finding leads to."""
        self.query_one("#about").display = False


def about(view: View, finding: Finding) -> Text:
    """Return a finding with what to do next, all its names, and what its step's dump says of its place."""
    rank = finding.place.rank if finding.place is not None else 0
    lines = [line_of(finding), Text(f"next: {finding.next}") if finding.next else None]
    lines += [Text(f"names: {', '.join(finding.names)}")] if len(finding.names) > 1 else []
    lines += [Text(what + name) for what, name in trace_of(dumps_of(view.folder), finding.step, rank, finding.site)]
    return Text("\n").join(line for line in lines if line is not None)
