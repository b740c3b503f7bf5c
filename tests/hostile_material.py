"""Small real inputs of every reader, as the tool and others write them. Where a reader judges, there is something to find."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import shutil
import signal
import struct
import unittest.mock
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import trainprobe
from tests.kernel_dumps.kernel_files import overflow_old, write_kernel, write_overflow
from trainprobe import SingleSave
from trainprobe.cli import main
from trainprobe.engine.storage.dumps.tensor_files import SavedTensor
from trainprobe.op_check.online.channels import TO_SERVER, TO_TRAINING
from trainprobe.op_check.online.frames import PREFIX_BYTES, Kind, encode
from trainprobe.op_check.online.messages import Hello, Sent, call_frame, write
from trainprobe.op_check.recorded import RecordedRank
from trainprobe.op_check.training import HeldValues

INTEROP = Path(__file__).parent / "interop" / "fixtures"


@dataclass(frozen=True)
class Reader:
    """name: of the row. material: the folder that is copied. files: globs of what is spoilt in it. commands: how it is read.

    In commands, {x} is the spoilt folder, {sound} the sound one and {out} a place to write to. healthy: exit codes that would
    be a false answer, beside 0 for comparers and judges. sound: exit codes of the sound material. harmless: names of files
    that no answer rests on. mutations: how many files are damaged; checkpoints are damaged by the thousand in their own room.
    judges: whether "healthy" is counted: not where a mapping is damaged, and not where a room has a bench of its own (dumps,
    checkpoints). same: whether what is compared is the same in both folders, so that "identical" is true. run: carries out a
    command. sealed: returns a damaged file with checksums that are right, for every other one.
    """

    name: str
    material: str
    files: tuple[str, ...]
    commands: tuple[str, ...]
    healthy: tuple[int, ...] = ()
    sound: tuple[int, ...] = (0,)
    harmless: tuple[str, ...] = ()
    mutations: int = 200
    judges: bool = True
    same: Callable[[Path, Path], bool] = lambda x, sound: False
    run: Callable[[list[str]], int] = main
    sealed: Callable[[bytes], bytes] = lambda data: data


def check_golden(arguments: list[str]) -> int:
    """Be `golden check GOLDEN` where the run shows what another record holds."""
    from trainprobe.again.conditions.golden import judge
    from trainprobe.again.golden_record import read_golden
    from trainprobe.errors import ProbeError

    try:
        verdict = judge(*(read_golden(Path(path)) for path in arguments))
    except (ProbeError, OSError) as error:
        print(error)
        return 3
    print(verdict.sentence)
    return verdict.code


def serve(arguments: list[str]) -> int:
    """Be `op-check serve --folder FOLDER --output OUTPUT` until each training in the folder has ended or was dropped."""
    from trainprobe.op_check.online import channels
    from trainprobe.op_check.online.server import Server, Settings

    folder, output = map(Path, arguments)
    server = Server(Settings(output, most=1 << 26, patience=0.1), print)

    async def until_all_ended() -> None:
        looking = asyncio.ensure_future(server.serve_folder(folder))
        await asyncio.sleep(0.01)
        while server._tasks:
            await asyncio.sleep(0.01)
        await channels.cancelled([looking])
        await server.close()

    with unittest.mock.patch.object(channels, "_LINGER_S", 0.0):  # no training is there that would read
        asyncio.run(until_all_ended())
    for report in server.reports:
        print(report.sentence())
    return max((report.code() for report in server.reports), key=(0, 1, 3, 2).index, default=3)


def resealed(data: bytes) -> bytes:
    """Return a frame with the lengths and checksums of what it holds."""
    head = data[:PREFIX_BYTES].ljust(PREFIX_BYTES, b"\0")
    length = int.from_bytes(head[8:12], "big")
    header, payload = data[PREFIX_BYTES : PREFIX_BYTES + length], data[PREFIX_BYTES + length :]
    start = head[:8] + struct.pack(">IQ", len(header), len(payload))
    return start + struct.pack(">II", zlib.crc32(header, zlib.crc32(start)), zlib.crc32(payload)) + header + payload


def same_arrays(x: Path, sound: Path) -> bool:
    """Whether NumPy reads the same arrays from both folders."""
    for path in sound.rglob("*.npy"):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = np.load(x / path.relative_to(sound), allow_pickle=False)
        except Exception:  # noqa: BLE001  (whatever NumPy raises for a damaged header)
            return False
        own = np.load(path)
        if own.shape != theirs.shape or own.dtype != theirs.dtype or own.tobytes() != theirs.tobytes():
            return False
    return True


JUDGED = {"healthy": (0,), "sound": (1,)}
READERS = (
    Reader(
        "plans",
        "plan",
        ("plan.*", "kernels.yaml"),
        ("plan {x}/plan.yaml", "plan {x}/plan.json", "kernel-dump configure {x}/kernels.yaml -o {out}"),
    ),
    Reader("configs of mindstudio-probe", "plan", ("config.json",), ("migrate {x}/config.json", "plan {x}/config.json")),
    Reader("record logs: judge", "jsonl", ("rank0/*.jsonl", "*.json*"), ("judge {x}", "nan-trace {x}", "why {x}"), **JUDGED),
    Reader(
        "record logs",
        "jsonl",
        ("rank0/*.jsonl", "*.json*"),
        ("report {x} -o {out}", "runs {x}", "top --once {x}", "export {x} --trend {out}.trend.db"),
    ),
    Reader("run logs: judge", "parquet", ("rank0/*",), ("judge {x}", "nan-trace {x}", "why {x}"), **JUDGED),
    Reader(
        "run logs",
        "parquet",
        ("rank0/*",),
        ("report {x} -o {out}", "runs {x}", "top --once {x}", "runs {x} --compact", "judge --fleet {x}"),
        sound=(0, 1),
    ),
    Reader("open run logs", "open", ("rank0/*",), ("judge {x}", "nan-trace {x}", "why {x}"), **JUDGED),
    Reader("metric CSV", "csv", ("**/*.csv",), ("judge {x}",), **JUDGED),
    Reader("event files", "event_files", ("*",), ("judge {x}", "top {x} --once"), sound=(0, 1), judges=False),
    Reader("JSON lines of others", "json_lines", ("*",), ("judge {x}", "report {x} -o {out}"), sound=(0, 1), judges=False),
    Reader("states of trainers", "trainer_state", ("*",), ("judge {x}",), sound=(0, 1), judges=False),
    Reader("CSV of steps", "steps_csv", ("*",), ("judge {x}",), sound=(0, 1), judges=False),
    Reader("metric CSV of others", "wide", ("**/*.csv",), ("csv2tb {x} -o {out}", "report {x} -o {out}")),
    Reader("black boxes", "box", ("**/*",), ("black-box {x}", "black-box {x} --json")),
    Reader("rings of black boxes", "ring", ("**/*.ring",), ("black-box {x}",)),
    Reader("dumps of statistics: nan-trace", "statistics", ("**/dump.json",), ("nan-trace {x}", "judge {x}"), **JUDGED),
    Reader(
        "dumps of statistics",
        "statistics",
        ("**/*.json",),
        ("dump-compare {x} {sound}", "dump-compare {sound} {x} --html {out}", "show {x} -o {out}"),
        harmless=("stack.json", "construct.json"),
        judges=False,
    ),
    Reader(
        "dumps of others",
        "msprobe",
        ("**/*.json",),
        ("dump-compare {x} {sound}",),
        harmless=("stack.json", "construct.json"),
        judges=False,
    ),
    Reader(
        "stored tensors",
        "tensors",
        ("**/*",),
        ("dump-compare {x} {sound}",),
        harmless=("stack.json", "construct.json"),
        judges=False,
    ),
    Reader("stored tensors: op-check", "bug", ("**/*",), ("op-check {x} -q",), (0,), (2,), ("stack.json", "construct.json")),
    Reader(
        "mapping files",
        "maps",
        ("map.yaml",),
        ("dump-compare {x}/d {x}/e --mapping {x}/map.yaml",),
        sound=(0, 1, 2, 3),
        judges=False,
    ),
    Reader(
        "layout files",
        "maps",
        ("layout.yaml",),
        ("dump-compare {x}/d {x}/e --layout {x}/layout.yaml",),
        sound=(0, 1, 2, 3),
        judges=False,
    ),
    Reader(
        "rule files", "jsonl_and_rules", ("rules.yaml",), ("judge {x}/run --rules {x}/rules.yaml",), sound=(1,), judges=False
    ),
    Reader(
        "frames of op-check serve",
        "frames",
        ("session-*/to_server/*",),
        ("{x} {out}",),
        (0,),
        (2,),
        run=serve,
        sealed=resealed,
    ),
    Reader("packs", "packs", ("a.zip",), ("config-check compare {x}/a.zip {x}/b.zip",), (0,), (2,)),
    Reader("merged packs", "packs", ("m.rank*.zip",), ("config-check merge {x}/m.zip",), sound=(0, 1)),
    Reader(
        "settings files",
        "settings",
        ("*",),
        (
            "config-check collect --scripts {x}/run.sh --scripts {x}/a.yaml --scripts {x}/b.json "
            "--scripts {x}/c.toml -o {out}.zip",
        ),
    ),
    Reader(
        "kernel dumps",
        "kernels",
        ("*",),
        ("nan-trace {x}", "kernel-dump list {x} -s", "kernel-dump convert {x} -o {out}"),
        sound=(0, 1),
    ),
    Reader(
        "arrays", "arrays", ("a.npy",), ("kernel-dump compare {x}/a.npy {x}/b.npy", "kernel-dump show {x}/a.npy"), sound=(0, 1)
    ),
    Reader(
        "configs of op-check classic",
        "classic",
        ("*.json", "*.yaml"),
        (
            "op-check classic run_ut -api_info {sound}/d/step0/rank0/dump.json -config {x}/config.json -o {out}",
            "op-check {x}/d --config {x}/config.yaml -q",
        ),
        sound=(0, 1, 2, 3),
    ),
    Reader("key data", "rollout", ("**/*",), ("rollout-compare {x} {sound} -o {out}",), same=same_arrays),
    Reader("replay packs", "replay", ("replay/step0/**/*",), ("replay {x}/replay/step0",), judges=False),
    Reader("saved states", "states", ("a.pt",), ("resume-check {x}/a.pt {x}/b.pt",), (0,), (2,)),
    Reader("golden records", "golden", ("then.txt",), ("{x}/then.txt {sound}/now.txt",), (0, 1), (2,), run=check_golden),
    Reader("name maps", "names", ("names.yaml",), ("ckpt-show {x}/a.safetensors --names {x}/names.yaml",)),
    *(
        Reader(
            f"checkpoints: {name}",
            f"checkpoints/{name}",
            ("**/*",),
            (f"ckpt-compare {{x}}/{name} {{sound}}/{name} -q",),
            mutations=20,
            judges=False,
        )
        for name in (
            "single.safetensors",
            "hf",
            "modern.pt",
            "old.pt",
            "dcp",
            "megatron",
            "deepspeed",
            "zero1",
            "universal",
            "lightning.ckpt",
            "dist",
            "megatron_fsdp",
            "accelerate",
            "speechbrain",
            "sentences",
            "mindspore.ckpt",
            "mindformers",
            "zarr",
        )
    ),
)


class Broken(nn.Module):
    """A model whose loss is NaN from the second step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.times = nn.Linear(4, 3), nn.Linear(3, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.times += 1
        return self.second(torch.relu(self.first(x)) * (float("nan") if self.times > 1 else 1.0)).sum()


def train(output: Path, model: nn.Module | None = None, steps: int = 4, **plan) -> Path:
    torch.manual_seed(0)
    model = model or Broken()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with trainprobe.watch(model, optimizer, output=output, console=False, **plan) as probe:
        for step in range(steps):
            with probe.step(step):
                loss = model(torch.ones(2, 4) * (step + 1))
                probe.note("loss", loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    return output


class Sound(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.square().mean()


def write_records(folder: Path) -> None:
    """Write golden records of two runs: the second begins with other weights."""
    from trainprobe.again.golden_record import rows_of_dump, with_floors, write_golden

    for name, factor in (("then", 1.0), ("now", 1.5)):
        model = Sound()
        torch.nn.init.constant_(model[0].weight, factor)
        rows = rows_of_dump(train(folder / name, model, level="L0", summary="both", sinks=["dump"]))
        write_golden(folder / f"{name}.txt", with_floors(rows, [rows]), ["train.py"])


def write_states(folder: Path) -> None:
    """Write what two trainings saved at one step: the moments of one are lost."""
    folder.mkdir()
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    for name in ("a", "b"):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        if name == "b":
            optimizer.state.clear()
        held = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 1}
        torch.save(held, folder / f"{name}.pt")


def write_material(root: Path) -> None:
    """Write every folder that `READERS` names."""
    root.mkdir(exist_ok=True)
    write_runs(root)
    write_dumps(root)
    write_settings(root)
    write_kernels(root / "kernels")
    (root / "arrays").mkdir()
    for name, array in (("a", np.arange(12.0).reshape(3, 4)), ("b", np.ones((3, 4)))):
        np.save(root / "arrays" / f"{name}.npy", array)
    SingleSave(root / "rollout")
    for _ in range(2):
        SingleSave.save({"prompt": ["what", "name a colour"], "log_prob": -torch.rand(2, 5), "loss": torch.rand(())})
        SingleSave.step()
    SingleSave.close()
    write_states(root / "states")
    write_records(root / "golden")
    train(root / "replay", nn.Sequential(nn.Linear(4, 3), Mean()), level="off", replay={"on": "step", "modules": "0"}, steps=1)
    write_checkpoints(root / "checkpoints")


def write_logs_of_others(root: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    rows = [{"step": step, "loss": 2.0 - step / 10 if step != 7 else float("nan"), "lr": 0.1} for step in range(12)]
    with SummaryWriter(str(root / "event_files")) as writer:
        for row in rows:
            writer.add_scalar("loss", row["loss"], row["step"])
    for name in ("json_lines", "trainer_state", "steps_csv"):
        (root / name).mkdir()
    (root / "json_lines" / "log.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (root / "trainer_state" / "trainer_state.json").write_text(json.dumps({"global_step": 12, "log_history": rows}))
    (root / "steps_csv" / "metrics.csv").write_text(
        "step,loss,lr\n" + "".join(f"{row['step']},{row['loss']},{row['lr']}\n" for row in rows)
    )


def write_runs(root: Path) -> None:
    train(root / "jsonl", level="off", sinks=["jsonl"], monitor=True)
    train(root / "parquet", level="off", sinks=["parquet"], monitor=True)
    train(root / "csv", level="off", sinks=["csv"], monitor=True)
    train(root / "box", level="off", black_box=True, sinks=["jsonl"], monitor=True)
    rows = "vpp_stage,name,step,norm,max,min,mean\n" + "".join(
        f"0,layer.{i},{s},{s + i}.5,2,-1,0.25\n" for s in range(4) for i in range(3)
    )
    (root / "wide" / "rank0").mkdir(parents=True)
    (root / "wide" / "rank0" / "grad_reduced_0-3.csv").write_text(rows)
    write_logs_of_others(root)
    for name, plan in (("open", {"sinks": ["parquet"]}), ("ring", {"sinks": ["jsonl"], "black_box": {"max_bytes": 1 << 18}})):
        child = multiprocessing.get_context("fork").Process(target=die_in_training, args=(root / name, plan))
        child.start()
        child.join()
        assert child.exitcode == -signal.SIGKILL
    (root / "jsonl_and_rules").mkdir()
    shutil.copytree(root / "jsonl", root / "jsonl_and_rules" / "run")
    (root / "jsonl_and_rules" / "rules.yaml").write_text("nonfinite: true\nspike: {}\n")


def die_in_training(output: Path, plan: dict) -> None:
    """Train as `train` does, and leave what is on disk when the process is killed."""
    model = Broken()
    probe = trainprobe.Probe({"level": "off", "monitor": True, "output": output, "console": False, **plan})
    probe.open(model)
    for step in range(4):
        with probe.step(step):
            model(torch.ones(2, 4)).backward()
    probe.flush()
    os.kill(os.getpid(), signal.SIGKILL)


def write_frames(session: Path, dump: Path) -> None:
    """Write what a training sends of the calls of a dump."""
    recorded, held = RecordedRank.read(dump), HeldValues(1 << 30)
    for name, tensor in load_file(dump / "tensors.safetensors").items():
        held.tensor(0, SavedTensor.of(name, tensor))
    calls = [call_frame(number, 0, unit, held) for number, unit in enumerate(recorded.units())]
    for folder in (TO_SERVER, TO_TRAINING):
        (session / folder).mkdir(parents=True)
    sent = [write(Kind.HELLO, Hello(run="run", rank=0)), *calls, write(Kind.BYE, Sent(sent=len(calls)))]
    for number, frame in enumerate(sent):
        (session / TO_SERVER / f"{number:010}.frame").write_bytes(encode(frame) + frame.payload)


def write_dumps(root: Path) -> None:
    train(root / "statistics", level="mix", summary="both", step=[1], steps=2, sinks=["dump"])
    train(root / "tensors", Sound(), level="L1", task="tensor", step=[0], steps=1, sinks=["dump"])
    shutil.copytree(root / "tensors", root / "bug")
    stored = root / "bug" / "step0" / "rank0" / "tensors.safetensors"
    save_file(
        {name: (x * 1.5 if name.endswith("linear.0.forward.output") else x) for name, x in load_file(stored).items()}, stored
    )
    shutil.copytree(INTEROP / "statistics_mix", root / "msprobe")
    write_frames(root / "frames" / "session-a", root / "bug" / "step0" / "rank0")
    (root / "maps").mkdir()
    for name in "de":
        train(root / "maps" / name, Sound(), level="L0", step=[0], steps=1, sinks=["dump"])
    (root / "maps" / "map.yaml").write_text('"0.Linear": "3.Linear"\n')
    (root / "maps" / "layout.yaml").write_text('rules: [{module: "0", tp: 0}]\n')


def write_settings(root: Path) -> None:
    (root / "plan").mkdir()
    plan = {"level": "mix", "step": [0, 5], "modules": ["0.*"], "monitor": {"rules": {"spike": {}}}, "audit": True}
    (root / "plan" / "plan.json").write_text(json.dumps(plan))
    (root / "plan" / "plan.yaml").write_text(
        "level: mix\nstep: [0, 5]\nmodules: ['0.*']\nmonitor: {}\naudit: true\noutput: x\n"
    )
    (root / "plan" / "kernels.yaml").write_text("level: L1\nstep: [0, 5]\noutput: x\n")
    config = {"task": "statistics", "dump_path": "/tmp/x", "rank": [], "step": [1], "level": "L1"}
    config["statistics"] = {"scope": [], "list": [], "summary_mode": "statistics"}
    (root / "plan" / "config.json").write_text(json.dumps(config))
    (root / "settings").mkdir()
    (root / "settings" / "run.sh").write_text('LR=1e-4\nARGS="--lr $LR --hidden-size 64"\ntorchrun train.py $ARGS --seed 1\n')
    (root / "settings" / "a.yaml").write_text("optimizer: {lr: 1e-4, betas: [0.9, 0.95]}\nmodel: &m {hidden: 64}\nother: *m\n")
    (root / "settings" / "b.json").write_text('{"train_batch_size": 8, "zero": {"stage": 2}}')
    (root / "settings" / "c.toml").write_text('[training]\nsteps = 10\nname = "x"\n')
    packs = root / "packs"
    packs.mkdir()
    for name, rate in (("a", "1e-4"), ("b", "2e-4")):
        (packs / f"{name}.sh").write_text(f"export NCCL_ALGO=Ring\npython train.py --lr {rate} --seed {name}\n")
        assert main(["config-check", "collect", "--scripts", str(packs / f"{name}.sh"), "-o", str(packs / f"{name}.zip")]) == 0
    from trainprobe.config_check.pack_writer import PackWriter

    for rank in range(2):
        writer = PackWriter(packs / "m.zip", rank, 2)
        writer.put("environment", {"variables": {"X": str(rank)}})
        writer.close()
    classic = root / "classic"
    train(classic / "d", Sound(), level="L1", task="tensor", step=[0], steps=1, sinks=["dump"])
    (classic / "config.json").write_text('{"white_list": ["linear"], "black_list": [], "error_data_path": "./"}')
    (classic / "config.yaml").write_text("white_list: [linear]\nblack_list: []\n")


def write_kernels(folder: Path) -> None:
    bad = np.array([1.0, np.nan, 2.0, np.inf], np.float32)
    write_kernel(folder, "MatMul.Default_network_MatMul-op0", [np.ones(4, np.float32), bad], [bad])
    write_kernel(folder, "Add.Default_network_Add-op1", [bad], [bad], task=2)
    write_overflow(folder, overflow_old("AI Core", 0, 1, 1))


def write_checkpoints(folder: Path) -> None:
    from tests.ckpt_compare.test_fuzz import write_seeds

    write_seeds(folder / "seeds")
    for seed in (folder / "seeds").iterdir():
        (folder / seed.name).mkdir()
        seed.rename(folder / seed.name / seed.name)
    names = folder.parent / "names"
    names.mkdir()
    shutil.copy(folder / "single.safetensors" / "single.safetensors", names / "a.safetensors")
    (names / "names.yaml").write_text(
        'family: mine\nsignature: ["x.{L}."]\nrules: [{from: "x.{L}.{p}", to: "layers.{L}.{p}"}]\n'
    )
