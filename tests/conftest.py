"""What every test stands on: one thread a process, a tool that raises its own faults, and frameworks that must be there."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, settings

from tests import matrices, proofs
from tests.proofs import pytest_runtest_logreport

__all__ = ["cluster", "pytest_runtest_logreport", "require"]

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TRAINPROBE_ON_ERROR", "raise")
# unbuffered, `print` writes a line and its end apart, and the lines of ranks that share a pipe mix
os.environ.pop("PYTHONUNBUFFERED", None)

# what `make test` installs: where it is missing in CI, the tests that need it would silently not run, so they fail
INSTALLED_BY_MAKE = (
    "torch",
    "tensorboard",
    "openpyxl",
    "lightning",
    "transformers",
    "accelerate",
    "deepspeed",
    "megatron",
    "ray",
    "zarr",
    "peft",
    "cryptography",
)

settings.register_profile(
    "trainprobe",
    deadline=None,
    derandomize=bool(os.environ.get("CI")),
    suppress_health_check=[HealthCheck.too_slow],
    max_examples=matrices.examples(100),
)
settings.load_profile("trainprobe")


def _settings_of_torch() -> dict[str, Any]:
    """Return the settings of this process on which the bits of a training depend."""
    torch = cast(Any, sys.modules.get("torch"))
    if torch is None:
        return {}
    return {
        "threads": torch.get_num_threads(),
        "default dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "matmul precision": torch.get_float32_matmul_precision(),
        "oneDNN": torch.backends.mkldnn.enabled,
        "autocast": torch.is_autocast_enabled("cpu"),
    }


@pytest.fixture(scope="module", autouse=True)
def torch_is_left_as_it_was() -> Iterator[None]:
    """Fail the last test of a file that leaves a setting of torch changed: tests after it would get other bits."""
    before = _settings_of_torch()
    yield
    after = _settings_of_torch()
    changed = {name: (was, after[name]) for name, was in before.items() if after[name] != was}
    if "threads" in changed:
        sys.modules["torch"].set_num_threads(before["threads"])
    assert not changed, f"settings of torch that this file changed and left: {changed}"


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Freeze what was imported until here: the collector and the audit's search for copies skip a million objects."""
    gc.collect()
    gc.freeze()


_LEFT_OUT = pytest.StashKey[int]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out exhaustive cases, and put files with slow tests first: no worker then ends with a long file alone."""
    proofs.pytest_collection_modifyitems(items)
    _leave_out_exhaustive(config, items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


def _leave_out_exhaustive(config: pytest.Config, items: list[pytest.Item]) -> None:
    if matrices.all_cases():
        return
    kept = [item for item in items if not item.get_closest_marker("exhaustive")]
    proved = {proof for item in kept for proof in proofs.proofs_of(item)}
    left_out: list[pytest.Item] = []
    for item in items:
        if item.get_closest_marker("exhaustive"):
            alone = {*proofs.proofs_of(item)} - proved  # what the support table says by this case only
            proved |= alone
            (kept if alone else left_out).append(item)
    config.stash[_LEFT_OUT] = len(left_out)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in set(left_out)]


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Leave what was proved; a worker says how many cases it left out. What was frozen can be freed again as Python ends."""
    gc.unfreeze()
    proofs.pytest_sessionfinish(session)
    if hasattr(session.config, "workerinput"):
        cast(Any, session.config).workeroutput["left out"] = session.config.stash.get(_LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take how many cases a worker left out: each worker collects them all."""
    node.config.stash[_LEFT_OUT] = getattr(node, "workeroutput", {}).get("left out", 0)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Say how many cases were left out, and how to run them."""
    if count := config.stash.get(_LEFT_OUT, 0):
        how = f"run them with `make test-all`, or with {matrices.EXHAUSTIVE}=1"
        terminalreporter.write_line(f"{count} exhaustive case{'s were' if count > 1 else ' was'} left out: {how}")


@pytest.fixture(scope="session")
def require() -> Callable[[str], ModuleType]:
    """Return a function that imports an optional library, or skips the test with the reason.

    It fails instead of skipping when the environment variable TRAINPROBE_REQUIRE names the library (names between commas,
    or `all`), and in CI (CI=true) for whatever `make test` installs.
    """

    def import_or_skip(library: str) -> ModuleType:
        try:
            return importlib.import_module(library)
        except ImportError as error:
            reason = f"needs {library}: {error}"
        if _must_have(library):
            pytest.fail(f"{reason} (and it must be installed here)")
        pytest.skip(reason)

    return import_or_skip


@pytest.fixture
def cluster(require: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A Ray cluster of two processes on this machine; the test is skipped where such a cluster cannot start at all."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    ray = cast(Any, require("ray"))
    try:
        ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
    except (OSError, RuntimeError) as error:
        pytest.skip(f"Ray cannot start here: {error}")
    yield
    ray.shutdown()


def _must_have(library: str) -> bool:
    named = {name.strip() for name in os.environ.get("TRAINPROBE_REQUIRE", "").split(",")}
    top = library.partition(".")[0]
    in_ci = os.environ.get("CI", "").lower() in {"1", "true"} and top in INSTALLED_BY_MAKE
    return in_ci or bool(named & {library, top, "all"})
