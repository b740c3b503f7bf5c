"""What stands in for the judge of a training whose plan names a server or a shared folder."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from trainprobe import __version__
from trainprobe.engine.core.records import Finding, Place, StepData
from trainprobe.op_check.online.addresses import split_address
from trainprobe.op_check.online.channels import Channel, FolderChannel, Stream, StreamChannel
from trainprobe.op_check.online.credentials import context
from trainprobe.op_check.online.link import Link
from trainprobe.op_check.online.messages import Hello
from trainprobe.op_check.plan import OpCheckPlan
from trainprobe.op_check.training import RULE, Chosen, HeldValues, Verdicts

_ADVICE = "the server's folder of reports has the call with a script that runs it anywhere (replay/)"


class OnlineJudge:
    """Hands the calls of judged steps to a link, and has its findings ready for the training's thread.

    values: those of the step that is collected. say: writes one line of the log; called from the link's thread.
    """

    def __init__(self, plan: OpCheckPlan, values: HeldValues, say: Callable[[str], None]) -> None:
        self._plan = plan
        self._values = values
        self._chosen = Chosen(plan)
        self._link: Link | None = None
        self._place = Place()
        self.verdicts = Verdicts(say, _ADVICE)
        self._stops = plan.stop
        self._bug = ""

    def start(self, place: Place) -> None:
        """Begin to connect, in a thread of its own."""
        plan = self._plan
        run = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}" if plan.run is None else plan.run
        hello = Hello(
            run=run, rank=place.rank, world_size=place.world_size, release=__version__, atol=plan.atol, rtol=plan.rtol
        )
        self._place = place
        server = plan.server or f"the folder {plan.folder}"
        self._link = Link(connector(plan, hello), server, hello, self._chosen, self.verdicts, place, plan.patience)

    def __call__(self, step_data: StepData) -> list[Finding]:
        """Queue a step; its findings come later, from `arrived`."""
        if self._link is not None:
            self._link.offer(step_data, self._values.hand_over())
        return []

    def make_room(self) -> None:
        """Let the values of the next step take what those that wait for the link have left."""
        self._values.most = max(0, self._plan.max_bytes - (0 if self._link is None else self._link.held))

    def arrived(self) -> list[Finding]:
        """Return what the link has found since the last time. Raises the link's own fault."""
        link = self._link
        found: list[Finding] = []
        while link is not None and link.findings:
            found.append(link.findings.popleft())
        if self._stops and not self._bug:
            self._bug = next((f.message for f in found if f.rule == RULE and f.severity == "error"), "")
        if link is not None and link.fault is not None:
            fault, link.fault = link.fault, None
            raise fault
        return found

    def must_stop(self) -> str:
        """Return the bug at which the plan stops the training, once."""
        if not self._bug or not self._stops:
            return ""
        self._stops = False
        return self._bug

    def close(self) -> list[Finding]:
        """End the link; return what is left to be told, and what was not judged."""
        if self._link is None:
            return []
        self._link.close(self._plan.wait)
        found = self.arrived()
        missed = self._missed()
        if missed:
            advice = (
                "choose fewer steps or modules, or give the link more time (wait) or the server more threads or --max-bytes"
            )
            found.append(Finding(RULE, "warning", f"not all calls were judged: {missed}", place=self._place, next=advice))
        return found

    def _missed(self) -> str:
        link = self._link
        if link is None:
            return ""
        parts = [f"{link.left_out.total()} were left out"] if link.left_out else []
        why, count = next(iter(link.left_out.most_common(1)), ("", 0))
        parts[:] = [f"{parts[0]} ({count} because {why})"] if parts else []
        parts += [f"{link.unanswered} were sent and never answered"] if link.unanswered else []
        parts += [f"the link broke {link.breaks} {'time' if link.breaks == 1 else 'times'}"] if link.breaks else []
        return ", ".join(parts)

    def summary(self) -> str:
        """Return what was judged in all, as a sentence."""
        missed = self._missed()
        text = f"{self.verdicts.summary(self._chosen.unmatched())} by {self._plan.server or self._plan.folder}"
        return f"{text}; {missed}." if missed else f"{text}."


def connector(plan: OpCheckPlan, hello: Hello) -> Callable[[], Awaitable[Channel]]:
    """Return what connects as a plan says."""

    async def to_server() -> Channel:
        host, port = split_address(str(plan.server))
        secure = None if plan.tls is None else context(Path(plan.tls), server=False)
        streams = await asyncio.wait_for(asyncio.open_connection(host, port), plan.patience)
        stream = Stream(*streams, plan.patience, secure, host)
        try:
            await stream.handshake()
        except BaseException:
            stream.close()
            raise
        return StreamChannel(stream)

    async def to_folder() -> Channel:
        name = f"session-{hello.run}-rank{hello.rank}-{secrets.token_hex(4)}"
        return FolderChannel(Path(str(plan.folder)) / name, server=False)

    return to_server if plan.server is not None else to_folder
