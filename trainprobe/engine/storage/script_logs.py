"""Where the script's own trainer logs to, as its framework told: sinks go there, too, where the plan says `join_runs`.

What a client itself knows, as the open run of W&B, is asked of the client.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from trainprobe.engine.plan.model import Plan

SCRIPT_LOGS: ContextVar[Mapping[str, Any]] = ContextVar("script_logs")
"""By the name of a sink, while the sinks are opened: `tensorboard`: the folder of its event files; `mlflow`: client and run."""


def script_log(sink: str, plan: Plan) -> Any:
    """Return where the script's trainer logs to, of what this sink writes; None where the plan wants it apart."""
    return SCRIPT_LOGS.get({}).get(sink) if plan.join_runs else None
