"""What is captured of switches, loaders, clipping, loss scalers and models is what the program has."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_ as imported_by_name
from torch.utils.data import DataLoader, TensorDataset

from tests.config_check.table import PAGE, page
from trainprobe import ConfigChecker
from trainprobe.config_check.capture.fingerprints import unpadded_fingerprints
from trainprobe.config_check.capture.switch_table import switches
from trainprobe.config_check.capture.switches import read_switches
from trainprobe.config_check.compare import compare_packs
from trainprobe.config_check.pack_reader import read_pack

ORIGINAL = [imported_by_name]  # in a list, where no patch looks for it


@pytest.fixture
def begun() -> None:
    ConfigChecker.apply_patches(on_error="raise", micro_steps=2)


def captured(path: Path, net: nn.Module, steps: int = 3, **how: Any) -> dict[str, Any]:
    """Train a few steps under capture, clipping gradients, and return what the rank captured."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)
    with ConfigChecker(net, output_zip_path=path, micro_steps=2, on_error="raise"):
        for step in range(steps):
            net(torch.ones(2, 4)).sum().backward()
            imported_by_name(net.parameters(), how.get("clip", 1.0))
            if (step + 1) % how.get("accumulate", 1) == 0:
                optimizer.step()
                optimizer.zero_grad()
    rank = read_pack(path).ranks[0]
    return {**rank.single, **rank.by_micro}


def source(content: dict[str, Any], kind: str) -> dict[str, Any]:
    (found,) = [s["values"] for s in content["hyperparameters"]["sources"] if s["kind"] == kind]
    return found


def test_every_switch_of_the_table_is_read():
    assert set(read_switches()) == set(switches())


def test_flash_attention_tf32_and_fast_paths_are_read_as_they_are_set():
    before = read_switches()
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.mha.set_fastpath_enabled(False)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        after = read_switches("cpu")
    torch.backends.cuda.enable_flash_sdp(True)
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.mha.set_fastpath_enabled(True)
    changed = {name for name in before if before[name] != after[name]}
    assert {"autocast", "flash attention", "cudnn.allow_tf32", "fast path of attention modules"} <= changed
    assert after["autocast"] == "bfloat16"
    assert read_switches() == before


def test_denormals_that_are_flushed_are_noticed():
    assert read_switches()["flush_denormal"] is False
    torch.set_flush_denormal(True)
    flushed = read_switches()["flush_denormal"]
    torch.set_flush_denormal(False)
    assert flushed is True


def test_clipping_is_seen_where_its_function_was_imported_by_name(begun, tmp_path):
    content = captured(tmp_path / "pack.zip", nn.Linear(4, 1), clip=0.25)
    assert source(content, "clipping") == {
        "function": "clip_grad_norm_",
        "max_norm": 0.25,
        "norm_type": 2.0,
        "error_if_nonfinite": False,
    }
    assert {imported_by_name, torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad.clip_grad_norm_} == set(ORIGINAL)


def test_loaders_are_captured_as_they_were_made(begun, tmp_path):
    generator = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.zeros(10, 4))
    DataLoader(data, batch_size=5)
    assert len(list(DataLoader(data, batch_size=3, shuffle=True, drop_last=True, generator=generator))) == 3
    content = captured(tmp_path / "pack.zip", nn.Linear(4, 1))
    values = source(content, "loader")
    expected = {"batch_size": 3, "shuffle": True, "drop_last": True, "num_workers": 0, "generator": "seed 3", "samples": 10}
    assert {name: values[name] for name in expected} == expected
    assert source(content, "idle loader")["batch_size"] == 5
    assert not hasattr(DataLoader.__iter__, "__wrapped__")
    assert DataLoader.__init__.__module__ == "torch.utils.data.dataloader"
    assert not hasattr(DataLoader.__init__, "__wrapped__")


def test_loss_scalers_are_captured_and_one_that_is_off_says_so(begun, tmp_path):
    kept = [torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)]
    content = captured(tmp_path / "pack.zip", nn.Linear(4, 1))
    found = [s["values"] for s in content["hyperparameters"]["sources"] if s["kind"] == "scaler"]
    assert found == [{"loss_scale": 8.0}, {"loss_scale": "off"}]
    assert len(kept) == 2


