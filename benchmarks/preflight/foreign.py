"""What `trainprobe preflight` says of the programs of tests/foreign, as a table of markdown; in their environment.

python benchmarks/preflight/foreign.py [PROGRAM ...]    # by its path, as packages there have a folder `benchmarks`, too
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LIMIT = 600  # seconds of a program


def row(name: str, lines: list[dict[str, Any]], fault: str = "") -> str:
    """Return the row of a model or program. lines: as `--json` has them. fault: why there are none."""
    told = [f"{line['name']}: {line['text']}" for line in lines if line["status"] in ("BROKEN", "by design")]
    kinds = {line["status"] for line in lines}
    kind = "not tested" if fault else "finding" if "BROKEN" in kinds else "by design" if "by design" in kinds else "healthy"
    return f"| {name} | {kind} | {(fault or '; '.join(told))[:160].replace('|', '/')} |\n"


def of_programs(names: list[str]) -> Iterator[str]:
    """Yield a row for each program that is started by Python: the quick ones where none is named."""
    from tests.foreign import running
    from tests.foreign.catalog import PROGRAMS

    where = running._places()
    for program in PROGRAMS:
        if program.name not in names if names else not program.quick or program.launcher:
            continue
        with TemporaryDirectory() as folder:
            for name in ("work", "observed", "home"):
                Path(folder, name).mkdir()
            Path(folder, "data").symlink_to(where["data"])
            Path(folder, "work", "data").symlink_to(Path(where["data"]) / "lmdata")
            words = [running._filled(word, where) for word in program.start.split()]
            command = [sys.executable, "-m", "trainprobe", "preflight", "--json", "answer.json", "--", *words]
            done = subprocess.run(command, cwd=Path(folder, "work"), env=running._environment(program, Path(folder), where),
                                  capture_output=True, text=True, timeout=LIMIT, check=False)  # fmt: skip
            answer = Path(folder, "work", "answer.json")
            lines = json.loads(answer.read_text())["properties"] if answer.is_file() else []
            fault = [line for line in done.stderr.splitlines() if "trainprobe: " in line][-1:] or done.stderr.splitlines()[-1:]
            yield row(f"{program.package or program.entry}: {program.name}", lines, "" if lines else "".join(fault))


def main(names: list[str]) -> None:
    """Print the table."""
    sys.stdout.write("| program | | what was seen |\n|---|---|---|\n")
    for line in of_programs(names):
        sys.stdout.write(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
