"""A device with one wrong kernel, a real one to torch: the stand-in accelerator, whose other kernels are those of the host."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("stand_in") / "train.py"
ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="the stand-in accelerator is compiled with g++")
pytestmark = needs_compiler


def environment() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "COLUMNS": "400"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A reference machine on this one's loopback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    folder = tmp_path_factory.mktemp("server")
    command = [sys.executable, "-m", "trainprobe", "op-check", "serve", "--listen", address, "--output", str(folder)]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**environment(), "PYTHONUNBUFFERED": "1"})
    end = time.monotonic() + 60
    while "listening on" not in (folder / "log.txt").read_text():
        assert process.poll() is None, (folder / "log.txt").read_text()
        assert time.monotonic() < end
        time.sleep(0.05)
    yield address
    process.kill()
    process.wait(30)


def report(kernel: str, output: Path, *server: str) -> dict[str, Any]:
    command = [sys.executable, str(PROGRAM), kernel, str(output), *server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment(), check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.rpartition("REPORT ")[2])


def test_a_device_without_a_wrong_kernel_is_not_accused(tmp_path: Path) -> None:
    found = report("none", tmp_path)
    assert found["offline"] == []
    assert found["training"] == []
    assert found["calls"] > 300
    assert len(found["not checked"]) <= 2, "attention's gradient alone, which is that of an inner step there"


@pytest.mark.parametrize(
    ("kernel", "first", "others"),
    [
        ("forward", "Functional.gelu.", set[str]()),
        ("backward", "Functional.layer_norm.", set[str]()),
        ("strided", "Torch.tanh.0.forward", {"Torch.tanh.0.backward"}),  # whose gradient is made of the wrong result
    ],
)
def test_the_wrong_kernel_is_named_first_and_no_other(
    kernel: str, first: str, others: set[str], server: str, tmp_path: Path
) -> None:
    far = () if kernel == "strided" else (server,)
    found = report(kernel, tmp_path, *far)
    direction = "backward" if kernel == "backward" else "forward"
    for said in (found["offline"], found["training"]):
        assert said[0].startswith(first)
        assert f".{direction}" in said[0].partition(" ")[0]
        named = {text.partition(" ")[0].rstrip(":") for text in said}
        assert all(name.startswith(first) or name in others for name in named), named
    assert not any("Torch.tanh.1" in text for text in found["offline"]), "what lies in order is right"
    if far:
        assert f"by {server}" in found["said"][-1], "the other machine has judged"
