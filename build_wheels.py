"""Builds what is published: wheels with the compiled parts, one without, and the source; run by `make wheels`, on Linux x86-64.

One wheel for each machine of MACHINES, for every Python from 3.10 on (abi3): Linux with every glibc from 2.17 on, and macOS on
arm64 from 11.0 on. Zig, which pip installs, knows the symbols of these systems. For x86-64 the machine's own gcc compiles and
Zig only links, so that the kernels are those that are measured; for the others Zig's clang compiles too. The wheel for `any`
has no compiled part: it reads, compares and judges what was recorded elsewhere.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from elftools.elf.elffile import ELFFile

ROOT = Path(__file__).resolve().parent
GLIBC, MACOS = (2, 17), (11, 0)
EXTENSIONS = 3  # in setup.py
ELF_MACHINES = {"x86_64": "EM_X86_64", "aarch64": "EM_AARCH64"}
MACHINES = {
    **{machine: f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}" for machine in ELF_MACHINES},
    "arm64": f"macosx_{MACOS[0]}_{MACOS[1]}_arm64",
    "any": "",
}
LIBRARIES = {"libc.so.6", "libm.so.6", "libpthread.so.0"}
MACH_O_ARM64 = bytes.fromhex("cffaedfe0c000001")  # its magic number and processor


def build(folder: Path, machine: str) -> Path:
    """Build the wheel for a machine, and return it.

    Raises CalledProcessError where the build fails, and ValueError for a wheel that would not run on that machine.
    """
    source = _copied(folder / f"source-{machine}")
    tag = MACHINES[machine]
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder)]
    command += [f"--config-setting=--build-option=--plat-name={tag}"] if tag else []
    subprocess.run([*command, str(source)], env={**os.environ, **compiler(machine)}, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob(f"*-{tag or 'py3-none-any'}.whl")
    libraries = list((source / "build").glob("lib*/**/*.abi3.so"))
    if len(libraries) != (EXTENSIONS if tag else 0):
        raise ValueError(
            f"{len(libraries)} of {EXTENSIONS} extensions were built for {machine}: what the compiler said stands above"
        )
    for library in libraries:
        check(library, machine)
    shutil.rmtree(source)
    return wheel


def build_source(folder: Path) -> Path:
    """Build the source distribution, and return it."""
    source = _copied(folder / "source")
    command = [sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", str(folder), str(source)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    shutil.rmtree(source)
    (archive,) = folder.glob("trainprobe-*.tar.gz")
    return archive


def _copied(source: Path) -> Path:
    """Copy what is built, without what earlier builds left."""
    shutil.copytree(ROOT / "trainprobe", source / "trainprobe", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    return source


def compiler(machine: str) -> dict[str, str]:
    """Return the variables by which setuptools compiles and links for a machine."""
    if machine == "any":
        return {"TRAINPROBE_PURE": "1"}
    if machine == "arm64":
        system, link = f"aarch64-macos.{MACOS[0]}.{MACOS[1]}", "-shared -undefined dynamic_lookup -s"
    else:
        system, link = f"{machine}-linux-gnu.{GLIBC[0]}.{GLIBC[1]}", "-shared -s"
    zig = f"{sys.executable} -m ziglang cc -target {system}"
    platform = MACHINES[machine].replace("_", "-") if machine == "arm64" else f"linux-{machine}"
    told = {"CC": zig, "LDSHARED": f"{zig} {link}", "_PYTHON_HOST_PLATFORM": platform}
    if machine == "x86_64":
        told["CC"] = "gcc"
        named = subprocess.run(["gcc", "-print-libgcc-file-name"], capture_output=True, text=True, check=True)
        told["LDFLAGS"] = named.stdout.strip()  # gcc asks it which instructions the processor has
    return told


def check(library: Path, machine: str) -> None:
    """Raise ValueError for a library that is for another machine, or asks for what glibc had not yet."""
    if machine == "arm64":
        if library.read_bytes()[:8] != MACH_O_ARM64:
            raise ValueError(f"{library.name} is not for macOS on arm64")
        return
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
        if elf["e_machine"] != ELF_MACHINES[machine]:
            raise ValueError(f"{library.name} is for {elf['e_machine']}, not for {machine}")
    newer = {v for v in asked if tuple(map(int, v.removeprefix("GLIBC_").split("."))) > (*GLIBC, 0)}
    if newer or not needed <= LIBRARIES:
        raise ValueError(f"{library.name} needs {sorted(newer | needed - LIBRARIES)}, which not every Linux has")


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    for made in (*(build(target, machine) for machine in MACHINES), build_source(target)):
        print(made)  # noqa: T201
