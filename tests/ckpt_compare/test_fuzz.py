"""Thousands of damaged checkpoints of every reader: a verdict or one sentence, never a traceback, never a false `identical`.

They are answered in processes of their own with a limit of time and memory. `python -m tests.ckpt_compare.test_fuzz COUNT
[SEED]` runs as many as one likes.
"""

from __future__ import annotations

import collections
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import traceback
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tests.ckpt_compare.verdicts import judged
from trainprobe.ckpt_compare.formats import names, recognise
from trainprobe.errors import ProbeError

DATA = Path(__file__).parent / "data"
CASES, PARTS = 5000, 4
SECONDS_A_CASE, STALLED, MEMORY = 10, 120, 1 << 30  # of CPU; without any sign, on a busy machine; bytes
ANSWERS = ("0", "1", "2", "3", "refused")


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    found = {"model.embed_tokens.weight": torch.randn(13, 6), "model.norm.weight": torch.ones(6)}
    for i in range(2):
        for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj"):
            found[f"model.layers.{i}.{part}.weight"] = torch.randn(6, 6).to(torch.bfloat16 if i else torch.float32)
    return found


def trained() -> dict:
    net = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "iteration": 3, "args": {"lr": 0.1}}


def write_seeds(root: Path) -> None:
    """Write one small checkpoint of each reader."""
    (root / "hf").mkdir(parents=True)
    save_file(weights(), root / "single.safetensors")
    halves = list(weights().items())
    for i, part in enumerate((halves[:4], halves[4:])):
        save_file(dict(part), root / "hf" / f"model-{i}.safetensors")
    index = {name: f"model-{i}.safetensors" for i, part in enumerate((halves[:4], halves[4:])) for name, _ in part}
    (root / "hf" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    torch.save(trained(), root / "modern.pt")
    torch.save(trained(), root / "old.pt", _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": weights()}, storage_writer=dcp.FileSystemWriter(root / "dcp"), no_dist=True)
    rank = root / "megatron" / "iter_0000003" / "mp_rank_00"
    rank.mkdir(parents=True)
    (root / "megatron" / "latest_checkpointed_iteration.txt").write_text("3")
    held = {f"decoder.layers.0.mlp.linear_fc{n}.weight": torch.randn(6, 6) for n in (1, 2)}
    torch.save({"model": held, "args": {"num_layers": 1, "hidden_size": 6}, "iteration": 3}, rank / "model_optim_rng.pt")
    (root / "deepspeed").mkdir()
    state = {"module": trained()["model"], "dp_world_size": 1, "ds_version": "0.19", "optimizer": None}
    torch.save(state, root / "deepspeed" / "mp_rank_00_model_states.pt")
    write_further_seeds(root)
    shutil.copy(DATA / "mindspore" / "half.ckpt", root / "mindspore.ckpt")
    shutil.copytree(DATA / "mindformers" / "pipeline", root / "mindformers")
    zarr = root / "zarr" / "decoder.final_layernorm.weight"
    zarr.mkdir(parents=True)
    (root / "zarr" / "metadata.json").write_text(json.dumps({"sharded_backend": "zarr", "sharded_backend_version": 1}))
    meta = {"zarr_format": 2, "shape": [5, 4], "chunks": [3, 4], "dtype": "<f4", "order": "C", "compressor": None}
    (zarr / ".zarray").write_text(json.dumps({**meta, "filters": None, "fill_value": None}))
    for i in range(2):
        (zarr / f"{i}.0").write_bytes(np.arange(12, dtype="<f4").tobytes())


def write_further_seeds(root: Path) -> None:
    """Write what DeepSpeed, its converter, Lightning and Megatron's distributed formats keep, as small as it can be."""
    torch.save({"pytorch-lightning_version": "2.6", "state_dict": trained()["model"], "epoch": 1, "global_step": 2,
                "optimizer_states": [trained()["optimizer"]]}, root / "lightning.ckpt")  # fmt: skip
    flat, zero = torch.arange(40.0), root / "zero1"
    zero.mkdir()
    shapes = [{"fc.weight": torch.Size([5, 7]), "fc.bias": torch.Size([5])}]
    module = {"fc.weight": flat[:35].reshape(5, 7), "fc.bias": flat[35:], "seen": torch.ones(3)}
    more = {"dp_world_size": 1, "ds_version": "0.19", "param_shapes": shapes, "buffer_names": ["seen"]}
    torch.save({"module": module, "shared_params": {"head.weight": "fc.weight"}, **more}, zero / "mp_rank_00_model_states.pt")
    slices = [{"fc.weight": {"start": 0, "numel": 35}, "fc.bias": {"start": 35, "numel": 5}}]
    adam = {0: {"exp_avg": flat / 7, "exp_avg_sq": flat**2, "step": 3}}
    held = {"base_optimizer_state": adam, "single_partition_of_fp32_groups": [flat], "param_slice_mappings": slices}
    torch.save({"optimizer_state_dict": {**held, "zero_stage": 1}}, zero / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
    universal = root / "universal"
    shutil.copytree(zero, universal)
    (universal / "zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    for slot in ("fp32", "exp_avg"):
        (universal / "zero" / "fc.weight").mkdir(parents=True, exist_ok=True)
        torch.save({"param": flat[:35].reshape(5, 7)}, universal / "zero" / "fc.weight" / f"{slot}.pt")
    stacked = {
        "decoder.layers.self_attention.linear_proj.weight": torch.randn(2, 5, 5),
        "decoder.final_layernorm.weight": flat[:5],
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(stacked, storage_writer=dcp.FileSystemWriter(root / "dist"), no_dist=True)
        single = {"checkpoint_version": 3.0, "model": {"module.decoder.layers.0.mlp.linear_fc2.weight": torch.randn(5, 7)}}
        dcp.save(single, storage_writer=dcp.FileSystemWriter(root / "megatron_fsdp"), no_dist=True)
    (root / "dist" / "metadata.json").write_text(json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1}))
    torch.save({"args": {"num_layers": 2, "hidden_size": 5}, "iteration": 3}, root / "dist" / "common.pt")
    write_folders(root)


def write_folders(root: Path) -> None:
    """Write what accelerate, speechbrain and sentence-transformers keep in several files."""
    for name in ("accelerate", "speechbrain", "sentences/2_Dense"):
        (root / name).mkdir(parents=True)
    save_file(trained()["model"], root / "accelerate" / "model.safetensors")
    torch.save(trained()["optimizer"], root / "accelerate" / "optimizer.bin")
    torch.save({"step": 3, "random_state": torch.ones(4)}, root / "accelerate" / "random_states_0.pkl")
    torch.save(trained()["model"], root / "speechbrain" / "model.ckpt")
    (root / "speechbrain" / "counter.ckpt").write_text("3")
    (root / "speechbrain" / "CKPT.yaml").write_text("end-of-epoch: true")
    for folder in (root / "sentences", root / "sentences" / "2_Dense"):
        save_file(trained()["model"], folder / "model.safetensors")
    (root / "sentences" / "modules.json").write_text('[{"path": ""}, {"path": "2_Dense"}]')


def mutate(data: bytes, chance: random.Random) -> bytes:
    """Damage bytes as disks, networks and ill will do it."""
    at, count = chance.randrange(max(1, len(data))), chance.choice([1, 2, 4, 8, 60])
    extreme = chance.choice([b"\xff" * 8, b"\0" * 8, b"\xff\xff\xff\x7f", b"\x80" * 4, b"-1", b"9" * 30, b"[" * 40, b"../"])
    some = bytes(chance.randrange(256) for _ in range(count))
    return chance.choice([
        data[:at] + some + data[at + count :],
        data[:at] + bytes([data[at] ^ (1 << chance.randrange(8))] if data else []) + data[at + 1 :],
        data[:at] + extreme + data[at + len(extreme) :],
        data[:at] + extreme + data[at:],
        data[:at] + data[at + count :],
        data[:at],
        data[:at] + data[at : at + count] * 2 + data[at + count :],
        data + some,
    ])  # fmt: skip


def damaged(root: Path, folder: Path, seed: int) -> tuple[Path, Path, Path]:
    """Copy one seed checkpoint and damage one of its files; return the original, the copy, and the damaged file."""
    chance = random.Random(seed)
    seeds = sorted(root.iterdir())
    original = seeds[seed % len(seeds)]
    copy = folder / f"{seed}-{original.name}"
    (shutil.copytree if original.is_dir() else shutil.copy)(original, copy)
    file = chance.choice(sorted(p for p in copy.rglob("*") if p.is_file())) if copy.is_dir() else copy
    before = file.read_bytes()
    after = before
    while after == before:
        for _ in range(chance.choice([1, 1, 1, 3])):
            after = mutate(after, chance)
    file.write_bytes(after)
    return original, copy, file


def tensors(path: Path) -> dict[str, torch.Tensor] | None:
    """Return what the library that wrote a single file reads from it; None where it refuses, or is not asked."""
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True)["model"]
    except (SafetensorError, RuntimeError, ValueError, KeyError, TypeError, EOFError, OSError, AttributeError, IndexError):
        return None
    except Exception as error:  # noqa: BLE001  (pickle.UnpicklingError and whatever a damaged pickle makes torch raise)
        assert type(error).__name__ in ("UnpicklingError", "error", "BadZipFile"), error
    return None


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether both hold the same tensors; a name may have changed, since tensors are found again by their content."""
    return sorted(map(content, a.values())) == sorted(map(content, b.values()))


def content(tensor: torch.Tensor) -> tuple[str, tuple[int, ...], bytes]:
    return str(tensor.dtype), tuple(tensor.shape), bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy())


def answer(root: Path, folder: Path, seed: int) -> str:
    """Judge one damaged checkpoint against its original; return the exit code, or `refused`."""
    original, copy, file = damaged(root, folder, seed)
    try:
        code = str(judged(original, copy).code)
    except ProbeError as error:
        assert str(error) and "MemoryError" not in str(error), (seed, file, error)
        code = "refused"
    if code == "0" and (theirs := tensors(copy)) is not None:
        assert same(theirs, tensors(original) or {}), (seed, file)
    (shutil.rmtree if copy.is_dir() else Path.unlink)(copy)
    return code


def answer_all(root: Path, folder: Path, seeds: range, send: Connection) -> None:
    """Answer each case within MEMORY bytes more than the process has and SECONDS_A_CASE of CPU; send (seed, answer)."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + MEMORY,) * 2)
    for seed in seeds:
        signal.setitimer(signal.ITIMER_PROF, SECONDS_A_CASE)  # its signal ends the process, whatever it is doing
        try:
            send.send((seed, answer(root, folder, seed)))
        except BaseException:  # noqa: BLE001  (told by the process that waits)
            send.send((seed, traceback.format_exc()))
            return


def run(root: Path, folder: Path, seeds: range) -> collections.Counter[str]:
    """Answer all cases in a process of its own, which a hang or a crash ends; return how often which answer was given."""
    receive, send = multiprocessing.Pipe(duplex=False)
    worker = multiprocessing.get_context("fork").Process(target=answer_all, args=(root, folder, seeds, send), daemon=True)
    worker.start()
    send.close()
    answers: collections.Counter[str] = collections.Counter()
    try:
        for seed in seeds:
            assert receive.poll(STALLED), f"seed {seed} waits for something that does not come"
            try:
                told, code = receive.recv()
            except EOFError:
                worker.join()
                pytest.fail(f"seed {seed} ended the process: exit code {worker.exitcode} (a signal, where negative)")
            assert (told, code in ANSWERS) == (seed, True), f"seed {seed}: {code}"
            answers[code] += 1
    finally:
        worker.kill()
        worker.join()
        receive.close()
    return answers


@pytest.fixture(scope="module")
def written_seeds(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("fuzz") / "seeds"
    write_seeds(root)
    return root


@pytest.mark.filterwarnings("ignore")
def test_a_seed_of_every_reader_is_sound(written_seeds):
    seeds = sorted(written_seeds.iterdir())
    assert {p.name: judged(p, p).code for p in seeds} == dict.fromkeys([p.name for p in seeds], 0)
    assert {recognise(p) for p in seeds} == set(names())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.exhaustive) for part in range(1, PARTS))])
