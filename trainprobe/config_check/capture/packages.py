"""Every installed distribution with its build tag, and what stands beside them: python, driver, compilers, devices, commit."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from trainprobe.engine.at_start import VARIABLE as AT_START


def capture_packages(code: Path | None = None) -> dict[str, Any]:
    """Return {"distributions": name → version, "platform": name → text, "code": {"commit", "dirty", "changes"} or {}}.

    code: a file or folder of the training code, whose git state is asked; by default that of the main script.
    """
    return {"distributions": _distributions(), "platform": _platform(), "code": _code(code or _main_script())}


def _distributions() -> dict[str, str]:
    """Return each distribution once; where a name is there twice, the first on the path is the one that is imported."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        held: Any = distribution.metadata  # None where a distribution's folder has lost its METADATA file
        name = held["Name"] if held is not None else None
        if not name:
            continue
        plain = re.sub(r"[-_.]+", "-", name).lower()
        if plain not in found:
            found[plain] = distribution.version + _commit(distribution)
    return dict(sorted(found.items()))


def _commit(distribution: metadata.Distribution) -> str:
    """Return ` @commit` of a distribution that was installed from a repository."""
    try:
        origin = json.loads(distribution.read_text("direct_url.json") or "{}")
    except (ValueError, OSError):
        return ""
    commit = origin.get("vcs_info", {}).get("commit_id", "") if isinstance(origin, dict) else ""
    return f" @{commit[:12]}" if commit else ""


def _platform() -> dict[str, str]:
    found = {
        "python": f"{platform.python_implementation()} {platform.python_version()}",
        "cpu": _cpu_model(),
        "compiler": _first_line(["gcc", "--version"]),
        "cann": _cann(),
        **_devices(),
        **_torch_builds(),
    }
    return {name: text for name, text in found.items() if text}


def _cpu_model() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine()
    match = re.search(r"^(?:model name|Hardware|cpu model)\s*:\s*(.+)$", text, re.M)
    return match[1].strip() if match else platform.machine()


def _devices() -> dict[str, str]:
    """Return driver and device names, asked of the vendor's tool so that no device is initialised."""
    lines = _output(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]).splitlines()
    pairs = [line.rsplit(",", 1) for line in lines if "," in line]
    if pairs:
        return {"devices": _counted([p[0].strip() for p in pairs]), "driver": pairs[0][1].strip()}
    boards = re.findall(r"\|\s*\d+\s+(\w*910\w*|\w*310\w*)\s", _output(["npu-smi", "info"]))
    version = re.search(r"npu-smi\s+([\w.]+)", _output(["npu-smi", "-v"]) if boards else "")
    return {"devices": _counted(boards), "driver": version[1] if version else ""} if boards else {}


def _counted(names: list[str]) -> str:
    return ", ".join(f"{names.count(name)} × {name}" for name in dict.fromkeys(names))


def _torch_builds() -> dict[str, str]:
    """Return what torch was built with, if the training has imported it."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "version"):
        return {}
    found = {"cuda": str(torch.version.cuda or ""), "hip": str(getattr(torch.version, "hip", None) or "")}
    if torch.version.cuda:
        found["cudnn"] = str(torch.backends.cudnn.version() or "")
        nccl = getattr(getattr(torch.cuda, "nccl", None), "version", None)
        found["nccl"] = ".".join(map(str, nccl())) if nccl is not None else ""
    return found


def _cann() -> str:
    for root in (os.environ.get("ASCEND_HOME_PATH"), "/usr/local/Ascend/ascend-toolkit/latest"):
        if not root:
            continue
        for file in sorted(Path(root).glob("**/ascend_toolkit_install.info"))[:1] + sorted(Path(root).glob("version.info"))[:1]:
            match = re.search(r"^[Vv]ersion=(\S+)", file.read_text(encoding="utf-8", errors="replace"), re.M)
            if match:
                return match[1]
    return ""


def _main_script() -> Path:
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    return Path(main) if main else Path.cwd()


def _code(place: Path) -> dict[str, Any]:
    folder = place if place.is_dir() else place.parent
    commit = _output(["git", "-C", str(folder), "rev-parse", "HEAD"]).strip()
    if not commit:
        return {}
    state = _output(["git", "-C", str(folder), "--no-optional-locks", "status", "--porcelain", "--untracked-files=no"])
    changes = _output(["git", "-C", str(folder), "--no-optional-locks", "diff", "HEAD"]) if state.strip() else ""
    return {
        "commit": commit,
        "dirty": bool(state.strip()),
        "changes": hashlib.sha256(changes.encode()).hexdigest()[:12] if changes else "",
    }


def _first_line(command: list[str]) -> str:
    return (_output(command).splitlines() or [""])[0].strip()


def _output(command: list[str]) -> str:
    """Return what a command prints, or nothing where it is absent, fails or takes longer than five seconds."""
    if shutil.which(command[0]) is None:
        return ""
    quiet = {k: v for k, v in os.environ.items() if k not in {"LD_PRELOAD", AT_START}}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, env=quiet, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 else ""
