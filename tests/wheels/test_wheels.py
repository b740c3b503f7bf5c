"""The wheels: that of this machine in a fresh environment without a compiler, that of aarch64 by what it asks for.

No machine with aarch64 is at hand: that wheel is built and looked into, and not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("elftools", reason="run by `make test-wheels`, in an environment of its own")
import build_wheels

ROOT = Path(__file__).parents[2]


def undefined(library):
    """Return the names of Python's that a library asks for."""
    from elftools.elf.elffile import ELFFile

    with library.open("rb") as file:
        symbols = ELFFile(file).get_section_by_name(".dynsym").iter_symbols()
        return {s.name for s in symbols if s["st_shndx"] == "SHN_UNDEF" and s.name.startswith(("Py", "_Py"))}


def test_a_fresh_environment_without_a_compiler_records_with_the_wheel(wheel, tmp_path):
    fresh = tmp_path / "fresh"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", fresh], check=True)
    python = fresh / "bin" / "python"
    install = [
        sys.executable,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
    ]
    subprocess.run([*install, "--no-index", wheel], check=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": fresh, "platbase": fresh}))
    heavy = Path(
        subprocess.run(
            [sys.executable, "-c", "import torch; print(torch.__file__)"], check=True, capture_output=True, text=True
        ).stdout
    )
    (packages / "torch_elsewhere.pth").write_text(str(heavy.parents[1]))
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "TRAINPROBE"))}
    done = subprocess.run(
        [python, ROOT / "tests" / "wheels" / "records_a_step.py", tmp_path / "out"],
        cwd=tmp_path,
        env={**clean, "PATH": str(fresh / "bin"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(file.startswith(str(packages)) for file in told["files"]), told["files"]
    assert told["compilers"] == []
    assert told["same"] and told["steps"] == 2 and told["calls"] > 10
    assert told["max"] == [told["torch"]]


def test_the_wheel_for_aarch64_asks_for_what_that_of_this_machine_asks_for(wheel, folder):
    other = build_wheels.build(folder, "aarch64")  # which refuses another machine's code and a newer glibc
    assert [w.name.partition("-cp310-abi3-")[2] for w in (wheel, other)] == [
        "manylinux_2_17_x86_64.whl",
        "manylinux_2_17_aarch64.whl",
    ]
    for w in (wheel, other):
        with zipfile.ZipFile(w) as held:
            names = [name for name in held.namelist() if name.endswith(".so")]
            places = ("trainprobe", "trainprobe/engine/compare", "trainprobe/op_check")
            assert sorted(names) == [f"{place}/_native.abi3.so" for place in places]
            held.extractall(folder / w.stem, names)
    for name in names:
        ours, theirs = (undefined(folder / w.stem / name) for w in (wheel, other))
        assert ours == theirs and "PyModule_Create2" in ours
    with pytest.raises(ValueError, match="is for EM_AARCH64, not for x86_64"):
        build_wheels.check(folder / other.stem / names[0], "x86_64")
