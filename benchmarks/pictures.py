"""Makes the pictures of the pages of docs/ from real runs: `python -m benchmarks.pictures docs/images`.

`serve.png` is what a browser shows of `trainprobe serve` while a small GPT trains whose loss becomes NaN at step 120.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image

import trainprobe
from tests.monitor.report.chromium import Browser, require_chromium
from trainprobe.demo.gpt import GPT, Shape, next_token_loss

STEPS, FAULT = 130, 120
INSIDE = "document.querySelector('iframe')?.contentDocument"


def train(output: Path) -> None:
    """Train a GPT of three layers on random tokens; one loss is not finite."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=3, width=32, heads=4, context=16, vocabulary=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with trainprobe.watch(model, optimizer, output=str(output), console=False) as probe:
        for step in range(STEPS):
            with probe.step():
                tokens = torch.randint(64, (4, 17))
                loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
                loss = loss * float("nan") if step == FAULT else loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


def served(run: Path, picture: Path) -> None:
    """Let a browser open the address that `trainprobe serve` prints, and keep what it shows, with 64 colours."""
    command = [sys.executable, "-m", "trainprobe", "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        browser = Browser(require_chromium())
        try:
            assert server.stderr is not None
            (address,) = re.findall(r"http://\S+", server.stderr.readline())
            browser.resize(1280, 800)
            browser.send("Page.navigate", url=address)
            until = time.monotonic() + 120
            while not browser.run(f"{INSIDE}?.documentElement?.dataset.ready") and time.monotonic() < until:
                time.sleep(0.3)
            time.sleep(1)
            browser.screenshot(picture, full=False)
        finally:
            browser.close()
            server.terminate()
    with Image.open(BytesIO(picture.read_bytes())) as shot:
        shot.convert("RGB").quantize(64, dither=Image.Dither.NONE).save(picture, optimize=True)


def main() -> None:
    """Write the pictures into a folder."""
    with tempfile.TemporaryDirectory() as work:
        train(Path(work) / "probe_out")
        served(Path(work) / "probe_out", Path(sys.argv[1]) / "serve.png")


if __name__ == "__main__":
    main()
