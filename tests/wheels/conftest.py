"""What is published, built once or taken from the folder in TRAINPROBE_RELEASE, and fresh environments to install it in."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture(scope="session")
def built(folder):
    """Return what gives the wheel for a machine of build_wheels.MACHINES, or the source distribution for `source`."""
    import build_wheels

    made: dict[str, Path] = {}

    def get(machine: str) -> Path:
        if "TRAINPROBE_RELEASE" in os.environ:
            end = ".tar.gz" if machine == "source" else f"{build_wheels.MACHINES[machine] or 'py3-none-any'}.whl"
            (made[machine],) = Path(os.environ["TRAINPROBE_RELEASE"]).glob(f"*{end}")
        elif machine not in made:
            made[machine] = build_wheels.build_source(folder) if machine == "source" else build_wheels.build(folder, machine)
        return made[machine]

    return get


@pytest.fixture(scope="session")
def wheel(built):
    return built("x86_64")


@dataclass(frozen=True)
class Fresh:
    """A new environment, with what trainprobe needs beside it; no compiler is on the path of its programs."""

    folder: Path
    packages: Path

    def run(self, *words: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run a program of the environment."""
        return self._run([self.folder / "bin" / words[0], *words[1:]], cwd, [])

    def shell(self, line: str, cwd: Path, more: str = "") -> subprocess.CompletedProcess[str]:
        """Run a line of a shell. more: folders of programs that it finds too."""
        return self._run(["/bin/sh", "-c", line], cwd, [more] if more else [])

    def _run(self, words: list[str | Path], cwd: Path, more: list[str]) -> subprocess.CompletedProcess[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRAINPROBE"))}
        return subprocess.run(
            words,
            cwd=cwd,
            env={**clean, "PATH": os.pathsep.join([str(self.folder / "bin"), *more]), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
        )


@pytest.fixture(scope="session")
def fresh(tmp_path_factory):
    """Return what makes an environment with a package installed; PyTorch and the rest are seen through a path file."""

    def make(package: Path) -> Fresh:
        home = tmp_path_factory.mktemp("environment") / "fresh"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", home / "bin" / "python", "install"]
        subprocess.run([*pip, "--quiet", "--no-deps", "--no-index", package], check=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": home, "platbase": home}))
        heavy = subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__file__)"], check=True, capture_output=True, text=True
        )
        (packages / "torch_elsewhere.pth").write_text(str(Path(heavy.stdout).parents[1]))
        return Fresh(home, packages)

    return make
