"""Megatron's per-rank checkpoints: `mp_rank_TT[_PPP][_EEE]/model_optim_rng.pt`, with or without `distrib_optim.pt` beside it.

A rank file holds local tensors under local numbers. This module puts each of them at its place in the whole model: layer
numbers by counting the layers of the stages before (uneven and virtual pipelines included), experts by expert rank, rows and
columns by tensor rank. Tensors that every rank holds are kept as copies, which are compared with each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from trainprobe.ckpt_compare.formats.plain_torch import arrays
from trainprobe.ckpt_compare.masters import without_strangers
from trainprobe.ckpt_compare.megatron import iteration_folder, model_config, namespace, plain_sections, rank_of, rng_digests
from trainprobe.ckpt_compare.megatron_optimizer import Local, local_states
from trainprobe.ckpt_compare.megatron_shards import Ranks, place
from trainprobe.ckpt_compare.optimizer_names import one_or_all
from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, Problem, gather
from trainprobe.ckpt_compare.storage import torch_archive
from trainprobe.errors import FormatError

FILES = ("model_optim_rng.pt", "model_rng.pt")
_LAYER = re.compile(r"(?P<head>(?:^|.*\.)layers\.)(?P<n>\d+)(?P<tail>\..*)")
_EXPERT = re.compile(r"(?P<head>.*\.local_experts\.)(?P<n>\d+)(?P<tail>\..*)")


@dataclass(frozen=True, slots=True)
class RankFile:
    """What one rank wrote."""

    folder: Path
    ranks: Ranks
    content: Mapping[str, Any]

    def chunks(self) -> list[Mapping[str, Any]]:
        """Return the model's state of each virtual stage on this rank, one when there are none."""
        keys = (
            ["model"]
            if "model" in self.content
            else sorted((k for k in self.content if re.fullmatch(r"model\d+", k)), key=_number)
        )
        return [self.content[k] for k in keys]


def _number(key: str) -> int:
    return int(key.removeprefix("model"))


def sniff(path: Path) -> bool:
    """A folder of `mp_rank_*` folders with model files, or one that points to such an iteration."""
    folder = iteration_folder(path)
    return folder is not None and any((p / f).is_file() for p in folder.glob("mp_rank_*") for f in FILES)


def open(path: Path) -> Checkpoint:
    """Open a per-rank Megatron checkpoint."""
    folder = iteration_folder(path) or path
    problems: list[Problem] = []
    files, args = _read_ranks(folder, problems)
    config, layout = model_config(args)
    _check_ranks(folder, files, layout, problems)
    _check_iterations(files, problems)
    offsets = _layer_offsets(files)
    tensors: list[LogicalTensor] = []
    moved: list[LogicalTensor] = []
    steps: set[float] = set()
    for file in files:
        locals_ = list(_locals(file, offsets))
        for local in locals_:
            tensors += place(local, file.ranks, config)
        flat_file = file.folder / "distrib_optim.pt"
        found, counts = local_states(file.content.get("optimizer"), flat_file, locals_, problems, {**config, **layout})
        for local in found:
            moved += place(local, file.ranks, config)
        steps.update(counts)
    states, misplaced = without_strangers(moved, gather(tensors))
    if misplaced:
        problems.append(Problem(str(folder), misplaced))
    tensors += states
    state = plain_sections(files[0].content) if files else {}
    state["rng"] = {k: v for f in files for k, v in _rng(f).items()}
    if steps:
        state["optimizer"] = {"step": one_or_all(steps)}
    return Checkpoint(str(path), "megatron_legacy", gather(tensors), "megatron", layout, config, state, tuple(problems))


def _check_iterations(files: Sequence[RankFile], problems: list[Problem]) -> None:
    """Note the ranks whose files are of another iteration than most: they were not saved together."""
    steps = {f.folder: f.content["iteration"] for f in files if isinstance(f.content.get("iteration"), int)}
    usual = max(steps.values(), key=list(steps.values()).count, default=0)
    problems += [
        Problem(str(folder), f"is of iteration {step}, and the other ranks are of {usual}")
        for folder, step in steps.items()
        if step != usual
    ]


