"""Capturing changes no bit of a training and leaves nothing behind."""

from __future__ import annotations

import argparse
import copy
import pickle
import random
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import dropout as imported_by_name
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from tests.config_check.launch import environment
from tests.lockstep import bits_of, differences, seed_all, state
from trainprobe import ConfigChecker
from trainprobe.config_check.pack_reader import read_pack


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.one = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 20)

    def forward(self, ids: Tensor, *, scale: float = 1.0) -> Tensor:
        x = checkpoint(self.one, self.embed(ids).mean(1) * scale, use_reentrant=False)
        return self.head(imported_by_name(self.norm(x), 0.1, self.training))


def train(out: Path | None, steps: int = 6, micro_steps: int = 4) -> dict[str, bytes]:
    if out is not None:
        ConfigChecker.apply_patches(on_error="raise", micro_steps=micro_steps)
    seed_all()
    net = Net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    checker = ConfigChecker(net, output_zip_path=out, on_error="raise", micro_steps=micro_steps) if out is not None else None
    bits: dict[str, bytes] = {}
    data = DataLoader(torch.randint(0, 20, (5 * steps, 7)), batch_size=5, shuffle=True)
    for step, ids in enumerate(data):
        optimizer.zero_grad()
        loss = functional.cross_entropy(net(ids, scale=1.0 + random.random() + float(np.random.rand())), ids[:, 0])
        loss.backward()
        bits |= {f"loss {step}": bits_of(loss)}
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        bits |= {f"step {step}: gradient of {n}": bits_of(p.grad) for n, p in net.named_parameters()}
        optimizer.step()
    if checker is not None:
        checker.close()
    return bits | state(net, optimizer)


def test_losses_gradients_weights_optimizer_and_random_state_keep_their_bits(tmp_path):
    assert differences(train(None), train(tmp_path / "pack.zip")) == []


def test_all_patches_are_gone_after_the_chosen_number_of_micro_steps(tmp_path):
    before = everything_patched()
    ConfigChecker.apply_patches(micro_steps=2, on_error="raise")
    net = Net()
    checker = ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", micro_steps=2, on_error="raise")
    assert everything_patched() != before
    for _ in range(3):
        net(torch.zeros(2, 3, dtype=torch.long))
    assert everything_patched() == before
    assert not net._forward_pre_hooks
    checker.close()


def everything_patched() -> list[object]:
    return [
        *(torch.rand, torch.manual_seed, torch.randperm, functional.dropout, torch.nn.functional.dropout, imported_by_name),
        *(random.random, random.shuffle, np.random.rand, np.random.default_rng, argparse.ArgumentParser.parse_known_args),
        *(random.Random.random, random.Random.shuffle, np.random.Generator.integers, np.random.RandomState.rand),
        *(torch.Generator.manual_seed, torch._VF.lstm, "random" in vars(random.Random), "lstm" in vars(torch._VF)),
        *(torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_value_, torch.amp.GradScaler.__init__),
        *(torch.utils.data.DataLoader.__init__, _BaseDataLoaderIter.__next__, functional.cross_entropy, torch.compile),
        *(torch.optim.lr_scheduler.LRScheduler.__init__, torch.jit.script, nn.Module.__call__, "normal_" in vars(torch.Tensor)),
    ]


def test_a_model_can_be_pickled_and_copied_while_it_is_captured_and_afterwards(tmp_path):
    net = Net()
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", micro_steps=1, on_error="raise"):
        net(torch.zeros(2, 3, dtype=torch.long))
        net(torch.zeros(2, 3, dtype=torch.long))
        copy.deepcopy(net)
        pickle.dumps(net.state_dict())
    pickle.dumps(net)


def test_evaluation_and_recomputation_are_no_micro_steps(tmp_path):
    net = Net()
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", on_error="raise"):
        net.eval()
        net(torch.zeros(2, 3, dtype=torch.long))
        net.train()
        with torch.no_grad():
            net(torch.zeros(2, 3, dtype=torch.long))
        net(torch.zeros(2, 3, dtype=torch.long)).sum().backward()
    assert read_pack(tmp_path / "pack.zip").micro_steps == 1


