"""Builds the wheels that bring the compiled parts to machines without a compiler; run by `make wheels`, on Linux x86-64.

One wheel for each of Linux x86-64 and aarch64, for every Python from 3.10 on (abi3) and every glibc from 2.17 on. Zig, which
pip installs, knows the symbols of that glibc for both machines. For x86-64 the machine's own gcc compiles and Zig only links,
so that the kernels are those that are measured; for aarch64 Zig's clang compiles too.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent
GLIBC = 2, 17
EXTENSIONS = 3  # in setup.py
MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0"}


def build(folder: Path, machine: str) -> Path:
    """Build the wheel for a machine, and return it.

    Raises CalledProcessError where the build fails, and ValueError for a wheel that would not run on that machine.
    """
    source = folder / f"source-{machine}"
    ignore = shutil.ignore_patterns("__pycache__", "*.so")
    shutil.copytree(ROOT / "trainprobe", source / "trainprobe", ignore=ignore)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    tag = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}"
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    subprocess.run(
        [*command, f"--config-setting=--build-option=--plat-name={tag}", str(source)],
        env={**os.environ, **compiler(machine)},
        check=True,
    )
    (wheel,) = folder.glob(f"*-{tag}.whl")
    libraries = list((source / "build").glob("lib*/**/*.abi3.so"))
    if len(libraries) != EXTENSIONS:
        raise ValueError(
            f"{len(libraries)} of {EXTENSIONS} extensions were built for {machine}: what the compiler said stands above"
        )
    for library in libraries:
        check(library, machine)
    shutil.rmtree(source)
    return wheel


def compiler(machine: str) -> dict[str, str]:
    """Return the variables by which setuptools compiles and links for a machine."""
    zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}"
    told = {"CC": zig, "LDSHARED": f"{zig} -shared -s", "_PYTHON_HOST_PLATFORM": f"linux-{machine}"}
    if machine == "x86_64":
        told["CC"] = "gcc"
        named = subprocess.run(["gcc", "-print-libgcc-file-name"], capture_output=True, text=True, check=True)
        told["LDFLAGS"] = named.stdout.strip()  # gcc asks it which instructions the processor has
    return told


def check(library: Path, machine: str) -> None:
    """Raise ValueError for a library that is for another machine, or asks for what glibc had not yet."""
    with library.open("rb") as file:
        elf = ELFFile(file)
        dynamic = elf.get_section_by_name(".dynamic")
        needed = {tag.needed for tag in dynamic.iter_tags() if tag.entry.d_tag == "DT_NEEDED"}
        versions = elf.get_section_by_name(".gnu.version_r")  # absent where nothing of glibc is asked for by version
        asked = (
            {version.name for _, auxiliaries in versions.iter_versions() for version in auxiliaries}
            if versions is not None
            else set()
        )
        if elf["e_machine"] != MACHINES[machine]:
            raise ValueError(f"{library.name} is for {elf['e_machine']}, not for {machine}")
    newer = {v for v in asked if tuple(map(int, v.removeprefix("GLIBC_").split("."))) > (*GLIBC, 0)}
    if newer or not needed <= LIBRARIES:
        raise ValueError(f"{library.name} needs {sorted(newer | needed - LIBRARIES)}, which not every Linux has")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    for each in MACHINES:
        print(build(target, each))  # noqa: T201
