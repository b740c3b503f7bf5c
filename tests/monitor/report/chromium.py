"""A real headless Chromium, driven over the DevTools pipe: no web socket and no driver package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "about:blank",
)


def find_chromium() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def require_chromium() -> str:
    """Return the browser's path; skip without one, and fail where the surroundings require one."""
    found = find_chromium()
    if found is None:
        reason = f"no Chromium on PATH (looked for {', '.join(NAMES)}): apt-get install chromium"
        if os.environ.get("CI") == "true" and "chromium" in os.environ.get("TRAINPROBE_REQUIRE", "").split(","):
            pytest.fail(reason)
        print(reason)
        pytest.skip(reason)
    return found


class Browser:
    """One page. `send` calls a DevTools method; `errors` collects console errors, exceptions and blocked requests."""

    def __init__(self, path: str, width: int = 1400, height: int = 1000, scheme: str = "light") -> None:
        self._folder = tempfile.mkdtemp(prefix="chromium-")
        read_in, self._write = os.pipe()
        self._read, write_out = os.pipe()
        command = f'exec "$0" "$@" 3<&{read_in} 4>&{write_out}'
        arguments = ["bash", "-c", command, path, f"--user-data-dir={self._folder}", *FLAGS]
        self._process = subprocess.Popen(arguments, pass_fds=(read_in, write_out), stderr=subprocess.DEVNULL)
        os.close(read_in)
        os.close(write_out)
        self._buffer, self._number, self._session = b"", 0, None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = next(t for t in self.send("Target.getTargets")["targetInfos"] if t["type"] == "page")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        self.scheme(scheme)

    def send(self, method: str, **params: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _receive(self) -> dict[str, Any]:
        deadline = time.monotonic() + 60
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("Chromium did not answer within 60 s")
            self._buffer += os.read(self._read, 1 << 20)
        line, self._buffer = self._buffer.split(b"\0", 1)
        message = json.loads(line)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"].get("exception", params["exceptionDetails"]).get("description")))
        if method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        if method == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str(params["args"]))
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)

    def scheme(self, name: str) -> None:
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def open(self, page: Path, place: str = "") -> float:
        """Open a page and wait until it says it is ready; return the seconds that took, by the page's own clock.

        place: what follows the address, "#…"; where the page is open already, only that changes and nothing is loaded.
        """
        self.send("Page.navigate", url=page.as_uri() + place)
        for _ in range(600):
            ready = self.run("document.readyState === 'complete' && document.documentElement.dataset.ready || ''")
            if ready:
                return float(ready) / 1000
            time.sleep(0.05)
        raise TimeoutError(f"the page was not ready after 30 s; errors: {self.errors}")

    def run(self, script: str) -> Any:
        answer = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def drag(self, x0: float, x1: float, y: float) -> None:
        self._mouse("mouseMoved", x0, y, held=False)
        self._mouse("mousePressed", x0, y)
        for x in ((x0 + x1) / 2, x1):
            self._mouse("mouseMoved", x, y)
        self._mouse("mouseReleased", x1, y)

    def _mouse(self, kind: str, x: float, y: float, held: bool = True) -> None:
        button = "left" if held else "none"
        self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(held), clickCount=1)

    def point(self, x: float, y: float) -> None:
        self._mouse("mouseMoved", x, y, held=False)

    def key(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, key=key)

    def screenshot(self, target: Path, full: bool = True) -> None:
        shot = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        target.write_bytes(base64.b64decode(shot["data"]))

    def close(self) -> None:
        self._session = None
        try:
            self.send("Browser.close")
        except (OSError, TimeoutError, RuntimeError):
            self._process.kill()
        self._process.wait(timeout=20)
        os.close(self._write)
        os.close(self._read)
        shutil.rmtree(self._folder, ignore_errors=True)
