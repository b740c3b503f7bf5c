"""One plan file, one callback: dump, monitor, audit and the capture of the configuration, each read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import ops
from mindspore.train import Callback

from tests.mindspore.all_outputs import assert_all_outputs, plan_file
from tests.mindspore.tiny import BATCH, GRAPH, PYNATIVE, Data, Net, train
from trainprobe.config_check.pack_reader import read_pack
from trainprobe.engine.stats.checksum import fingerprint
from trainprobe.integrations.mindformers import ProbeCallback


class Writes(Callback):
    """Writes to a weight behind step 3: what no update did, and the audit must therefore name."""

    def on_train_step_end(self, run_context: Any) -> None:
        p = run_context.original_args()
        if p.cur_step_num == 3:
            weight = next(p for p in p.train_network.get_parameters() if p.name.endswith("blocks.0.up.weight"))
            ops.assign(weight, weight * 1.5)


@pytest.mark.proves("MindSpore", "all four outputs of one plan")
def test_the_callback_of_a_model_does_all_that_the_plan_says(tmp_path: Path) -> None:
    train(PYNATIVE, [ProbeCallback(plan_file(tmp_path, dumped=2)), Writes()])
    written = ("untouched_between_steps", 4, "blocks.0.up.weight")
    assert_all_outputs(tmp_path, dumped=2, steps=[1, 2, 3, 4], cell="blocks.0.up", found=written)


@pytest.mark.parametrize("mode", [PYNATIVE, GRAPH], ids=["pynative", "graph"])
def test_a_pack_holds_the_data_and_weights_that_the_training_had(mode: int, tmp_path: Path) -> None:
    bare = train(mode)
    plan = {"output": str(tmp_path), "level": "off", "config_check": {"micro_steps": 1, "tokens": 4}, "on_error": "raise"}
    on = train(mode, [ProbeCallback(plan)])
    assert on.bits == bare.bits
    pack = read_pack(tmp_path / "config_check_pack.zip").ranks[0]
    inputs = pack.by_micro["dataset"][0]["tensors"]
    x = Data().x[:BATCH]
    told = next(iter(inputs.values()))
    assert (told["shape"], told["dtype"], told["checksum"]) == ([BATCH, 3], "int32", f"{fingerprint(x):016x}")
    assert told["samples"] == [f"{fingerprint(sample):016x}" for sample in x]
    assert told["tokens"] == x.reshape(-1)[:4].tolist()
    ms.set_seed(1234)
    np.random.seed(1234)
    fresh = {p.name: p.asnumpy() for p in Net().get_parameters()}
    weights = pack.by_micro["weights"][0]["parameters"]
    assert {name: entry["checksum"] for name, entry in weights.items()} == {
        name: f"{fingerprint(array):016x}" for name, array in fresh.items()
    }
    source = next(s for s in pack.single["hyperparameters"]["sources"] if s["kind"] == "optimizer")
    assert source["values"]["class"] == "AdamWeightDecay"
    assert source["values"]["group0.lr"] == 1e-2
