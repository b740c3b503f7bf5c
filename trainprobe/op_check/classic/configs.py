"""The config files of mindstudio-probe's accuracy check: config.json, config.yaml, and config_op.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainprobe.engine.storage.safe_files import parse_yaml, read_text
from trainprobe.errors import FormatError, UsageError

_LARGEST = 1 << 20  # bytes
_SECTIONS = ("acc_check", "run_ut")
_ONLINE = ("is_online", "nfs_path", "host", "port", "rank_list", "tls_path")
_MOST_DIGITS = 17  # of a float64


@dataclass(frozen=True, slots=True)
class CheckConfig:
    """white_list, black_list: operators. error_data_path: where failing calls go. precision: digits of numbers in files."""

    white_list: tuple[str, ...] = ()
    black_list: tuple[str, ...] = ()
    error_data_path: Path = Path()
    precision: int = 14
    notes: tuple[str, ...] = ()


def read_config(path: Path) -> CheckConfig:
    """Read config.json (its section acc_check, or run_ut in older releases) or config.yaml. Raises FormatError, UsageError."""
    whole = _read(path)
    section = next((whole[name] for name in _SECTIONS if isinstance(whole.get(name), Mapping)), whole)
    unused = [name for name in _ONLINE if section.get(name)]
    notes = [f"{path}: {', '.join(unused)}: `trainprobe op-check serve` judges while a training runs"] if unused else []
    if section.get("quantization_api_list") and path.suffix == ".json":
        notes.append(f"{path}: quantization_api_list has no effect: operators without a reference are SKIP")
    return CheckConfig(
        _names(path, section, "white_list"),
        _names(path, section, "black_list"),
        Path(str(section.get("error_data_path") or ".")),
        _whole(path, section, "precision", 14, range(1, _MOST_DIGITS + 1)),
        tuple(notes),
    )


@dataclass(frozen=True, slots=True)
class OpConfig:
    """config_op.json. call: `Functional.softmax.0`."""

    dump: Path
    call: str
    direction: str = "forward"
    random_data: bool = True
    seed: int = 1234
    repeat: int = 1
    extract: Path | None = None


def read_op_config(path: Path) -> OpConfig:
    """Read config_op.json. Raises FormatError, and UsageError for a value that is not possible."""
    told = _read(path)
    direction = _choice(path, told, "propagation", ("forward", "backward"))
    mode = _choice(path, told, "data_mode", ("random_data", "real_data"))
    source = told.get("dump_json_path") or ""
    if not source:
        raise UsageError(f"{path}: dump_json_path is missing: the dump.json that holds the operator")
    name = str(told.get("api_name") or "")
    if name.count(".") < 2:
        raise UsageError(f"{path}: api_name {name!r} is not a call such as Functional.softmax.0")
    return OpConfig(
        Path(str(source)),
        name,
        direction,
        mode == "random_data",
        _whole(path, told, "random_seed", 1234, range(2**63)),
        _whole(path, told, "iter_times", 1, range(1, 1001)) if mode == "random_data" else 1,
        Path(str(told["extract_api_path"])) if told.get("extract_api_path") else None,
    )


def _read(path: Path) -> Mapping[str, Any]:
    """Read JSON, which YAML includes, or YAML."""
    told = parse_yaml(read_text(path, _LARGEST).replace("\t", " "), str(path))
    if not isinstance(told, Mapping):
        raise FormatError(f"{path} is no object of settings: expected keys such as white_list")
    return told


def _names(path: Path, section: Mapping[str, Any], key: str) -> tuple[str, ...]:
    names = section.get(key) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise UsageError(f"{path}: {key} is {names!r}, and has to be a list of operators such as conv2d")
    return tuple(names)


def _whole(path: Path, section: Mapping[str, Any], key: str, default: int, allowed: range) -> int:
    value = section.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or value not in allowed:
        raise UsageError(f"{path}: {key} is {value!r}, and has to be a whole number from {allowed.start} to {allowed.stop - 1}")
    return value


def _choice(path: Path, section: Mapping[str, Any], key: str, allowed: tuple[str, str]) -> str:
    value = section.get(key) or allowed[0]
    if value not in allowed:
        raise UsageError(f"{path}: {key} is {value!r}, and has to be {' or '.join(allowed)}")
    return value
