"""Replay packs: the training is what it would have been, its bits come again elsewhere, and a pack executes nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import trainprobe
from tests.again.test_twice import same
from tests.again.test_twice import train as train_twice
from trainprobe.again.conditions.replay import finder, judge, read_packs
from trainprobe.again.pack import PACK, SCRIPT, TENSORS
from trainprobe.cli import main
from trainprobe.errors import FormatError, PlanError

MONITORED = {"monitor": {"gradients": True, "scalars": True, "activations": False}}


class Net(nn.Module):
    """Modules of torch of many kinds, dropout and writes in place among them."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.act = (
            nn.Conv1d(6, 8, 3, padding=1, padding_mode="circular"),
            nn.BatchNorm1d(8),
            nn.ReLU(True),
        )
        self.drop, self.block = nn.Dropout(0.1), nn.TransformerEncoderLayer(8, 2, 16, 0.0, activation="gelu", batch_first=True)
        self.attention, self.last = nn.MultiheadAttention(8, 2, batch_first=True), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(self.drop(self.act(self.norm(self.conv(x)))).transpose(1, 2))
        return self.last(self.attention(x, x, x, need_weights=False)[0])


def train(
    folder: Path, plan: dict[str, Any], change: Callable[[Net, Tensor, int], Any] = lambda *_: None, steps: int = 3
) -> Any:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    with trainprobe.watch(model, optimizer, {"output": folder, "console": False, "on_error": "raise", **plan}) as probe:
        for step in range(steps):
            x = torch.randn(8, 6, 5)
            with probe.step(), torch.autocast("cpu", torch.bfloat16, enabled=bool(step % 2)):
                optimizer.zero_grad()
                change(model, x, step)
                loss = model(x).float().square().mean()
                probe.note("loss", loss)
                loss.backward()
                optimizer.step()
    return probe


def answer(pack: Path, double: bool = True) -> Any:
    return judge(read_packs(pack), finder([]), double)


@pytest.mark.parametrize(
    "plan", [{"replay": {"on": "step"}}, {"replay": True, **MONITORED}, {"replay": {"megabytes": 1}, "audit": True}]
)
def test_the_training_is_what_it_would_have_been(tmp_path: Path, plan: dict[str, Any]) -> None:
    plain, _, _ = train_twice(tmp_path / "plain", None)
    packed, _, _ = train_twice(tmp_path / "packed", plan)
    assert {key: same(plain[key], packed[key]) for key in plain} == dict.fromkeys(plain, True)
    assert (tmp_path / "packed/replay").exists() == (plan["replay"] == {"on": "step"})


@pytest.mark.parametrize("step", [0, 1])
def test_a_healthy_step_has_its_bits_again_and_nothing_is_wrong(tmp_path: Path, step: int) -> None:
    train(tmp_path, {"replay": {"on": "step", "step": [step]}})
    found = answer(tmp_path / f"replay/step{step}")
    assert (found.kind, found.reproduced) == ("none", True)
    told = json.loads((tmp_path / f"replay/step{step}/rank0" / PACK).read_text())
    names = [call["name"] for call in told["calls"]]
    assert {"conv", "act", "drop", "block.linear1", "last"} <= {*names}
    unseen = [line for line in found.details if line.startswith("not judged")]
    assert len(unseen) == 1, unseen  # the result of norm, which the activation wrote in place
    assert "written in place" in unseen[0]


def test_an_error_writes_one_pack_of_the_call_that_made_it(tmp_path: Path) -> None:
    def change(model: Net, x: Tensor, step: int) -> None:
        if step == 1:
            model.block.norm2.weight.data.mul_(1e3)
            model.last.weight.data.mul_(1e38)
            model.attention.out_proj.weight.data.mul_(10)

    probe = train(tmp_path, {"replay": True, **MONITORED}, change, steps=4)
    (pack,) = (tmp_path / "replay").iterdir()
    (said,) = [f for f in probe.findings if f.rule == "replay"]
    assert (said.message, said.next) == ("step 1: last packed", f"`trainprobe replay {pack} --double`")
    found = answer(pack)
    assert (found.kind, found.reproduced) == ("precision", True)
    assert "last: float64 has up to" in found.sentence
    assert main(["replay", str(pack), "--double"]) == 2


