"""MindSpeed on top of Megatron-LM: the same flag and the same line, before or after `import mindspeed.megatron_adaptor`.

    from trainprobe.integrations import mindspeed

    mindspeed.install()                   # `--probe-plan plan.yaml` now stands among MindSpeed's own arguments
    import mindspeed.megatron_adaptor     # or above: the order is free

MindSpeed replaces functions of Megatron by name, when its adaptor is imported, and drops what stood there before. The probe
therefore puts nothing in place until Megatron has built model and optimizer: by then MindSpeed is done, and the probe stands
outermost. What it puts around that moment itself (`setup_model_and_optimizer`) MindSpeed only wraps, never replaces. Nothing of
Megatron is imported here, because MindSpeed must come first to some of it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.integrations import megatron
from trainprobe.watching import PlanSource

FEATURES = "mindspeed.features_manager"


def install(plan: PlanSource = None, **overrides: Any) -> None:
    """Watch the run that Megatron's `pretrain` starts under MindSpeed.

    plan: as for `trainprobe.Probe`; None: what `--probe-plan` says; without either, nothing is watched.
    """
    imports = ImportWatch()

    def then(features: Any) -> None:
        imports.stop()
        add_feature(features.MindSpeedFeaturesManager)

    imports.wait_for(FEATURES, then)
    megatron.install(plan, only_with_flag=plan is None, **overrides)


def add_feature(manager: Any) -> None:
    """Add a feature to MindSpeed's list whose only argument is `--probe-plan` and which patches nothing."""
    if any(feature.feature_name == "probe_plan" for feature in manager.FEATURES_LIST):
        return
    nothing = dict.fromkeys(
        (
            *("pre_validate_args", "validate_args", "post_validate_args", "pre_register_patches", "register_patches"),
            *("incompatible_check", "dependency_check"),
        ),
        lambda *args: None,  # pyright: ignore[reportUnknownLambdaType]
    )
    feature = SimpleNamespace(feature_name="probe_plan", optimization_level=2, default_patches=False, **nothing)
    feature.register_args = megatron.add_flag
    feature.is_need_apply = lambda args: False  # pyright: ignore[reportUnknownLambdaType]
    manager.FEATURES_LIST.append(feature)
