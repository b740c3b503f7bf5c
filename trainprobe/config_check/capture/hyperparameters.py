"""Settings as the running program holds them: argparse namespaces and what each framework made of its own arguments.

One function a framework; each only asks modules that the training has imported itself.
"""

from __future__ import annotations

import argparse
import functools
import re
import sys
import weakref
from collections.abc import Callable
from typing import Any

from trainprobe.config_check.capture.on_import import ImportWatch
from trainprobe.config_check.capture.patches import Patches, after, before
from trainprobe.config_check.capture.plain_values import argument_names, plain
from trainprobe.config_check.capture.setting_files import flat, source
from trainprobe.config_check.capture.sources import is_own
from trainprobe.config_check.capture.wrapper_settings import wrapper_values
from trainprobe.config_check.names import load_names

_WORD = re.compile(r"[\w.+-]{1,60}")
# module that defines it → class whose instances hold settings, and the kind under which they stand in a pack
_HOLDERS = (
    ("transformers.trainer", "Trainer", "transformers"),
    ("deepspeed.runtime.engine", "DeepSpeedEngine", "deepspeed"),
    ("lightning.pytorch.trainer.trainer", "Trainer", "lightning"),
    ("pytorch_lightning.trainer.trainer", "Trainer", "lightning"),
)


class SettingsWatch:
    """Sees argument parsers at work and the objects in which frameworks keep their settings."""

    def __init__(self) -> None:
        self.on_model: Callable[[Any], None] = lambda model: (
            None
        )  # told the model of a framework that does not call its forward
        self._patches = Patches()
        self._installed = False
        self._imports = ImportWatch()
        self._namespaces: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}  # program → what was parsed, what it holds now
        self._holders: list[tuple[str, weakref.ref[Any], dict[str, Any]]] = []

    def install(self) -> None:
        """Replace the reading of arguments, and the constructors of the holders once they are imported."""
        if self._installed:
            return
        self._installed = True
        self._patches.replace(argparse.ArgumentParser, "parse_known_args", after(self._parsed))
        self._imports.wait_for("jsonargparse", self._patch_jsonargparse)
        for module, cls, kind in _HOLDERS:
            self._imports.wait_for(module, functools.partial(self._patch_holder, cls, kind))

    def remove(self) -> None:
        """Put everything back."""
        self._installed = False
        self._imports.stop()
        self._patches.undo()

    def _patch_holder(self, cls: str, kind: str, module: Any) -> None:
        holder = getattr(module, cls, None)
        if isinstance(holder, type):
            self._patches.replace(holder, "__init__", after(functools.partial(self._made, kind)))
            if kind == "lightning":
                self._patches.replace(holder, "fit", before(lambda trainer, model, *_, **__: self.on_model(model)))

    def _patch_jsonargparse(self, module: Any) -> None:
        """Watch a parser that never asks argparse for known arguments; Lightning's and LitGPT's command lines are its."""
        self._patches.replace(module.ArgumentParser, "parse_args", after(self._parsed))

    def _parsed(self, parsed: Any, parser: Any, /, *_: Any, **__: Any) -> None:
        """Keep the very mapping, as what the program changes later counts too, and a copy of what it may take out of it."""
        held = vars(parsed[0] if isinstance(parsed, tuple) else parsed)
        self._namespaces[str(parser.prog)] = (dict(held), held)

    def _made(self, kind: str, _: None, holder: Any, /, *args: Any, **kwargs: Any) -> None:
        self._holders.append((kind, weakref.ref(holder), dict(kwargs)))

    def sources(self, models: list[Any], extra: dict[str, Any]) -> list[dict[str, Any]]:
        """Return all sources of settings that exist now. extra: name → settings object that the user handed over."""
        found = [
            source("arguments", "argparse", flat(plain({**parsed, **now})))
            for parsed, now in self._namespaces.values()
            if parsed
        ]
        found += [source("given", name, flat(plain(value))) for name, value in extra.items()]
        for kind, ref, arguments in self._holders:
            holder = ref()
            if holder is not None:
                found += [source(kind, name, flat(values)) for name, values in _READERS[kind](holder, arguments) if values]
        found += _megatron()
        for index, model in enumerate(models):
            found += _model(model, f"{index}" if len(models) > 1 else "model")
        return found