def test_damaged_checkpoints_of_every_reader_are_answered(written_seeds, tmp_path, part):
    answers = run(written_seeds, tmp_path, range(part * CASES // PARTS, (part + 1) * CASES // PARTS))
    assert sum(answers.values()) == CASES // PARTS
    assert answers["2"] and answers["3"] and answers["refused"]  # the damage reaches values, parts and whole files


def hang(*_: object) -> str:
    while True:
        pass


def take(*_: object) -> str:
    return str(len(bytearray(2 * MEMORY)))


def crash(*_: object) -> str:
    os.kill(os.getpid(), signal.SIGKILL)
    return ""


@pytest.mark.parametrize(
    ("fault", "said"),
    [(hang, "exit code -27"), (take, "MemoryError"), (crash, "exit code -9")],
    ids=["hang", "memory", "crash"],
)
def test_a_reader_that_hangs_crashes_or_takes_all_memory_would_be_seen(tmp_path, monkeypatch, fault, said):
    monkeypatch.setattr(sys.modules[__name__], "answer", fault)
    monkeypatch.setattr(sys.modules[__name__], "SECONDS_A_CASE", 0.2)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=f"seed 7.*(?s:.*){said}"):
        run(tmp_path, tmp_path, range(7, 9))


def main() -> None:
    count, first = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as made:
        root = Path(made)
        write_seeds(root / "seeds")
        (root / "cases").mkdir()
        answers = run(root / "seeds", root / "cases", range(first, first + count))
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss / 1024
    print(f"{dict(answers)}, {seconds:.1f} s of CPU, peak {peak:.0f} MiB, torch included")


if __name__ == "__main__":
    main()