def test_the_script_alone_has_the_bits_in_another_process(tmp_path: Path) -> None:
    train(tmp_path, {"replay": {"on": "step", "step": [0], "modules": ["conv", "last", "block.linear*"]}}, steps=1)
    script = tmp_path / "replay/step0/rank0" / SCRIPT
    assert len(script.read_text().splitlines()) <= 60
    done = subprocess.run(
        [sys.executable, "-P", script], capture_output=True, text=True, check=True, env={"OMP_NUM_THREADS": "1"}
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4
    assert all("as in the training: True" in line for line in lines)


@pytest.mark.parametrize(("modules", "code"), [("block.linear1", 0), (["block.linear1", "norm"], 3)])
def test_a_pack_of_which_a_call_was_not_judged_is_not_called_right(tmp_path: Path, modules: Any, code: int) -> None:
    train(tmp_path, {"replay": {"on": "step", "step": [0], "modules": modules}}, steps=1)
    assert main(["replay", str(tmp_path / "replay/step0")]) == code


def test_a_flipped_bit_of_a_recorded_result_is_hardware(tmp_path: Path) -> None:
    train(tmp_path, {"replay": {"on": "step", "step": [0], "modules": "last"}}, steps=1)
    file = tmp_path / "replay/step0/rank0" / TENSORS
    tensors = load_file(file)
    tensors["0.output.0"].view(torch.int32)[2, 1, 3] ^= 1 << 20
    save_file(tensors, file)
    found = answer(tmp_path / "replay/step0")
    assert found.kind == "hardware"
    assert "[2][1][3]: bit 20 (mantissa)" in found.sentence


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 200_000))
    with (
        trainprobe.watch(
            model, None, {"output": tmp_path, "console": False, "replay": {"on": "step", "megabytes": 1}}
        ) as probe,
        probe.step(),
    ):
        model(torch.ones(2, 8))
    (said,) = [f.message for f in probe.findings if f.rule == "replay"]
    assert said.startswith("step 0: 0 packed; not held: ")
    assert "beyond the 1 MB" in said


def test_nothing_would_find_an_error(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="nothing judges"):
        trainprobe.Probe({"output": tmp_path, "replay": True})


@pytest.fixture
def pack(tmp_path: Path) -> Path:
    train(tmp_path, {"replay": {"on": "step", "step": [0], "modules": "last"}}, steps=1)
    return tmp_path / "replay/step0/rank0"


def hostile(pack: Path, change: Callable[[Any], Any]) -> Any:
    document = json.loads((pack / PACK).read_text())
    change(document)
    (pack / PACK).write_text(json.dumps(document))
    return answer(pack)


def test_a_class_that_nobody_named_is_not_imported(pack: Path) -> None:
    (pack / "evil.py").write_text("raise SystemExit('it ran')")
    found = hostile(pack, lambda d: d["calls"][0]["module"].update({"class": "evil.Net"}))
    assert (found.kind, "--import evil" in found.sentence) == ("unknown", True)
    assert not any(found.sentence in line for line in found.details)  # it is said once
    found = hostile(pack, lambda d: d["calls"][0]["module"].update({"class": "os.system"}))
    assert found.kind == "unknown"


def test_the_packs_own_script_is_not_run(pack: Path) -> None:
    (pack / SCRIPT).write_text("raise SystemExit('it ran')")
    assert answer(pack).kind == "none"


@pytest.mark.parametrize(
    "attributes", [{"forward": "x"}, {"_call_impl": 1}, {"weight": "../../etc/passwd"}, {"__class__": "x"}]
)
def test_attributes_that_are_no_settings(pack: Path, attributes: dict[str, Any]) -> None:
    found = hostile(pack, lambda d: d["calls"][0]["module"].update({"attributes": attributes}))
    assert found.kind in ("unknown", "none")


def test_a_result_that_would_not_fit_into_memory_is_never_made(pack: Path) -> None:
    module = {"class": "torch.nn.modules.padding.ConstantPad1d", "children": {}}
    module["attributes"] = {"padding": [10**12, 10**12], "value": 0.0}  # type: ignore[assignment]
    found = hostile(pack, lambda d: d["calls"][0].update(module=module))
    assert (found.kind, "other shapes" in found.sentence) == ("unknown", True)


def test_a_wrong_dtype_is_said(pack: Path) -> None:
    tensors = load_file(pack / TENSORS)
    save_file({**tensors, "0.random.cpu": tensors["0.random.cpu"].float()}, pack / TENSORS)
    assert answer(pack).kind == "unknown"
    save_file({**tensors, "0.state.weight": tensors["0.state.weight"].long()}, pack / TENSORS)
    assert answer(pack).kind == "unknown"


@pytest.mark.parametrize("missing", [PACK, TENSORS])
def test_a_file_that_is_missing_or_cut(pack: Path, missing: str) -> None:
    whole = (pack / missing).read_bytes()
    (pack / missing).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FormatError, match="no whole replay pack"):
        read_packs(pack)
    (pack / missing).unlink()
    assert main(["replay", str(pack)]) == 3


def test_a_link_out_of_the_folder_is_not_followed(pack: Path, tmp_path: Path) -> None:
    (pack / TENSORS).rename(tmp_path / "elsewhere")
    (pack / TENSORS).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(FormatError, match="no whole replay pack"):
        read_packs(pack)


@pytest.mark.parametrize("text", ["[]", "{}", '{"format": 2}', '{"format": 1, "calls": 3}', "[" * 5000])
def test_a_document_of_another_shape(pack: Path, text: str) -> None:
    (pack / PACK).write_text(text)
    with pytest.raises(FormatError):
        read_packs(pack)