def test_arguments_that_modules_keep_are_captured_without_places_secrets_and_counters(begun, tmp_path):
    class Pooling(nn.Module):
        def __init__(
            self, mode: str, run: str, cache_dir: str, api_key: str, scale: float = 0.5, normalized: bool = False
        ) -> None:
            super().__init__()
            self.mode, self.run, self.cache_dir, self.api_key = mode, run, cache_dir, api_key
            self.scale, self.normalized, self.calls = scale, normalized, 3

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    content = captured(tmp_path / "pack.zip", nn.Sequential(nn.Linear(4, 1), Pooling("mean", "again", "there", "abc")))
    assert source(content, "model")["1"] == "Pooling(scale=0.5, normalized=False)"


def test_arguments_that_jsonargparse_has_parsed_are_captured(begun, tmp_path):
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(prog="train", exit_on_error=False)
    parser.add_argument("--data.mask_prompt", type=bool, default=False)
    parsed = parser.parse_args(["--data.mask_prompt", "true"])
    content = captured(tmp_path / "pack.zip", nn.Linear(4, 1))
    assert source(content, "arguments")["data.mask_prompt"] is parsed.data.mask_prompt is True
    assert not hasattr(jsonargparse.ArgumentParser.parse_args, "__wrapped__")


def test_arguments_that_a_program_takes_out_of_its_namespace_are_captured_and_those_that_it_changes_too(begun, tmp_path):
    parser = argparse.ArgumentParser()
    parser.add_argument("--lora_r", type=int)
    parser.add_argument("--lr", type=float)
    namespace = parser.parse_args(["--lora_r", "4", "--lr", "0.5"])
    del namespace.lora_r  # as transformers' HfArgumentParser does with all that it has read
    namespace.lr = 0.25
    assert source(captured(tmp_path / "pack.zip", nn.Linear(4, 1)), "arguments") == {"lora_r": 4, "lr": 0.25}


def test_numbers_that_the_function_of_a_schedule_takes_from_around_it_are_captured(begun, tmp_path):
    net, warmup = nn.Linear(4, 1), 5
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    kept = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
    assert source(captured(tmp_path / "pack.zip", net), "scheduler")["lr_lambdas.0.warmup"] == 5
    assert kept.last_epoch == 0


