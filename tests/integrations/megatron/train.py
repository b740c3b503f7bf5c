"""Train a tiny Megatron GPT on the CPU in several layouts, with and without the probe: `train.py FOLDER LAYOUT…`.

`LAYOUT oracle` trains by torch alone, `LAYOUT behaviour` badly; `LAYOUT@nan@NAME` and `LAYOUT@drift@NAME` plant a fault,
`LAYOUT!FAULT` one that two dumps are to show.

Every weight is filled from its global name and the rectangle that the integration says it is: all layouts start from one model.
Each rank writes FOLDER/LAYOUT.RANK.json: losses, digests of all state with and without the probe, and what the probe saw.
"""

from __future__ import annotations

import hashlib
import json
import logging
import sys
import warnings
from functools import partial
from pathlib import Path

warnings.filterwarnings("ignore")
logging.disable(logging.WARNING)
import torch  # noqa: E402

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "megatron_cpu")]
import megatron_on_cpu  # noqa: E402

megatron_on_cpu.install()
import context_attention  # noqa: E402
import precise_adam  # noqa: E402
import sequence_norm  # noqa: E402
import tiny_gpt  # noqa: E402
import torch.distributed as dist  # noqa: E402

from trainprobe.errors import StopTraining  # noqa: E402
from trainprobe.integrations import megatron  # noqa: E402
from trainprobe.integrations.megatron_layout import bare, held_parameters, parallel_axes  # noqa: E402
from trainprobe.integrations.megatron_source import loss_scaler  # noqa: E402

SMALL = "--hidden 32 --ffn 48 --heads 4 --groups 2 --seq 8 --vocab 60 --vocab-div 16 --mbs 2 --steps 3 --micro 2"
LAYOUTS = {
    "alone": "--micro 4",
    "alone moe": "--micro 4 --moe 4 --layers 2",
    "alone grouped": "--micro 4 --moe 4 --layers 2 --grouped 1 --dtype bf16",
    "alone bf16": "--micro 4 --dtype bf16",
    "alone fp16": "--micro 4 --dtype fp16",
    "tp2": "--tp 2 --sp 1 --recompute full --micro 4",
    "tp2 selective": "--tp 2 --recompute selective --micro 4",
    "pp2": "--pp 2 --micro 4 --recompute full",
    "vpp2": "--pp 2 --vpp 2 --micro 4",
    "ep2": "--ep 2 --moe 4 --layers 2",
    "ep2 grouped": "--ep 2 --moe 4 --layers 2 --grouped 1 --dtype bf16",
    "dp2": "",
    "dp2 distributed": "--dist-opt 1 --overlap-grad 1",
    "dp2 distributed gather": "--dist-opt 1 --overlap-param 1 --overlap-grad 1",
    "dp2 bf16": "--dist-opt 1 --dtype bf16",
    "dp2 precise": "--dist-opt 1 --dtype bf16",
    "dp2 fp16": "--dtype fp16",
    "dp2 fp16 low": "--dtype fp16",
    "tp2 dp2": "--tp 2 --dist-opt 1 --dtype bf16",
    "tp2 pp2": "--tp 2 --pp 2 --sp 1 --micro 4",
    "cp2": "--cp 2 --micro 4",
    "etp2 alone": "--etp 2 --moe 4 --layers 2",
    "etp2": "--etp 2 --ep 2 --moe 4 --layers 2 --micro 1",
    "tp2 moe": "--tp 2 --sp 1 --moe 4 --layers 2 --micro 4",
    "tp2 etp1": "--tp 2 --sp 1 --etp 1 --ep 2 --moe 4 --layers 2 --micro 4",
}  # fmt: skip
WEIGHTS = {
    "weight": "decoder.layers.3.mlp.linear_fc2.weight",
    "expert": "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight",
}
LOW_SCALE = 256.0  # at which no step overflows
PLAN = {
    "level": "L0",  # the dump of one step beside the monitor of all
    "step": [1],
    "sinks": ["jsonl", "dump"],
    "on_existing": "replace",
    "on_error": "raise",
    "monitor": {"gradients": {"unreduced": True}, "optimizer_state": True},
}


