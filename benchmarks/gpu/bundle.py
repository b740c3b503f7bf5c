"""Collect in a folder what a GPU machine without a registry needs; run by `make gpu-bundle`, on Linux x86-64.

The folder holds this tree's wheel and the wheels of its pure dependencies for Python 3.12. PyTorch, Triton, NumPy, pyarrow,
tensorboard, transformers and lightning are taken as given there: run.sh installs only what cannot be imported.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from build_wheels import ROOT, build

PINS = [ROOT / "requirements" / name for name in ("core.txt", "dev.txt")]
# what these pin and a machine that holds PyTorch and tensorboard may lack
CARRIED = {
    *(
        "annotated-doc",
        "annotated-types",
        "expecttest",
        "markdown-it-py",
        "mdurl",
        "orjson",
        "packaging",
        "pydantic",
        "pydantic_core",
    ),
    *("Pygments", "PyYAML", "rich", "safetensors", "shellingham", "typer", "typing_extensions", "typing-inspection"),
}
MOST = 60 << 20  # bytes


def collect(folder: Path) -> int:
    """Fill an empty folder and return its bytes. Raises ValueError above 60 MiB, CalledProcessError where a step fails."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    build(folder, "x86_64")
    pinned = [line for path in PINS for line in path.read_text(encoding="utf-8").splitlines()]
    pins = [line for line in pinned if line.split("==")[0] in CARRIED]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 28)] + ["--platform=manylinux2014_x86_64"]
    options = ["--no-deps", "--only-binary=:all:", "--python-version=3.12", *platforms, "--quiet", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, *pins], check=True)
    size = sum(path.stat().st_size for path in folder.iterdir())
    if size > MOST:
        raise ValueError(f"{folder} holds {size >> 20} MiB and may hold {MOST >> 20}: carry less (CARRIED in {__file__})")
    return size


if __name__ == "__main__":
    target = Path(sys.argv[1]).resolve()
    print(f"{target}: {collect(target) / (1 << 20):.1f} MiB in {len([*target.iterdir()])} wheels")
