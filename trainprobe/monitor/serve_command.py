"""`trainprobe serve RUN`: the page of `report` while a run goes on.

A frame around the page loads it anew when files of the run have changed, which an event tells it; the page itself is the one
that `report` writes. Only this machine is listened to, and only who has the token of the address is answered.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Any

import typer

from trainprobe.engine.core.log_lines import say
from trainprobe.engine.storage.html_page.markup import joined
from trainprobe.errors import MissingExtra, ProbeError
from trainprobe.monitor.remote_run import run_folder
from trainprobe.monitor.report.page import render_page
from trainprobe.monitor.report_command import view_of_run

LOOKED = 1.0  # seconds between two looks at the files
COOKIE = "trainprobe_token"
_FRAME = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>trainprobe</title><link rel="icon" href="data:,">
<style>html,body,iframe{margin:0;border:0;width:100%;height:100%;display:block}</style>
<iframe title="the run"></iframe>
<script>
const frame = document.querySelector("iframe"), events = new EventSource("events");
let wanted = "", shown = "", busy = false, at = 0;
const next = () => {  // one at a time: a page that is slow to make would never be there
  if (busy || wanted === shown) return;
  busy = true;
  shown = wanted;
  at = frame.contentWindow.scrollY;
  frame.contentWindow.location.replace("page?" + shown + frame.contentWindow.location.hash);
};
frame.addEventListener("load", () => { busy = false; frame.contentWindow.scrollTo(0, at); next(); });
events.onmessage = (event) => { wanted = event.data; next(); };
</script></html>
"""
_WAITING = """\
<!doctype html><html lang="en"><meta charset="utf-8"><title>trainprobe</title><link rel="icon" href="data:,"><p>{}</p></html>
"""


class LivePage:
    """The page of a run as its files are now. beside: another run on it."""

    def __init__(self, folder: Path, beside: Path | None = None) -> None:
        self.folder, self.beside = folder, beside
        self._lock = threading.Lock()
        self._made: tuple[str, str] = "", ""

    def state(self) -> str:
        """Return what changes as soon as a file of the runs does."""
        found = [(0, 0)]
        for folder in filter(None, (self.folder, self.beside)):
            for path in folder.rglob("*") if folder.is_dir() else (folder,):
                try:
                    status = path.stat()
                except OSError:  # it is gone meanwhile
                    continue
                found.append((status.st_size, status.st_mtime_ns))
        return f"{len(found)}-{sum(size for size, _ in found)}-{max(changed for _, changed in found)}"

    def html(self) -> str:
        """Return the page; where there is no run yet, a sentence."""
        with self._lock:
            state = self.state()
            if self._made[0] != state:
                try:
                    text = render_page(view_of_run(run_folder(self.folder), beside=self.beside))
                except ProbeError as error:
                    text = _WAITING.format(joined([str(error)]))
                self._made = state, text
            return self._made[1]


def app_of(page: LivePage, token: str) -> Any:
    """Return the application that serves a page to who knows the token. Raises MissingExtra without starlette."""
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.trustedhost import TrustedHostMiddleware
        from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, StreamingResponse
        from starlette.routing import Route
    except ImportError:
        raise MissingExtra("starlette", "serve", "`trainprobe serve`") from None

    def knows(request: Any) -> bool:
        return secrets.compare_digest(request.cookies.get(COOKIE, "").encode(), token.encode())

    def refused() -> Any:
        return PlainTextResponse("the address that `trainprobe serve` printed has the token\n", status_code=403)

    def frame(request: Any) -> Any:
        given = request.query_params.get("token")
        if given is not None and secrets.compare_digest(given.encode(), token.encode()):
            answer = RedirectResponse("/", status_code=303)  # the token leaves the address bar
            answer.set_cookie(COOKIE, token, httponly=True, samesite="strict")
            return answer
        return HTMLResponse(_FRAME) if knows(request) else refused()

    def whole(request: Any) -> Any:
        return HTMLResponse(page.html(), headers={"Cache-Control": "no-store"}) if knows(request) else refused()

    async def events(request: Any) -> Any:
        return StreamingResponse(_changes(page), media_type="text/event-stream") if knows(request) else refused()

    routes = [Route("/", frame), Route("/page", whole), Route("/events", events)]
    ours = [Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])]  # no name that others point here
    return Starlette(routes=routes, middleware=ours)


async def _changes(page: LivePage) -> AsyncIterator[str]:
    """Yield an event now and whenever the files have changed."""
    last = ""
    while True:
        state = await asyncio.to_thread(page.state)
        yield f"data: {state}\n\n" if state != last else ": still there\n\n"
        last = state
        await asyncio.sleep(LOOKED)


def serve(
    folder: Annotated[Path, typer.Argument(help="folder that the run writes to; it may still be empty", metavar="RUN")],
    beside: Annotated[Path | None, typer.Option(help="another run, on the same page")] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any that is free")] = 8765,
) -> int:
    """Serve the page of a run on this machine while the run goes on, until Ctrl-C. Forward the port to look from elsewhere."""
    token = secrets.token_urlsafe(24)
    app = app_of(LivePage(folder, beside), token)
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", "serve", "`trainprobe serve`") from None
    config = uvicorn.Config(app, host="127.0.0.1", port=port, log_level="error", timeout_graceful_shutdown=1)
    listening = config.bind_socket()
    listening.listen()  # before the address is printed
    say(f"open http://127.0.0.1:{listening.getsockname()[1]}/?token={token}")
    uvicorn.Server(config).run(sockets=[listening])
    return 0
