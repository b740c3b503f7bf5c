"""The monitor's front of mindstudio-probe: `TrainerMon`, for scripts that have it.

    from trainprobe.pytorch import TrainerMon
    monitor = TrainerMon("monitor_config.json", params_have_main_grad=False)
    monitor.set_monitor(model, grad_acc_steps=4, optimizer=optimizer)

Its JSON is read as a plan (docs/migration.md). A step is an update of the optimizer; nothing else in the loop changes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainprobe.engine.core.findings import Console
from trainprobe.engine.core.naming import chunks_of
from trainprobe.engine.core.records import StepData
from trainprobe.engine.core.topology import place_from_environment
from trainprobe.engine.plan.file import read_plan_file
from trainprobe.engine.plan.legacy import is_of_monitor
from trainprobe.engine.plan.loading import load_plan
from trainprobe.errors import PlanError, UsageError
from trainprobe.watching import Probe

FOLDER = "MONITOR_OUTPUT_DIR"  # environment variable that names the output folder
_BEFORE = "{}: hand the model and the optimizer over first, set_monitor(model, grad_acc_steps, optimizer)"
_MEGATRON = ("megatron.", "mindspeed.")


class TrainerMon:
    """Watches a training as the monitor's JSON says: a plain loop, Megatron, or DeepSpeed.

    config_file_path: the JSON, or a plan. process_group, params_have_main_grad, opt_ty: not used; where gradients and states
    are is learned from the model and the optimizer. The CSV files go to the folder that the environment variable
    MONITOR_OUTPUT_DIR names, or to `./monitor_output`. Raises PlanError for what cannot be carried out.
    """

    def __init__(
        self,
        config_file_path: str | os.PathLike[str] | Mapping[str, Any],
        process_group: Any = None,
        params_have_main_grad: bool = True,
        opt_ty: Any = None,
    ) -> None:
        self._folder = {"output": os.environ[FOLDER]} if os.environ.get(FOLDER) else {}
        given = config_file_path if isinstance(config_file_path, Mapping) else read_plan_file(Path(config_file_path))
        own = {"on_existing": "replace"} if is_of_monitor(given) else {}  # the log; the CSV files have new folders
        self.plan = load_plan(config_file_path, **self._folder, **own)
        if self.plan.section("monitor") is None:
            raise PlanError(f"{config_file_path}: no `monitor`: this is no configuration of a monitor")
        self.probe: Probe | None = None
        self._optimizer: Any = None
        self._watched: Any = None
        self._step_data: StepData | None = None
        if not place_from_environment().rank:
            for note in self.plan.notes:
                Console().line(note)

    def set_monitor(
        self,
        model: Any,
        optimizer: Any = None,
        grad_acc_steps: Any = 1,
        tp_group: Any = None,
        dp_group: Any = None,
        start_iteration: int = 0,
    ) -> None:
        """Watch `model`, a module or a list of chunks, from its next step on.

        optimizer, grad_acc_steps: in either order, as the releases differ in it; micro-batches are counted as they come.
        tp_group, dp_group: not used: every rank writes what it holds. start_iteration: number of the first step, for a run that
        is resumed.
        A second call ends what the first one began. Raises UsageError without an optimizer.
        """
        if isinstance(optimizer, int):
            optimizer, grad_acc_steps = (grad_acc_steps if not isinstance(grad_acc_steps, int) else None), optimizer
        optimizer = self._optimizer if optimizer is None else optimizer
        if optimizer is None:
            raise UsageError("set_monitor needs the optimizer: set_monitor(model, grad_acc_steps, optimizer)")
        self.close()
        plan = load_plan(self.plan, on_existing="continue") if start_iteration else self.plan
        self.probe = self._watch(model, optimizer, plan, start_iteration)
        self.probe.watchers.append(self._keep)

    def _watch(self, model: Any, optimizer: Any, plan: Any, first_step: int) -> Probe:
        chunks = chunks_of(model)
        kinds = {type(optimizer).__module__, *(type(o).__module__ for o in getattr(optimizer, "chained_optimizers", ()))}
        if any(kind.startswith(_MEGATRON) for kind in kinds):
            from trainprobe.integrations import megatron

            self._watched = megatron.attach(model, optimizer, plan, first_step=first_step)
            return self._watched
        if len(chunks) > 1:
            raise UsageError("several chunks of a model need the optimizer of Megatron that trains them: hand over one module")
        if "deepspeed" in sys.modules:
            from trainprobe.integrations import deepspeed

            if deepspeed.is_engine(chunks[0]):
                self._watched = _Engine(deepspeed.attach(chunks[0], plan))
                return self._watched.probe
        from trainprobe.integrations import torch_loop

        self._watched = loop = torch_loop.attach(chunks[0], optimizer, plan, first_step=first_step)
        assert loop.session.probe is not None
        return loop.session.probe

    def _keep(self, step_data: StepData) -> tuple[()]:
        """Keep the numbers of the last step, for `generate_wgrad_metrics` and `generate_xy_metrics`."""
        self._step_data = step_data
        return ()

    def set_wrapped_optimizer(self, optimizer: Any) -> None:
        """Hand over the optimizer for a `monitor_gnorm_with_ad` that follows (releases before 1.2.2)."""
        self._optimizer = optimizer

    monitor_gnorm_with_ad = set_monitor  # releases before 1.2.2

    def generate_wgrad_metrics(self, *_: Any) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the statistics of the gradients of the last step that has ended: (as the optimizer saw them, unreduced).

        Each is parameter name → statistic → number. Raises UsageError before `set_monitor`.
        """
        return self._of("parameter", "grad"), self._of("parameter", "grad_unreduced")

    def generate_xy_metrics(self) -> tuple[dict[str, dict[str, float]], dict[str, dict[str, float]]]:
        """Return the statistics of modules in the last step that has ended: (inputs and outputs, their gradients).

        Each is name, as `layers.0.fc.output.0`, → statistic → number; of several micro-batches the last one's. Raises
        UsageError before `set_monitor`.
        """
        return self._of("module", "input", "output"), self._of("module", "grad_input", "grad_output")

    def _of(self, kind: str, *slots: str) -> dict[str, dict[str, float]]:
        if self.probe is None:
            raise UsageError(_BEFORE.format("no numbers yet"))
        self.probe.settle()
        records = self._step_data.records() if self._step_data is not None else ()
        return {
            r.site.name if kind == "parameter" else f"{r.site.name}.{r.site.slot}": dict(r.values)
            for r in records
            if r.site.kind == kind and r.site.slot.partition(".")[0] in slots
        }

    def adhoc_check(
        self, target_tensor: Any, module_name: str, tensor_name: str, rank_list: Any = (), ops_list: Any = ()
    ) -> None:
        """Record a tensor of the step that is going on as `module_name.tensor_name`, on the ranks of `rank_list` (empty: all).

        ops_list: not used: the plan's statistics are recorded. Raises UsageError before `set_monitor`.
        """
        if self.probe is None:
            raise UsageError(_BEFORE.format("adhoc_check"))
        if not rank_list or self.probe.place.rank in rank_list:
            self.probe.save(target_tensor, f"{module_name}.{tensor_name}", save_backward=False)

    def reload_xy(self, xy_distribution: bool = False) -> None:
        """Watch what modules hand on from the next step on, or no longer. Raises UsageError before `set_monitor`."""
        if self.probe is None:
            raise UsageError(_BEFORE.format("reload_xy"))
        self.probe.change(monitor={"activations": xy_distribution, "activation_gradients": xy_distribution})

    @property
    def ops(self) -> list[str]:
        """The statistics that are recorded. Setting them while the training runs changes nothing, which is printed."""
        return list(self.plan.statistics)

    @ops.setter
    def ops(self, names: Any) -> None:
        Console().line(f"ops = {names!r}: {', '.join(self.ops)} are recorded until the end: name all in `ops` of the JSON")

    def close(self) -> None:
        """Take everything off and write what is pending; done by itself when the process ends."""
        watched, self._watched = self._watched, None
        if watched is not None:
            watched.close()
        self.probe = None


class _Engine:
    """An engine of DeepSpeed that is watched."""

    def __init__(self, engine: Any) -> None:
        from trainprobe.integrations import deepspeed

        probe = deepspeed.probe_of(engine)
        assert probe is not None
        self.engine, self.probe = engine, probe

    def close(self) -> None:
        from trainprobe.integrations import deepspeed

        deepspeed.detach(self.engine)


class TrainerMonitorV2:
    """The second monitor of release 26.2: `start(model, optimizer)`, `step()`, `stop()`.

    config_path: its JSON, or a plan. fr: not used. Raises PlanError for what cannot be carried out.
    """

    def __init__(self, config_path: str | os.PathLike[str] | Mapping[str, Any], fr: str | None = None) -> None:
        self._monitor = TrainerMon(config_path)

    def start(self, model: Any = None, optimizer: Any = None, **context: Any) -> None:
        """Watch `model` from its next step on; `context` is not used. Raises UsageError without an optimizer."""
        self._monitor.set_monitor(model, optimizer)

    def step(self) -> None:
        """Do nothing: a step is an update of the optimizer."""

    def stop(self) -> None:
        """Take everything off and write what is pending."""
        self._monitor.close()
