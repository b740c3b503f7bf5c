"""DeepSpeed checkpoints: ZeRO 0 to 3, bf16, pipeline layers, mixture-of-experts files.

Model files hold parameters by name; optimizer files hold one flat fp32 buffer a group and rank (see zero_partitions for who
owns which part of it). Under ZeRO 3 the model files hold no numbers, and the fp32 buffers stand for the weights.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats.plain_torch import arrays, clean, values_of
from trainprobe.ckpt_compare.megatron import model_config, namespace
from trainprobe.ckpt_compare.megatron_shards import Local, Ranks, place
from trainprobe.ckpt_compare.optimizer_names import is_array, name_states, one_or_all, scalar, state_tensors
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Piece, Problem, gather, whole
from trainprobe.ckpt_compare.plain_state import flat
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.ckpt_compare.storage.mapped import inside, read_text
from trainprobe.ckpt_compare.zero_partitions import Fragment, fragments
from trainprobe.engine.geometry.rectangles import Point
from trainprobe.errors import FormatError

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<dp>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIM = re.compile(r"(?:bf16_)?zero_pp_rank_(?P<dp>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_LAYER = re.compile(r"layer_(?P<layer>\d+)-(?:model_(?P<tp>\d+)-)?model_states\.pt")
_EXPERT = re.compile(r"(?:layer_(?P<layer>-?\d+)_)?expert_(?P<expert>\d+)_mp_rank_(?P<mp>\d+)_model_states\.pt")
_EXPERT_OPTIM = re.compile(r"expp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_EXPERT_NAME = re.compile(r"(?P<head>.*deepspeed_experts\.)(?P<e>\d+)(?P<tail>\..*)")


@dataclass(frozen=True, slots=True)
class Files:
    """What the folder holds, read as data: file name → content, by kind; (model-parallel rank, data-parallel rank) as keys."""

    models: Mapping[tuple[int, int], tuple[str, Mapping[str, Any]]]
    optims: Mapping[tuple[int, int], tuple[str, Mapping[str, Any]]]
    layers: Mapping[tuple[int, int], tuple[str, Mapping[str, Any]]]
    experts: Mapping[str, Mapping[str, Any]]
    expert_optims: Mapping[int, tuple[str, Mapping[str, Any]]]


def tag_folder(path: Path) -> Path | None:
    """Return the folder with the files: the path itself, or what `latest` in it points to."""
    if not path.is_dir():
        return None
    latest = path / "latest"
    if latest.is_file():
        tagged = inside(path, read_text(latest).strip())
        return tagged if tagged.is_dir() else path
    return path


def sniff(path: Path) -> bool:
    """A folder with `…model_states.pt` files, or one whose `latest` points to such a folder."""
    folder = tag_folder(path)
    return folder is not None and any(folder.glob("*_model_states.pt")) and not (folder / "zero").is_dir()


def open(path: Path) -> Checkpoint:
    """Open a DeepSpeed checkpoint of any ZeRO stage."""
    folder = tag_folder(path) or path
    problems: list[Problem] = []
    files = read_files(folder, problems)
    if not files.models:
        raise FormatError(
            f"{folder} holds no readable model file: {'; '.join(p.message for p in problems) or 'none was found'}"
        )
    first = files.models[min(files.models)][1]
    tp_size = int((first.get("checkpoint_parallel_dimensions") or {}).get("tp_degree") or 1)
    config, _ = model_config(first.get("args"))
    config |= {"gated": namespace(first.get("args")).get("swiglu")}
    tensors = list(_weights(files, tp_size, config))
    found, steps = _optimizer(files, tp_size, config, problems)
    tensors += found
    held = {t.name for t in tensors if not t.slot}
    tensors += [replace(t, slot="") for t in found if t.slot == "master" and t.name not in held]
    tensors += aliases([content for _, content in files.models.values()], tensors)
    state = sections(first)
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    _check_ranks(folder, files, first, problems)
    _check_saves(files, problems)
    dims = first.get("checkpoint_parallel_dimensions") or {}
    layout = {"dp": int(first.get("dp_world_size") or 1), "pp": int(dims.get("pp_degree") or 1), "tp": tp_size}
    joined = gather(tensors)
    return Checkpoint(str(path), "deepspeed", joined, layout=layout, config=config, state=state, problems=tuple(problems))


def read_files(folder: Path, problems: list[Problem]) -> Files:
    """Read every file of a tag folder as data; those that cannot be read are problems."""
    kinds: list[dict[Any, Any]] = [{}, {}, {}, {}, {}]
    for file in sorted(folder.glob("*_states.pt")):
        try:
            content = torch_archive.load(str(file))
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
            continue
        if m := _OPTIM.fullmatch(file.name):
            kinds[1][int(m["mp"]), int(m["dp"])] = (file.name, content["optimizer_state_dict"])
        elif m := _EXPERT_OPTIM.fullmatch(file.name):
            kinds[4][int(m["rank"])] = (file.name, content.get("optimizer") or {})
        elif m := _EXPERT.fullmatch(file.name):
            kinds[3][file.name] = content
        elif m := _LAYER.fullmatch(file.name):
            kinds[2][int(m["layer"]), int(m["tp"] or 0)] = (file.name, content)
        elif m := _MODEL.fullmatch(file.name):
            kinds[0][int(m["mp"]), int(m["dp"] or 0)] = (file.name, content)
    return Files(*kinds)


def _check_ranks(folder: Path, files: Files, first: Mapping[str, Any], problems: list[Problem]) -> None:
    """Report data-parallel ranks whose optimizer file is not there."""
    if not files.optims:
        return
    world = int(first.get("dp_world_size") or 1)
    for mp in sorted({mp for mp, _ in files.optims}):
        lost = [dp for dp in range(world) if (mp, dp) not in files.optims]
        problems.extend(
            Problem(str(folder), f"the optimizer file of data-parallel rank {dp}, model-parallel rank {mp} is missing")
            for dp in lost
        )


def _check_saves(files: Files, problems: list[Problem]) -> None:
    """Report files that count other steps than their neighbours: those of another save."""
    kinds = (
        ("optimizer step", {name: max(_steps_in(content), default=None) for name, content in files.optims.values()}),
        ("global_steps", {name: content.get("global_steps") for name, content in files.models.values()}),
    )
    for what, found in kinds:
        counted = Counter(count for count in found.values() if isinstance(count, int | float))
        most, often = counted.most_common(1)[0] if counted else (None, 0)
        problems.extend(
            Problem(name, f"is at {what} {count:g}, and {often} of {counted.total()} such files at {most:g}: of another save")
            for name, count in found.items()
            if isinstance(count, int | float) and count != most
        )


def _steps_in(content: Any) -> Iterator[float]:
    """Yield each count of steps in the states of an optimizer file."""
    numbers = (value for at, value in torch_archive.leaves(content) if at[-1:] == ("step",))
    return (scalar(value) for value in numbers if is_array(value) or isinstance(value, int | float))


def _weights(files: Files, tp_size: int, config: Mapping[str, Any]) -> Iterator[LogicalTensor]:
    """Yield the weights that model, layer and expert files hold."""
    for (mp, dp), (name, content) in files.models.items():
        if dp and not content.get("frozen_param_fragments"):
            continue
        for key, array in arrays(content.get("module") or {}):
            if 0 not in array.shape:
                yield from place(Local(clean(key), array, f"{name}: {key}"), Ranks(mp % tp_size, tp_size), config)
    for (layer, tp), (name, content) in files.layers.items():
        for key, array in arrays(content):
            yield from place(Local(f"{layer}.{clean(key)}", array, f"{name}: {key}"), Ranks(tp, tp_size), config)
    for name, content in files.experts.items():
        for key, array in arrays(content):
            yield whole(clean(key), array, f"{name}: {key}")
    yield from _frozen(files)


def _frozen(files: Files) -> Iterator[LogicalTensor]:
    """Yield the frozen parameters of ZeRO 3, of which every rank holds a fragment of equal length."""
    for (_, dp), (name, content) in files.models.items():
        shapes: Mapping[str, Point] = content.get("frozen_param_shapes") or {}
        for key, array in (content.get("frozen_param_fragments") or {}).items():
            if is_array(array) and key in shapes and len(array.shape) == 1:
                shape = tuple(shapes[key])
                pieces = tuple(Fragment(clean(key), "", shape, dp * array.shape[0], array, f"{name}: {key}").pieces())
                yield LogicalTensor(clean(key), shape, pieces)


def shapes_of(content: Mapping[str, Any]) -> list[dict[str, Point]]:
    """Return the parameters' shapes, one dict a group."""
    return [{clean(k): tuple(v) for k, v in group.items()} for group in content.get("param_shapes") or []]


