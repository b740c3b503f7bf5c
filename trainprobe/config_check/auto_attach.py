"""Begins the capture of a program that was not edited, once it has imported torch."""

from __future__ import annotations

import atexit
import json
import os
from pathlib import Path

from trainprobe.config_check.capture.hyperparameters import SettingsWatch
from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.config_check.settings import CapturedSettings, make_settings
from trainprobe.engine import at_start as python_start

VARIABLE = "TRAINPROBE_CONFIG_CHECK"


def environment_for(settings: CapturedSettings, scripts: list[str]) -> dict[str, str]:
    """Return the environment in which a command is captured."""
    chosen = {
        "output": str(settings.output.absolute()),
        "micro_steps": settings.micro_steps,
        "tokens": settings.tokens,
        "captures": list(settings.captures),
        "scripts": [str(Path(script).absolute()) for script in scripts],
    }
    return {**python_start.environment_for(__name__), VARIABLE: json.dumps(chosen)}


def at_start() -> None:
    """Watch argument parsers from now on, and all else from the moment in which torch is imported."""
    watch = SettingsWatch()
    watch.install()
    ImportWatch().wait_for("torch", lambda torch: begin(watch))


def begin(watch: SettingsWatch) -> None:
    """Start to capture this process; it writes a pack only if it trains a model."""
    from trainprobe.config_check.capture.recorder import SettingsRecorder

    recorder = SettingsRecorder(make_settings(json.loads(os.environ[VARIABLE])), watch)
    recorder.guard.run(recorder.start)
    recorder.guard.run(recorder.search)
    atexit.register(recorder.finish, wait=True)