def fill(models, axes) -> None:
    """Give every parameter the values that its global name stands for."""
    for held in held_parameters(models, axes):
        shard = held.shard
        seed = int.from_bytes(hashlib.sha256(held.name.encode()).digest()[:6], "big")
        whole = torch.randn(shard.whole, generator=torch.Generator().manual_seed(seed)) * 0.05
        if held.name.endswith(("norm.weight", "layernorm.weight")):
            whole = 1 + whole
        part = whole[tuple(slice(o, o + n) for o, n in zip(shard.offset, shard.shape, strict=True))]
        with torch.no_grad():
            held.parameter.copy_(part.reshape(held.parameter.shape))


class Training:
    def __init__(self, layout: str) -> None:
        self.a = tiny_gpt.parser().parse_args(f"{SMALL} {LAYOUTS[layout]}".split())
        tiny_gpt.init_dist(self.a)
        self.config = tiny_gpt.make_config(self.a)
        models = tiny_gpt.build_chunks(self.a, self.config)
        self.axes = parallel_axes(len(models))
        fill(models, self.axes)
        self.chunks = tiny_gpt.wrap(self.a, self.config, models)
        make = partial(precise_adam.make_optimizer, tiny_gpt.make_optimizer) if "precise" in layout else tiny_gpt.make_optimizer
        self.optimizer = make(self.a, self.chunks)
        if "low" in layout:
            loss_scaler(self.optimizer)._scale.fill_(LOW_SCALE)
        tiny_gpt.sync_config(self.a, self.config, self.chunks, self.optimizer)

    def run(self, on_step=None):
        history = tiny_gpt.train(self.a, self.config, self.chunks, self.optimizer, on_step)
        if self.a.overlap_param:
            for chunk in self.chunks:
                chunk.start_param_sync(force_sync=True)
        return history

    def state(self) -> dict[str, str]:
        """Digests of the bits of all parameters and all optimizer state."""
        tensors = {}
        for i, chunk in enumerate(self.chunks):
            tensors |= {f"{i}.{name}": p for name, p in chunk.named_parameters()}
            tensors |= {f"{i}.{name} main_grad": p.main_grad for name, p in chunk.named_parameters()}
        for i, inner in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            for j, (p, state) in enumerate(inner.optimizer.state.items()):
                tensors |= {f"optimizer {i}.{j}": p} | {f"optimizer {i}.{j}.{k}": t for k, t in state.items()}
        tensors["rng"] = torch.get_rng_state()
        return {name: digest(t) for name, t in tensors.items() if torch.is_tensor(t)}


def digest(t: torch.Tensor) -> str:
    raw = t.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(raw.numpy().tobytes()).hexdigest()[:16]


class Seen:
    """A watcher that keeps what the probe saw of parameters, module calls and scalars."""

    def __init__(self) -> None:
        self.rows, self.scalars, self.calls = [], {}, []

    def __call__(self, step_data):
        numbers = step_data.numbers()
        self.scalars[step_data.step] = dict(step_data.scalars)
        for call in step_data.calls:
            if call.kind != "state":
                if call.kind == "module":
                    self.calls.append([step_data.step, call.name, call.phase, call.micro, call.call])
                continue
            for slot, value in call.params.items():
                told = [float(numbers[k][value.row]) for k in ("norm", "max", "min")]
                extra = value.extra or {}
                row = [
                    step_data.step,
                    call.node,
                    call.name,
                    slot,
                    *told,
                    list(value.shape),
                    extra.get("shard"),
                    extra.get("scale", 1.0),
                ]
                self.rows.append(row)
        return ()