def _optimizer(
    files: Files, tp_size: int, config: Mapping[str, Any], problems: list[Problem]
) -> tuple[list[LogicalTensor], list[float]]:
    """Return all optimizer states and master weights by parameter name, and the step counts."""
    if not files.optims:
        return _stage0(files, problems)
    steps: set[float] = set()
    tensors: list[LogicalTensor] = []
    by_mp: dict[int, list[tuple[int, str, Mapping[str, Any]]]] = {}
    for (mp, dp), (name, content) in sorted(files.optims.items()):
        by_mp.setdefault(mp, []).append((dp, name, content))
    stages = len(by_mp) // tp_size
    for mp, ranks in by_mp.items():
        model = next((c for (m, _), (_, c) in sorted(files.models.items()) if m == mp), {})
        world = int(model.get("dp_world_size") or len(ranks))
        for part in fragments(ranks, shapes_of(model), world, steps, problems):
            local = Local(
                _global_expert(part, ranks, files), part.source, part.where, part.slot, start=part.start, shape=part.shape
            )
            copy = f"stage {mp // tp_size}" if stages > 1 else ""
            tensors += [_copied(t, copy) for t in place(local, Ranks(mp % tp_size, tp_size), config)]
    return tensors, sorted(steps)


def _copied(tensor: LogicalTensor, copy: str) -> LogicalTensor:
    if not copy:
        return tensor
    pieces = tuple(Piece(p.offset, p.source, p.where, p.replica or copy) for p in tensor.pieces)
    return replace(tensor, held=pieces)


