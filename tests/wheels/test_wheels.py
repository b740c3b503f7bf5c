"""What is published: the wheel of this machine and the one without compiled parts in fresh environments without a compiler.

No machine with aarch64 or macOS is at hand: these wheels are built and looked into, and not run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
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


def test_a_fresh_environment_without_a_compiler_records_with_the_wheel(wheel, fresh, tmp_path):
    environment = fresh(wheel)
    packages = environment.packages
    done = environment.run("python", ROOT / "tests" / "wheels" / "records_a_step.py", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert all(file.startswith(str(packages)) for file in told["files"]), told["files"]
    assert told["compilers"] == []
    assert told["same"] and told["steps"] == 2 and told["calls"] > 10
    assert told["max"] == [told["torch"]]


def test_the_first_commands_of_the_readme_run_from_the_wheel(wheel, fresh, tmp_path):
    environment = fresh(wheel)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    done = environment.run("trainprobe", "run", "--", ROOT / "examples" / "new_head.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert next(line.strip() for line in text.splitlines() if line.startswith("    trainprobe: error")) in done.stderr
    done = environment.run("trainprobe", "report", "probe_out", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.glob("probe_out/*.html"))


def test_the_wheel_for_every_machine_reads_and_compares_and_says_that_it_cannot_record(built, fresh, tmp_path):
    dumps = [tmp_path / side for side in "ab"]
    for dump in dumps:
        command = [sys.executable, ROOT / "tests" / "wheels" / "records_a_step.py", dump, "dump"]
        subprocess.run(command, check=True, cwd=tmp_path, capture_output=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    environment = fresh(built("any"))
    assert not list(environment.packages.rglob("trainprobe/**/*.so"))
    assert (environment.packages / "trainprobe" / "py.typed").exists()
    compared = environment.run("trainprobe", "dump-compare", *map(str, dumps), cwd=tmp_path)
    assert compared.returncode == 0, compared.stdout + compared.stderr
    traced = environment.run("trainprobe", "nan-trace", str(dumps[0]), cwd=tmp_path)
    assert traced.returncode == 0, traced.stdout + traced.stderr
    records = "import torch, trainprobe; trainprobe.watch(torch.nn.Linear(2, 2)).__enter__()"
    refused = environment.run("python", "-c", records, cwd=tmp_path)
    assert refused.returncode != 0 and "needs the compiled part" in refused.stderr


def test_the_source_distribution_holds_all_that_is_compiled(built):
    with tarfile.open(built("source")) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "trainprobe").rglob("*.[ch]")}
    assert sources and sources <= held


def test_the_wheel_for_macos_holds_the_code_of_its_processor(built, tmp_path):
    with zipfile.ZipFile(built("arm64")) as held:  # which refuses other code when it is built
        libraries = [name for name in held.namelist() if name.endswith(".so")]
        held.extractall(tmp_path, libraries)
    assert len(libraries) == 3
    for name in libraries:
        build_wheels.check(tmp_path / name, "arm64")
    with pytest.raises(ValueError, match="is not for macOS"):
        build_wheels.check(Path(sys.executable), "arm64")


def test_the_wheel_for_aarch64_asks_for_what_that_of_this_machine_asks_for(wheel, built, folder):
    other = built("aarch64")  # which refuses another machine's code and a newer glibc
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