def oracle(folder: Path, layout: str) -> None:
    """Train the same model by torch alone: p.grad, torch's clipping and AdamW; write the norm of every tensor, in float64."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    a = tiny_gpt.parser().parse_args(f"{SMALL} {LAYOUTS[layout]}".split())
    tiny_gpt.init_dist(a)
    (model,) = tiny_gpt.build_chunks(a, tiny_gpt.make_config(a))
    fill([model], {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    MoEAuxLossAutoScaler.set_loss_scale(torch.tensor(1 / a.micro))  # the load balancing loss enters in the backward pass
    data, rows, losses, norms = tiny_gpt.Data(a).iterator(), {}, [], []
    for step in range(a.steps):

        def note(slot, t, name, step=step):
            rows[f"{step} {slot} {name}"] = float(t.detach().double().norm())

        optimizer.zero_grad()
        total = 0.0
        for _ in range(a.micro):
            out, loss_func = tiny_gpt.forward_step(a, data, model)
            loss, _ = loss_func(out)
            (loss / a.micro).backward()
            total += float(loss) / a.micro
        losses.append(total)
        for name, p in model.named_parameters():
            note("unclipped grad_unclipped", p.grad, name)
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        for moment in ("before_step", "after_step"):
            for name, p in model.named_parameters():
                after = "_after" if moment == "after_step" else ""
                note(f"{moment} value{after}", p, name)
                if not after:
                    note("before_step grad", p.grad, name)
                for slot in ("exp_avg", "exp_avg_sq"):
                    if p in optimizer.state:
                        note(f"{moment} {slot}{after}", optimizer.state[p][slot], name)
            if moment == "before_step":
                optimizer.step()
    told = {"rows": rows, "losses": losses, "norms": norms, "shapes": {n: list(p.shape) for n, p in model.named_parameters()}}
    (folder / f"{layout} oracle.json").write_text(json.dumps(told))
    fresh()


def plant(folder: Path, layout: str, fault: str, name: str) -> None:
    """Train with a fault planted after the first step in the parameter `name`: a NaN, or a drift on rank 1 alone."""
    training, seen = Training(layout), Seen()
    held = {h.name: h.parameter for h in held_parameters([bare(c) for c in training.chunks], training.axes)}

    def on_step(moment: str, step: int) -> None:
        if (moment, step) == ("after_opt", 0) and name in held and (fault == "nan" or dist.get_rank() == 1):
            with torch.no_grad():
                held[name].view(-1)[3] += float("nan") if fault == "nan" else 1e-3

    output = str(folder / f"{fault} probe")
    with megatron.attach(training.chunks, training.optimizer, {**PLAN, "output": output}, first_step=100) as probe:
        probe.watchers.append(seen)
        training.run(on_step)
    told = {
        "rows": seen.rows,
        "owner": name in held,
        "findings": [[f.rule, f.severity, f.step, f.message] for f in probe.findings],
    }
    (folder / f"{layout} {fault}.{dist.get_rank()}.json").write_text(json.dumps(told))
    fresh()


def dump_faulty(folder: Path, layout: str, fault: str) -> None:
    """Dump a step of a training, `whole`, or with a fault.

    The last rank has another `weight` or `expert`; or rank 1 computes another gradient of a `column`-parallel weight; or one
    row-parallel layer leaves out its all-`reduce`; or gradients are reduced with a wrong `scale`.
    """
    prepare(layout)
    training = Training(layout)
    held = {h.name: h.parameter for h in held_parameters([bare(c) for c in training.chunks], training.axes)}
    if fault in WEIGHTS and dist.get_rank() == dist.get_world_size() - 1:
        with torch.no_grad():
            held[WEIGHTS[fault]].mul_(1.01)
    if fault == "column" and dist.get_rank() == 1:
        held["decoder.layers.1.mlp.linear_fc1.weight"].register_hook(lambda gradient: gradient * 1.01)
    if fault == "scale":
        for bucket in (bucket for group in training.chunks[0].bucket_groups for bucket in group.buckets):
            bucket.gradient_scaling_factor *= 2
    if fault == "reduce":
        bare(training.chunks[0]).get_submodule("decoder.layers.1.mlp.linear_fc2").explicit_expert_comm = True
    dump_step(training, folder / f"{layout} {fault} probe")


def dump_step(training: Training, folder: Path, **plan) -> None:
    """Dump the first step of a training, and end it. plan: fields beside those of PLAN."""
    plan = {**PLAN, "step": [0], "sinks": ["dump"], "summary": "both", "output": str(folder), **plan}
    with megatron.attach(training.chunks, training.optimizer, plan):
        training.a.steps = 1
        training.run()
    fresh()


def misbehave(folder: Path, layout: str) -> None:
    """Attach twice, fail in the middle of a step, go on, and let a rule stop the run."""
    training, seen = Training(layout), Seen()
    name = "decoder.layers.3.mlp.linear_fc2.weight"
    plan = {
        **PLAN,
        "level": "off",
        "output": str(folder / "behaviour"),
        "monitor": {"rules": {"nonfinite": {"actions": ["stop"]}}},
    }
    probe = megatron.attach(training.chunks, training.optimizer, plan)
    told = {"twice": megatron.attach(training.chunks, training.optimizer, plan) is probe}
    probe.watchers.append(seen)
    whole = []
    probe.watchers.append(lambda step_data: whole.append([step_data.step, step_data.complete]) or ())
    forward_step = tiny_gpt.forward_step

    def failing(a, data, model):
        raise ValueError("the data loader has died")

    tiny_gpt.forward_step = failing
    try:
        training.run()
    except ValueError as error:
        told["error"] = str(error)
    tiny_gpt.forward_step = forward_step
    held = {h.name: h.parameter for h in held_parameters([bare(c) for c in training.chunks], training.axes)}

    def on_step(moment: str, step: int) -> None:
        if (moment, step) == ("after_opt", 0) and dist.get_rank() == 1:
            with torch.no_grad():
                held[name].fill_(float("nan"))

    try:
        training.run(on_step)
    except StopTraining as stop:
        told["stop"] = [probe.step_number, str(stop)]
    probe.close()
    probe.close()
    again = megatron.attach(training.chunks, training.optimizer, {**plan, "output": str(folder / "again"), "monitor": True})
    told["again"] = again is not probe
    again.close()
    told["steps"] = whole
    (folder / f"{layout} behaviour.{dist.get_rank()}.json").write_text(json.dumps(told))
    fresh()


def prepare(layout: str) -> None:
    """Put in place what a layout needs on the CPU."""
    if "--sp" in LAYOUTS[layout]:
        sequence_norm.install()
    if "--cp" in LAYOUTS[layout]:
        context_attention.install()


def fresh() -> None:
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()


def train(folder: Path, layout: str) -> None:
    prepare(layout)
    told = {}
    plain = Training(layout)
    told["off"] = [plain.run(), plain.state()]
    fresh()
    watched, seen = Training(layout), Seen()
    before = left(watched)
    probe = megatron.attach(watched.chunks, watched.optimizer, {**PLAN, "output": str(folder / f"{layout} probe")})
    probe.watchers.append(seen)
    try:
        history = watched.run()
    finally:
        probe.close()
    told["on"] = [history, watched.state()]
    told["left"] = [name for name, there in left(watched).items() if there != before[name]]
    told |= {"place": dict(probe.place.axes), "rows": seen.rows, "scalars": seen.scalars, "calls": seen.calls}
    told["findings"] = [[f.rule, f.severity, f.step, f.message] for f in probe.findings]
    (folder / f"{layout}.{dist.get_rank()}.json").write_text(json.dumps(told))
    fresh()


def left(training: Training) -> dict[str, object]:
    """What a probe could leave behind."""
    from megatron.core.pipeline_parallel import schedules

    groups = [g for c in training.chunks for g in [*c.bucket_groups, *c.expert_parallel_bucket_groups]]
    found = {name: getattr(schedules, name) for name in (*megatron.SCHEDULES, "forward_step")}
    found |= {f"group {i}": sorted(vars(g)) for i, g in enumerate(groups)}
    found |= {"optimizer": sorted(vars(training.optimizer)), "call": torch.nn.Module._call_impl}
    hooks = [
        len(m._forward_hooks) + len(m._forward_pre_hooks) + len(m._backward_hooks) for c in training.chunks for m in c.modules()
    ]
    return found | {"hooks": hooks}


def main() -> None:
    dist.init_process_group("gloo")
    for layout in sys.argv[2:]:
        if layout.endswith(" behaviour"):
            misbehave(Path(sys.argv[1]), layout.removesuffix(" behaviour"))
        elif "!" in layout:
            dump_faulty(Path(sys.argv[1]), *layout.split("!"))
        elif "@" in layout:
            plant(Path(sys.argv[1]), *layout.split("@"))
        elif layout.endswith(" oracle"):
            oracle(Path(sys.argv[1]), layout.removesuffix(" oracle"))
        else:
            train(Path(sys.argv[1]), layout)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
