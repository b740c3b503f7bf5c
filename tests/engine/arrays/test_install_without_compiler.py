"""Where there is no compiler the package is built all the same, without the kernel."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_a_build_without_a_compiler_succeeds_and_leaves_the_kernel_out(tmp_path: Path) -> None:
    for name in ("setup.py", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    arrays = Path("trainprobe/engine/arrays")
    shutil.copytree(ROOT / arrays / "native", tmp_path / arrays / "native")
    (tmp_path / "README.md").touch()
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", "out"],
        cwd=tmp_path,
        env={**os.environ, "CC": "false", "CXX": "false"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert not list(tmp_path.rglob("_native*"))
    assert "building extension" in done.stderr + done.stdout


def test_without_the_kernel_the_numbers_come_from_torch() -> None:
    code = (
        "import sys; sys.modules['trainprobe._native'] = None\n"
        "import torch; from trainprobe.engine.arrays.torch_arrays import TorchStrip, native_in_use\n"
        "s = TorchStrip(3); s.add(torch.arange(5.)); p, c, _ = s.harvest()\n"
        "print(native_in_use(), p[0][7], len(c))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.split() == ["False", "10.0", "1"]