def test_a_function_that_was_imported_by_name_is_seen(tmp_path):
    train(tmp_path / "pack.zip")
    calls = read_pack(tmp_path / "pack.zip").ranks[0].single["randomness"]["calls"]
    rates = {c["detail"] for c in calls if c["function"] == "torch.nn.functional.dropout"}
    assert rates == {"p=0.3", "p=0.1"}


def test_python_and_numpy_calls_are_counted_by_window(tmp_path):
    train(tmp_path / "pack.zip")
    calls = read_pack(tmp_path / "pack.zip").ranks[0].single["randomness"]["calls"]
    assert {c["window"]: c["count"] for c in calls if c["function"] == "random.random"} == {-1: 1, 0: 1, 1: 1, 2: 1, 3: 1}
    assert {c["window"]: c["count"] for c in calls if c["function"] == "numpy.random.rand"} == {-1: 1, 0: 1, 1: 1, 2: 1, 3: 1}


def test_torchscript_compiles_while_random_functions_are_watched(tmp_path):
    ConfigChecker.apply_patches(on_error="raise")

    def noisy(x: Tensor) -> Tensor:
        return functional.dropout(x, 0.5) + torch.rand(2) + functional.mse_loss(x, x)

    scripted = torch.jit.script(noisy)
    assert scripted(torch.ones(2)).shape == (2,)
    ConfigChecker.apply_patches(on_error="raise")
    ConfigChecker(output_zip_path=tmp_path / "pack.zip")
    assert everything_patched()[0] is torch.rand


def test_a_model_whose_parameters_have_no_shape_yet_is_captured(tmp_path):
    net = nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 1))
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", micro_steps=1, on_error="raise"):
        net(torch.ones(2, 4))
    with zipfile.ZipFile(tmp_path / "pack.zip") as pack:
        text = "".join(pack.read(name).decode(errors="replace") for name in pack.namelist())
    assert "has no shape yet" in text


def test_a_compiled_model_gives_the_same_bits_and_is_captured_whole(tmp_path):
    def losses(out: Path | None) -> list[bytes]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        compiled = torch.compile(net, backend="eager", fullgraph=True)
        checker = ConfigChecker(compiled, output_zip_path=out, on_error="raise", micro_steps=2) if out else None
        found = [bits_of(compiled(torch.ones(3, 4))) for _ in range(4)]
        if checker is not None:
            checker.close()
        return found

    watched = losses(tmp_path / "pack.zip")  # first, so that the compiler builds its tables while the capture works
    assert watched == losses(None)
    pack = read_pack(tmp_path / "pack.zip")
    assert set(pack.ranks[0].by_micro["weights"][0]["parameters"]) == {"0.weight", "0.bias", "2.weight", "2.bias"}


@pytest.mark.parametrize(("before", "warm"), [(True, False), (True, True), (False, False)])
def test_a_model_whose_compiled_wrapper_is_called_is_captured_whenever_that_was_made(before, warm, tmp_path):
    def train(out: Path | None) -> list[bytes]:
        torch._dynamo.reset()
        torch.manual_seed(3)
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        compiled = torch.compile(net, backend="eager") if before else None
        if warm and compiled is not None:
            compiled(torch.ones(3, 4)).sum().backward()
        with ConfigChecker(net, output_zip_path=out, on_error="raise", micro_steps=2) if out else nullcontext():
            compiled = compiled or torch.compile(net, backend="eager")
            return [bits_of(compiled(torch.full((3, 4), float(n)))) for n in range(4)]

    assert train(tmp_path / "pack.zip") == train(None)
    rank = read_pack(tmp_path / "pack.zip").ranks[0]
    assert sorted(rank.by_micro["weights"]) == sorted(rank.by_micro["dataset"]) == [0, 1]
    state = rank.single["hyperparameters"]["model_state"]
    assert list(state["compiled"]) == ["the model"]
    assert state["hooks"] == state["methods"] == {}


def test_a_compiler_that_lists_torchs_functions_while_they_are_replaced_still_compiles(tmp_path):
    """`init_process_group` clears its list, which `torch.compile` makes again; `reset` clears its callbacks."""
    ConfigChecker.apply_patches(on_error="raise")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'met'}", rank=0, world_size=1)
    try:
        torch._dynamo.reset()
        compiled = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), backend="eager", fullgraph=True)
        with ConfigChecker(compiled, output_zip_path=tmp_path / "pack.zip", on_error="raise", micro_steps=1):
            assert compiled(torch.ones(3, 4)).shape == (3, 4)
    finally:
        dist.destroy_process_group()