def _global_expert(part: Fragment, ranks: list[Any], files: Files) -> str:
    """Return a parameter's name with the expert's global number (optimizer files count the experts of their rank)."""
    match = _EXPERT_NAME.fullmatch(part.name)
    if match is None or not files.experts:
        return part.name
    total = 1 + max(int(m["expert"]) for f in files.experts if (m := _EXPERT.fullmatch(f)))
    here = part.local_experts
    ep_size = max(1, total // max(1, here))
    return f"{match['head']}{int(match['e']) + part.rank % ep_size * here}{match['tail']}"


def _stage0(files: Files, problems: list[Problem]) -> tuple[list[LogicalTensor], list[float]]:
    """Name the states of an optimizer that ZeRO does not share out."""
    tensors: list[LogicalTensor] = []
    steps: set[float] = set()
    name, first = files.models[min(files.models)]
    module = _trained(first)
    held: list[tuple[str, Mapping[str, Any], dict[str, Point]]] = []
    if isinstance(first.get("optimizer"), Mapping) and not files.expert_optims:
        held.append((name, first["optimizer"], module))
    held += [(n, o, {**module, **_experts_of(rank, o, module, files)}) for rank, (n, o) in files.expert_optims.items()]
    for where, optimizer, shapes in held:
        inner = optimizer.get("optimizer_state_dict", optimizer)
        named = name_states(inner, shapes)
        if named is None:
            problems.append(
                Problem(where, "its optimizer states are numbered in an order that fits no usual grouping of the parameters")
            )
            continue
        states, counts = state_tensors(named, where)
        tensors += states
        steps.update(counts)
        tensors += _fp32_groups(optimizer, list(shapes.items()), where)
    return tensors, sorted(steps)


def _trained(content: Mapping[str, Any]) -> dict[str, Point]:
    """Return name → shape of what an optimizer without ZeRO may have: no buffers, and a shared parameter once."""
    buffers: set[str] = set(content.get("buffer_names") or ())
    found: dict[Any, tuple[str, Point]] = {}
    for key, array in arrays(content.get("module") or {}):
        if key not in buffers:
            found.setdefault(array, (clean(key), array.shape))
    return dict(found.values())


def _experts_of(rank: int, optimizer: Mapping[str, Any], module: Mapping[str, Point], files: Files) -> dict[str, Point]:
    """Return the shapes of the experts that one rank's optimizer holds."""
    experts: dict[int, dict[str, Point]] = {}
    for content in files.experts.values():
        for key, array in arrays(content):
            match = _EXPERT_NAME.fullmatch(clean(key))
            if match is not None:
                experts.setdefault(int(match["e"]), {})[clean(key)] = array.shape
    count = len(optimizer.get("state", {})) - len(module)
    here = count // max(1, len(next(iter(experts.values()), {"": ()})))
    ep_size = max(1, len(experts) // max(1, here))
    mine = sorted(experts)[rank % ep_size * here :][:here]
    return {k: s for e in mine for k, s in experts[e].items()}


def _fp32_groups(optimizer: Mapping[str, Any], shapes: list[tuple[str, Point]], where: str) -> list[LogicalTensor]:
    """Name the fp32 copies of a half-precision model, which are stored in the order of its parameters."""
    copies = [a for group in optimizer.get("fp32_groups") or [] for a in group if is_array(a)]
    if len(copies) != len(shapes) or any(a.shape != s for a, (_, s) in zip(copies, shapes, strict=True)):
        return []
    return [whole(n, a, f"{where}: {n} (master)", slot="master") for a, (n, _) in zip(copies, shapes, strict=True)]


def aliases(models: Sequence[Mapping[str, Any]], tensors: Sequence[LogicalTensor]) -> list[LogicalTensor]:
    """Return the parameters that model files name as another one's alias and do not hold, with all pieces of that one."""
    held = {t.name for t in tensors if not t.slot}
    shared = {clean(k): clean(v) for content in models for k, v in (content.get("shared_params") or {}).items()}
    lacking = {alias: owner for alias, owner in shared.items() if alias not in held}
    return [replace(t, name=alias) for alias, owner in lacking.items() for t in tensors if t.name == owner and not t.slot]


def sections(content: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return iteration, scheduler and settings of a model file as plain values."""
    found: dict[str, dict[str, Any]] = {
        "iteration": {k: content[k] for k in ("global_steps", "global_samples", "skipped_steps") if k in content},
        "args": flat({"ds_config": content.get("ds_config"), "ds_version": content.get("ds_version")}),
    }
    if values := values_of(content.get("module")):
        found["weights"] = values
    if content.get("lr_scheduler"):
        found["scheduler"] = flat(content["lr_scheduler"])
    return found
