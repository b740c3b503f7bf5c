"""The fixture `trainprobe_preflight`: a test of loss, model and batch fails where a property is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trainprobe.preflight.report import Report


@pytest.fixture
def trainprobe_preflight() -> Callable[..., Report]:
    """Return `trainprobe.preflight`, which fails the test where something is broken, or nothing could be tested."""

    def check(loss: Callable[[Any, Any], Any], model: Any, batch: Any, **options: Any) -> Report:
        import trainprobe

        report = trainprobe.preflight(loss, model, batch, **options)
        if report.verdict.code:
            pytest.fail(str(report), pytrace=False)
        return report

    return check