def _transformers(trainer: Any, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    return [("TrainingArguments", plain(trainer.args.to_dict()))]


def _deepspeed(engine: Any, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return DeepSpeed's configuration after it has worked out batch sizes and defaults."""
    config = getattr(engine, "_config", None)
    if config is None:
        return []
    skipped = {"_param_dict", "mesh_device"}
    return [("config", {k: plain(v) for k, v in vars(config).items() if k not in skipped})]


def _lightning(trainer: Any, arguments: dict[str, Any]) -> list[tuple[str, Any]]:
    names = (
        *(
            "max_epochs",
            "min_epochs",
            "max_steps",
            "min_steps",
            "accumulate_grad_batches",
            "gradient_clip_val",
            "gradient_clip_algorithm",
            "precision",
        ),
        *(
            "num_devices",
            "num_nodes",
            "world_size",
            "limit_train_batches",
            "reload_dataloaders_every_n_epochs",
            "overfit_batches",
        ),
    )
    values = {name: plain(getattr(trainer, name, None)) for name in names}
    values |= {
        name: plain(value)
        for name, value in arguments.items()
        if name not in {"callbacks", "logger", "plugins", "default_root_dir"}
    }
    values["strategy"] = type(trainer.strategy).__name__
    return [("Trainer", values)]


def _megatron() -> list[dict[str, Any]]:
    """Return the arguments of Megatron-LM, if its training code has been imported and has parsed them."""
    module: Any = sys.modules.get("megatron.training.global_vars")
    arguments = getattr(module, "_GLOBAL_ARGS", None)
    return [] if arguments is None else [source("megatron", "get_args", flat(plain(vars(arguments))))]


_READERS: dict[str, Callable[[Any, dict[str, Any]], list[tuple[str, Any]]]] = {
    "transformers": _transformers,
    "deepspeed": _deepspeed,
    "lightning": _lightning,
}


def _model(model: Any, name: str) -> list[dict[str, Any]]:
    """Return the structure of a model, and the settings that it or a model inside its wrappers carries."""
    from trainprobe.engine.core.naming import count_outer_wrappers, logical_name

    modules = list(model.named_modules())
    outer = count_outer_wrappers(n for n, _ in modules if n)
    structure = {logical_name(n, outer_wrappers=outer): _describe(module) for n, module in modules if n}
    found = [source("model", name, {k: v for k, v in structure.items() if k})]
    seen: set[int] = set()
    inner: Any = model
    for _ in range(8):
        for attribute in ("config", "ddp_config", "hparams"):
            held = vars(inner).get(attribute)
            held = getattr(inner, attribute, None) if attribute == "hparams" else held
            if held is not None and id(held) not in seen and not callable(held):
                seen.add(id(held))
                values = plain(held.to_dict()) if hasattr(held, "to_dict") else plain(held)
                found.append(source("model settings", f"{name}.{attribute}", flat(values) if isinstance(values, dict) else {}))
        if values := wrapper_values(inner):
            found.append(source("wrapper", type(inner).__name__, flat(values)))
        children = dict(inner.named_children())
        inner = children.get("module", children.get("_orig_mod"))
        if inner is None:
            break
    return [s for s in found if s["values"]]


def is_scripted(module: Any) -> bool:
    """Tell whether a module was scripted or traced by torch: what is within it is called where no Python sees it."""
    return any((cls.__module__, cls.__name__) == ("torch.jit._script", "ScriptModule") for cls in type(module).__mro__)


def _describe(module: Any) -> str:
    """Return class and settings of a module: torch's own say them, any other may keep its constructor's arguments."""
    kind = type(module)
    if is_scripted(module):
        return f"{module.original_name} as TorchScript"
    text = module.extra_repr() if kind.__module__.startswith("torch.nn.") else _attributes(module)
    return f"{kind.__name__}({text})" if text else kind.__name__


def _attributes(module: Any) -> str:
    """Return the arguments of its constructor that a module keeps under their names, as `p=0.1, mode=cls`.

    They are numbers, switches and words: no places, no long texts, no counters that others put there. Words are taken of
    classes of installed packages alone: a program's own class may keep the name of its run.
    """
    kept: list[str] = []
    names, own = load_names(), is_own(sys.modules.get(type(module).__module__))
    for name in argument_names(type(module)):
        value = vars(module).get(name)
        if name.startswith("_") or names.is_place(name) or names.is_secret(name):
            continue
        if isinstance(value, bool | int | float) or (isinstance(value, str) and not own and _WORD.fullmatch(value)):
            kept.append(f"{name}={value}")
    return ", ".join(kept)
