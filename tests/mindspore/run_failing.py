"""A training in which a kernel does not exist: what is raised, and what the probe made of it.

Argument: the output folder or "bare".
"""

from __future__ import annotations

import io
import json
import sys
from contextlib import redirect_stderr
from typing import Any

import mindspore as ms
from mindspore import nn

from tests.mindspore import tiny
from trainprobe.integrations.mindformers import ProbeCallback


class Fails(tiny.Loss):
    def construct(self, logits: Any, labels: Any) -> Any:
        return super().construct(ms.mint.cumsum(logits, 0), labels)  # there is no CPU kernel


def main(output: str) -> None:
    ms.set_device("CPU")
    before = nn.Cell.__call__
    tiny.Loss = Fails  # type: ignore[misc]
    plan = {"output": output, "level": "L0", "stacks": False, "monitor": True}
    printed = io.StringIO()
    try:
        with redirect_stderr(printed):
            callback = ProbeCallback(plan) if output != "bare" else None
            tiny.train(tiny.PYNATIVE, [callback] if callback else [])
    except RuntimeError as error:
        told: dict[str, Any] = {"error": str(error).splitlines()[0], "restored": nn.Cell.__call__ is before}
        if callback is not None:
            told |= {"closed": callback.session.probe is None, "findings": [f.rule for f in callback.findings]}
            told["end"] = next(
                (line for line in printed.getvalue().splitlines() if line.startswith("trainprobe: 1 step")), None
            )
        print(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1])
