"""The command lines of mindstudio-probe's accuracy check."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import typer

CHECKS = ("acc_check", "run_ut", "multi_acc_check", "multi_run_ut")
COMMANDS = (*CHECKS, "api_precision_compare", "op_generate")
_MOST_PROCESSES = 64


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """Raise what the command line shows as a fault of usage."""
        raise typer.BadParameter(f"{self.prog}: {message}")


def parse(command: str, arguments: Sequence[str]) -> argparse.Namespace:
    """Return what was asked of a command. Raises typer.BadParameter."""
    makers = {"api_precision_compare": _precision, "op_generate": _generate}
    parser = _Parser(prog=f"trainprobe op-check classic {command}", allow_abbrev=False)
    makers.get(command, _check)(parser)
    if command.startswith("multi_"):
        parser.add_argument("-n", "--num_splits", type=int, default=8, help="here: the threads of the one process that judges")
    given = parser.parse_args(list(arguments))
    if not 1 <= getattr(given, "num_splits", 1) <= _MOST_PROCESSES:
        parser.error(f"-n is {given.num_splits}, and has to be from 1 to {_MOST_PROCESSES}")
    return given


def _check(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-api_info", "--api_info_file", type=Path, required=True, help="dump.json, or the folder of a rank")
    parser.add_argument("-o", "--out_path", type=Path, default=Path(), help="where the CSV files go")
    parser.add_argument("-save_error_data", action="store_true", help="write each failing call with a script that runs it")
    parser.add_argument("-j", "--jit_compile", action="store_true", help="no effect: nothing is compiled")
    parser.add_argument("-d", "--device", "--device_id", nargs="+", default=None, help="no effect: no device is needed")
    parser.add_argument("-csv_path", "--result_csv_path", type=Path, help="result file of a run that was interrupted: go on")
    parser.add_argument("-f", "--filter_api", action="store_true", help="no effect: equal calls are judged once")
    parser.add_argument("-config", "--config_path", type=Path, help="config.json or config.yaml: lists, error_data_path")


def _precision(parser: argparse.ArgumentParser) -> None:
    for short, name in (("-npu", "--npu_csv_path"), ("-gpu", "--gpu_csv_path")):
        parser.add_argument(short, name, type=Path, required=True, help="an accuracy_checking_details file")
    parser.add_argument("-o", "--out_path", type=Path, default=Path(), help="where the CSV files go")


def _generate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-i", "--config_input", type=Path, required=True, help="config_op.json")
    parser.add_argument("-o", "--api_output_path", type=Path, required=True, help="where the script goes")
