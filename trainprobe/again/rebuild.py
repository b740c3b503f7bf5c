"""Runs a replay pack again. Needs torch and safetensors. Imports the classes that pack.json names: read it first."""

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from pydoc import locate
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


def build(told: Any, find: Any) -> torch.nn.Module:
    """Make a module from its class, plain attributes and children; no constructor runs."""
    module = object.__new__(find(told["class"]))
    torch.nn.Module.__init__(module)
    vars(module).update({name: tuple(x) if isinstance(x, list) else x for name, x in told["attributes"].items()})
    for name, child in told["children"].items():
        module.add_module(name, build(child, find))
    return module


def values(x: Any, tensors: Any) -> Any:
    """Return a nest with its tensors. Raises ValueError where the pack lacks one."""
    if isinstance(x, dict) and "unknown" in x:
        raise ValueError(f"the pack lacks a value: {x['unknown']}")
    if isinstance(x, dict):
        return tensors[x["tensor"]] if "tensor" in x else {name: values(y, tensors) for name, y in x["mapping"].items()}
    return tuple(values(y, tensors) for y in x) if isinstance(x, list) else x


def run(told: Any, at: int, tensors: Any, find: Any = locate, wide: bool = False) -> list[torch.Tensor]:
    """Run call `at` of a pack; return its results. wide: in float64, without autocast."""
    own = {n: t.double() if wide and t.is_floating_point() else t.clone() for n, t in tensors.items() if n.startswith(f"{at}.")}
    module = build(told["module"], find)
    for name in [name for name in own if name.startswith(f"{at}.state.")]:
        owner, _, short = name.removeprefix(f"{at}.state.").rpartition(".")
        module.get_submodule(owner).register_buffer(short, own[name])
    with ExitStack() as stack:
        for kind, dtype in told["autocast"] if not wide else ():
            stack.enter_context(torch.autocast(kind, getattr(torch, dtype)))
        made = module(*values(told["args"], own), **values(told["kwargs"], own))
    return [t.detach() for t in tree_leaves(made) if isinstance(t, torch.Tensor)]


def main() -> None:
    """Say of each result whether it has the training's bits, and how far it is from float64."""
    from safetensors.torch import load_file

    pack = load_file(Path(__file__).with_name("tensors.safetensors"))
    for at, told in enumerate(json.loads(Path(__file__).with_name("pack.json").read_text())["calls"]):
        torch.set_rng_state(pack[f"{at}.random.cpu"])
        for then, now, exact in zip(values(told["outputs"], pack), run(told, at, pack), run(told, at, pack, wide=True)):  # noqa: B905
            same = bool(torch.equal(then, now) or torch.equal(then.nan_to_num(), now.nan_to_num()))
            sys.stdout.write(f"{told['name']}: as in the training: {same}; from float64: {(now - exact).abs().max():.3g}\n")


if __name__ == "__main__":
    main()
