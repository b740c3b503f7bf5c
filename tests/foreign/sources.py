"""Fetches the programs that come in a package's source distribution, and torchvision, beside the environment that runs them."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from functools import cache
from pathlib import Path

SDISTS = ("schedulefree==1.4.1", "e3nn==0.6.0", "opacus==1.6.0", "gpytorch==1.15.2", "fairscale==0.4.13")
WHEELS = ("cleanrl==1.2.0",)  # its metadata asks for an older Python than it needs
VISION = "torchvision==0.28.0"  # kept apart: the registry's wheel is built for CUDA, and whatever finds it imports it


@cache
def sources() -> Path:
    """Return the folder with all of them, fetching what is missing."""
    folder = Path(sys.prefix) / "sources"
    folder.mkdir(exist_ok=True)
    for pin in (*SDISTS, *WHEELS):
        if not (folder / pin.replace("==", "-")).is_dir():
            _fetch(folder, pin)
    return folder


@cache
def vision() -> Path:
    """Return the folder with torchvision."""
    folder = Path(sys.prefix) / "vision"
    if not folder.is_dir():
        _pip("install", "--target", str(folder), VISION)
    return folder


def _fetch(folder: Path, pin: str) -> None:
    kind = ["--no-binary", ":all:", "--no-build-isolation"] if pin in SDISTS else ["--ignore-requires-python"]
    _pip("download", *kind, "--dest", str(folder), pin)
    name = pin.replace("==", "-")
    archive = next(path for path in folder.glob(f"{name}*") if path.is_file())
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(folder / name)
    else:
        with tarfile.open(archive) as sdist:
            sdist.extractall(folder, filter="data")


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments, "--quiet", "--no-deps"]
    subprocess.run(command, check=True)
