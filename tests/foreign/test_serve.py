"""The page of a run that goes on, in a real browser: it shows later steps without being asked."""

from __future__ import annotations

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.monitor.report.chromium import Browser, require_chromium

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def address(tmp_path: Path) -> Generator[str]:
    command = [sys.executable, "-m", "trainprobe", "serve", str(tmp_path / "run"), "--port", "0"]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        line = server.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:\d+/\?token=\S+", line)
        assert found, line + server.stderr.read()
        yield found[0]
        server.terminate()


def code_of(url: str, **headers: str) -> int:
    try:
        return urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code


def test_who_has_no_token_or_comes_by_another_name_gets_nothing(address):
    bare = address.partition("?")[0]
    assert [code_of(bare + path) for path in ("", "page", "events", "?token=x")] == [403] * 4
    assert code_of(address, Host="attacker.example") == 400
    assert code_of(bare + "page", Cookie="trainprobe_token=x") == 403
    assert code_of(bare + "page", Cookie=f"trainprobe_token={address.partition('=')[2]}") == 200


def test_a_browser_sees_later_steps_of_a_training_that_runs(address, tmp_path):
    browser = Browser(require_chromium())
    inside = "document.querySelector('iframe')?.contentDocument"
    text_of = f"({inside}?.body?.innerText ?? '')"
    steps = f"({inside}?.documentElement?.dataset.ready ? ({text_of}.match(/steps\\s+\\d+ to (\\d+)/) || [0, 0])[1] : 0)"
    plan = '{"monitor": {"step": ["every 20"]}}'  # a page is made of the whole record, which must stay small
    victim = [sys.executable, "-m", "tests.endless_training", str(tmp_path / "run"), plan]
    training: Any = None
    try:
        browser.send("Page.navigate", url=address)
        deadline = time.monotonic() + 300
        while "does not exist" not in (text := browser.run(text_of)):
            assert time.monotonic() < deadline, text
            time.sleep(0.2)
        training = subprocess.Popen(victim, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        seen: list[int] = []
        while len(set(seen)) < 2:
            assert time.monotonic() < deadline, (seen, browser.errors, browser.run(text_of))
            seen += [number] if (number := int(browser.run(steps) or 0)) else []
            time.sleep(0.5)
        assert seen == sorted(seen) and "token" not in browser.run("location.href") and browser.errors == []
    finally:
        browser.close()
        if training is not None:
            training.kill()
            training.wait()