COMPILING = """
import sys, torch
from torch import nn
from trainprobe import ConfigChecker
if sys.argv[1:]:
    ConfigChecker.apply_patches(on_error="raise")
torch.manual_seed(3)
net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
compiled = torch.compile(net, backend="eager", fullgraph=True)
if sys.argv[1:]:
    ConfigChecker(net, output_zip_path=sys.argv[1], on_error="raise", micro_steps=2)
print([compiled(torch.ones(3, 4)).tolist() for _ in range(4)], torch._dynamo.utils.counters["stats"]["unique_graphs"])
"""


@pytest.mark.slow
def test_a_model_inside_a_compiled_one_gives_the_same_bits(tmp_path):
    """The compiler may compile once more when the capture goes; what it calculates stays."""
    bare, watched = (
        subprocess.run([sys.executable, "-c", COMPILING, *more], env=environment(), check=True, capture_output=True, text=True)
        for more in ([], [str(tmp_path / "pack.zip")])
    )
    assert watched.stdout.rpartition(" ")[0] == bare.stdout.rpartition(" ")[0]
    pack = read_pack(tmp_path / "pack.zip")
    assert pack.micro_steps == 2
    assert [note for note in pack.notes if "the program compiles" in note]


def test_a_function_that_a_library_compiles_and_nobody_calls_stops_no_count(tmp_path):
    ConfigChecker.apply_patches(on_error="raise")
    torch.compile(lambda x: x + 1)
    net = Net()
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", on_error="raise", micro_steps=1):
        net(torch.zeros(2, 3, dtype=torch.long))
    calls = read_pack(tmp_path / "pack.zip").ranks[0].single["randomness"]["calls"]
    assert {c["detail"] for c in calls if c["function"] == "torch.nn.functional.dropout"} == {"p=0.3", "p=0.1"}


def test_a_model_that_is_never_trained_leaves_a_pack_that_says_so(tmp_path):
    net = nn.Linear(3, 1)
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", on_error="raise"):
        net.eval()(torch.ones(1, 3))
    pack = read_pack(tmp_path / "pack.zip")
    assert pack.notes == ("no call of the model in training mode was seen: data and weights were not captured",)
    assert pack.has("hyperparameters") and not pack.has("weights")


def test_a_model_that_is_compiled_in_place_is_captured_and_gets_its_call_back(tmp_path):
    net = nn.Linear(3, 1)
    net.compile(backend="eager")
    call = net._compiled_call_impl
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip", on_error="raise", micro_steps=1):
        net(torch.ones(2, 3))
        net(torch.ones(2, 3))
        assert net._compiled_call_impl is call
    assert read_pack(tmp_path / "pack.zip").has("weights")


def test_a_fault_of_the_capture_is_told_and_the_training_goes_on(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRAINPROBE_ON_ERROR", "continue")

    class Odd(nn.Linear):
        def named_parameters(self, *args, **kwargs):
            raise ZeroDivisionError("odd model")

    net = Odd(3, 1)
    with ConfigChecker(net, output_zip_path=tmp_path / "pack.zip"):
        assert net(torch.ones(2, 3)).shape == (2, 1)
    assert "odd model" in capsys.readouterr().err
    assert not net._forward_pre_hooks


@pytest.mark.parametrize("wrapped", [False, True])
def test_the_chunks_of_a_pipeline_are_named_apart(tmp_path, wrapped):
    chunks = [nn.Linear(3, 3), nn.Linear(3, 3)]
    model = [nn.Sequential(c) for c in chunks] if wrapped else chunks
    with ConfigChecker(model, output_zip_path=tmp_path / "pack.zip", on_error="raise"):
        model[0](torch.ones(1, 3))
    names = read_pack(tmp_path / "pack.zip").ranks[0].by_micro["weights"][0]["parameters"]
    assert [n.split(".")[0] for n in names] == ["chunk0", "chunk0", "chunk1", "chunk1"]
