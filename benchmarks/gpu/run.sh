#!/usr/bin/env bash
# Installs the bundle into a folder of its own and runs all parts; further words go to `python -m benchmarks.gpu`.
#   bash benchmarks/gpu/run.sh                 on a machine with a GPU, after `make gpu-bundle` elsewhere
#   bash benchmarks/gpu/run.sh --rehearse      the same on a CPU, with small sizes
# OUT (default gpu_out) gets results.jsonl, written part by part, and log.txt; PYTHON chooses the interpreter.
set -euo pipefail
cd "$(dirname "$0")/../.."
bundle=${BUNDLE:-dist/gpu}
python=${PYTHON:-python3}
export OUT=${OUT:-$PWD/gpu_out}
mkdir -p "$OUT"
OUT=$(cd "$OUT" && pwd)
site=$(mktemp -d)
trap 'rm -rf "$site"' EXIT
"$python" - "$bundle" "$site" <<'PY'
import importlib.util, pathlib, subprocess, sys
bundle, site = map(pathlib.Path, sys.argv[1:])
modules = {"pyyaml": "yaml", "markdown_it_py": "markdown_it", "annotated_doc": "annotated_doc"}
wheels = []
for wheel in sorted(bundle.glob("*.whl")):
    name = wheel.name.split("-")[0].lower()
    if name == "trainprobe" or importlib.util.find_spec(modules.get(name, name)) is None:
        wheels.append(str(wheel))
if not any("trainprobe-" in wheel for wheel in wheels):
    raise SystemExit(f"{bundle} holds no wheel of trainprobe: run `make gpu-bundle` first, or set BUNDLE")
# pydantic and pydantic_core go together: one of them from here and one from there would not fit
if any("/pydantic" in wheel for wheel in wheels):
    wheels = sorted({*wheels, *map(str, bundle.glob("pydantic*.whl"))})
pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--target", str(site)]
subprocess.run([*pip, *wheels], check=True)
print("installed:", *(pathlib.Path(wheel).name for wheel in wheels))
PY
cp -r benchmarks "$site/"
cd "$site"
PYTHONPATH="$site" "$python" -m benchmarks.gpu --output "$OUT" "$@"