def test_frozen_weights_modes_hooks_and_replaced_methods_are_captured_and_our_own_hook_is_not(begun, tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    net[0].weight.requires_grad_(False)
    net[1].eval()
    net[2].register_forward_hook(double)
    net[2].weight.register_hook(halve)
    net[0].forward = net[0].forward
    content = captured(tmp_path / "pack.zip", net)
    assert content["hyperparameters"]["model_state"] == {
        "evaluation": {"1": "Dropout"},
        "hooks": {"module 2": "forward hook double", "weight 2.weight": "gradient hook halve"},
        "methods": {"0": "Linear.forward"},
        "compiled": {},
    }
    trained = {name: e.get("requires_grad") for name, e in content["weights"][0]["parameters"].items()}
    assert trained == {"0.weight": False, "0.bias": True, "2.weight": True, "2.bias": True}


def double(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return output * 2


def halve(gradient: torch.Tensor) -> torch.Tensor:
    return gradient / 2


def test_a_run_that_is_left_in_evaluation_mode_says_so(begun, tmp_path):
    content = captured(tmp_path / "pack.zip", nn.Linear(4, 1).eval())
    assert content["hyperparameters"]["model_state"]["evaluation"] == {"the model": "Linear"}


def test_a_compiled_module_is_captured_with_its_arguments(begun, tmp_path):
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    net[1].compile(backend="eager")
    content = captured(tmp_path / "pack.zip", net)
    assert content["hyperparameters"]["model_state"]["compiled"] == {"1": "backend=eager"}
    assert content["randomness"]["counted_until"] == -1


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Linear(4, 1), nn.Dropout(0.5)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.drop(self.layer(inputs))


def scripted_whole(net: nn.Module) -> nn.Module:
    return torch.jit.script(net)


def traced_whole(net: nn.Module) -> nn.Module:
    return torch.jit.trace(net, torch.ones(2, 4), check_trace=False)


def in_another(net: nn.Module) -> nn.Module:
    return nn.Sequential(torch.jit.script(net), nn.Linear(1, 1))


@pytest.mark.parametrize(
    ("make", "where", "name"),
    [(scripted_whole, "the model", ""), (traced_whole, "the model", ""), (in_another, "module 0", "0.")],
)
def test_torchscript_is_captured_but_for_what_is_called_inside_it_and_the_pack_says_so(begun, make, where, name, tmp_path):
    torch.manual_seed(0)
    net = make(Named())
    weight = dict(net.named_parameters())[f"{name}layer.weight"].norm().item()
    content = captured(tmp_path / "pack.zip", net)
    assert sorted(content["dataset"]) == sorted(content["weights"]) == [0, 1]
    assert list(content["dataset"][0]["tensors"]) == ["input" if name else "inputs"]
    assert content["weights"][0]["parameters"][f"{name}layer.weight"]["norm"] == pytest.approx(weight)
    (structure,) = [s["values"] for s in content["hyperparameters"]["sources"] if s["kind"] == "model"]
    assert structure[f"{name}layer"] == "Linear as TorchScript"
    assert content["hyperparameters"]["model_state"]["methods"] == {}
    assert [note for note in read_pack(tmp_path / "pack.zip").notes if note.startswith(f"{where} is TorchScript")]
    net(torch.ones(2, 4))
    assert "trainprobe" not in str([*net._forward_pre_hooks.values(), *net._forward_hooks.values()]), "hooks are left behind"


def test_the_sources_of_the_program_are_hashed_and_those_of_torch_are_not(begun, tmp_path):
    sources = captured(tmp_path / "pack.zip", nn.Linear(4, 1))["packages"]["sources"]
    own = next(found for name, found in sources.items() if name.endswith("test_captured_state.py"))
    assert {"double", "halve", "captured"} <= own.keys()
    assert not [name for name in sources if name.startswith(("torch/", "trainprobe/", "numpy/"))]


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_rows_that_differ_only_in_padding_have_equal_fingerprints(dtype):
    rng = np.random.default_rng(1)
    rows = [rng.integers(1, 200, size=length) for length in (3, 5, 8, 8, 13)]

    def padded(order: list[int], width: int, value: int) -> torch.Tensor:
        held = np.full((len(order), width), value)
        for at, row in enumerate(order):
            held[at, : len(rows[row])] = rows[row]
        return torch.tensor(held).to(dtype)

    one = unpadded_fingerprints(padded([0, 1, 2, 3, 4], 16, 0))
    two = unpadded_fingerprints(padded([4, 2, 0, 1, 3], 20, 250))
    assert one is not None and two is not None
    assert one[[4, 2, 0, 1, 3]].tolist() == two.tolist()
    assert len(set(one.tolist())) == len(rows)


def test_batches_without_rows_to_compare_have_no_unpadded_fingerprints():
    assert unpadded_fingerprints(torch.ones(1, 4, dtype=torch.long)) is None
    assert unpadded_fingerprints(torch.ones(4, 1, dtype=torch.long)) is None


def test_the_page_of_everything_that_is_captured_is_that_of_the_code():
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.config_check.table"


@pytest.mark.parametrize("anew", [True, False])
def test_a_schedule_that_does_not_reach_the_optimizer_that_steps_is_told_of_either_side(tmp_path, anew):
    packs = []
    for side in ("a", "b"):
        torch.manual_seed(0)
        ConfigChecker.apply_patches(on_error="raise")
        net = nn.Linear(4, 1)
        before = torch.optim.SGD(net.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(before, 1, 0.5)
        optimizer = torch.optim.SGD(net.parameters(), 0.1) if anew else before
        with ConfigChecker(net, output_zip_path=tmp_path / f"{side}.zip", on_error="raise"):
            for _ in range(3):
                net(torch.ones(2, 4)).sum().backward()
                optimizer.step()
                schedule.step()
        packs.append(read_pack(tmp_path / f"{side}.zip"))
    comparison = compare_packs(*packs)
    checks = {check.name: check for check in comparison.checks}
    wrong = [f.text for f in checks["hyperparameters"].findings if "does not reach the optimizer that steps" in f.text]
    assert len(wrong) == 2 * anew  # both sides have the fault, and nothing else differs
    assert (comparison.exit_code == 2) == anew