def _read_ranks(folder: Path, problems: list[Problem]) -> tuple[list[RankFile], dict[str, Any]]:
    """Read every rank's pickle (not its numbers); a file that cannot be read is a problem with its name."""
    read: list[tuple[Path, tuple[int, int, int, bool], Mapping[str, Any]]] = []
    for sub in sorted(folder.glob("mp_rank_*")):
        at = rank_of(sub.name)
        file = next((sub / f for f in FILES if (sub / f).is_file()), None)
        if at is None:
            continue
        if file is None:
            problems.append(Problem(str(sub), f"holds no {FILES[0]}"))
            continue
        try:
            read.append((sub, at, torch_archive.load(str(file))))
        except FormatError as error:
            problems.append(Problem(str(file), str(error)))
    args = next((namespace(c["args"]) for _, _, c in read if c.get("args") is not None), {})
    # one number after the tensor rank is the pipeline rank, or the expert rank where there is no pipeline
    single_number_is_expert = (args.get("expert_model_parallel_size") or 1) > 1 and (
        args.get("pipeline_model_parallel_size") or 1
    ) == 1
    size = max((at[0] for _, at, _ in read), default=0) + 1
    tp = args.get("tensor_model_parallel_size") or size
    found: list[RankFile] = []
    for sub, (t, first, second, two), content in read:
        pp, ep = (first, second) if two or not single_number_is_expert else (0, first)
        etp = int(args.get("expert_tensor_parallel_size") or tp) if args.get("num_experts") else tp
        ranks = Ranks(t, tp, pp, ep, args.get("expert_model_parallel_size") or 1, 0 if etp == tp else etp)
        found.append(RankFile(sub, ranks, content))
    return found, args


def _check_ranks(folder: Path, files: Sequence[RankFile], layout: Mapping[str, int], problems: list[Problem]) -> None:
    """Report ranks that the arguments announce and the folder does not hold, and layouts that are not understood."""
    present = {(f.ranks.tp, f.ranks.pp, f.ranks.ep) for f in files}
    expected = set(product(*(range(layout.get(axis, 1)) for axis in ("tp", "pp", "ep"))))
    etp = layout.get("etp", layout.get("tp", 1))
    if layout.get("ep", 1) > 1 and etp < layout.get("tp", 1):
        # a tensor rank is an expert rank as well: g % tp and g // etp % ep of one number g
        numbers = range(layout.get("tp", 1) * layout.get("ep", 1))
        pairs = {(g % layout.get("tp", 1), g // etp % layout["ep"]) for g in numbers if g < layout.get("world", g + 1)}
        expected = {at for at in expected if (at[0], at[2]) in pairs}
    for tp, pp, ep in sorted(expected - present):
        lost = f"the file of tensor rank {tp}, pipeline rank {pp}, expert rank {ep} is missing"
        problems.append(Problem(str(folder), lost))
    if etp > layout.get("tp", 1):
        text = f"experts are cut over {etp} tensor ranks and the rest over fewer: files of this layout hold a part of them only"
        problems.append(Problem(str(folder), text))


def _layer_offsets(files: Sequence[RankFile]) -> dict[tuple[int, int], int]:
    """Return (pipeline rank, virtual stage) → number of layers before it.

    Stage order is virtual stage first, then pipeline rank.
    """
    counts: dict[tuple[int, int], int] = {}
    for file in files:
        for v, chunk in enumerate(file.chunks()):
            layers = {int(m["n"]) for name, _ in _arrays(chunk) if (m := _LAYER.fullmatch(name)) and "mtp." not in name}
            counts[file.ranks.pp, v] = max(counts.get((file.ranks.pp, v), 0), len(layers))
    offsets: dict[tuple[int, int], int] = {}
    total = 0
    for pp, v in sorted(counts, key=lambda k: (k[1], k[0])):
        offsets[pp, v] = total
        total += counts[pp, v]
    return offsets


def _arrays(chunk: Any) -> Iterator[tuple[str, Any]]:
    yield from ((name, array) for name, array in arrays(chunk) if not name.endswith("_extra_state"))


def _locals(file: RankFile, offsets: Mapping[tuple[int, int], int]) -> Iterator[Local]:
    """Yield this rank's weights under global names, in the order in which the model holds its parameters."""
    path = file.folder.name
    for v, chunk in enumerate(file.chunks()):
        held = dict(_arrays(chunk))
        experts = len({m["n"] for name in held if (m := _EXPERT.fullmatch(name))})
        for name, array in held.items():
            renamed = name
            layer = _LAYER.fullmatch(renamed)
            if layer is not None and "mtp." not in renamed:
                renamed = f"{layer['head']}{int(layer['n']) + offsets[file.ranks.pp, v]}{layer['tail']}"
            expert = _EXPERT.fullmatch(renamed)
            if expert is not None:
                renamed = f"{expert['head']}{int(expert['n']) + file.ranks.ep * experts}{expert['tail']}"
            yield Local(renamed, array, f"{path}: {name}", chunk=v)


def _rng(file: RankFile) -> dict[str, str]:
    expert = f" ep {file.ranks.ep}" if file.ranks.ep_size > 1 else ""
    return rng_digests(f"tp {file.ranks.tp} pp {file.ranks.pp}{expert}", file.content.get("rng_state"))
