"""A vocabulary that tensor-parallel ranks of Megatron split, against one process: its table, its logits and its loss."""

from __future__ import annotations

from pathlib import Path

import orjson
import pytest

from tests.distributed.launch import launch
from trainprobe.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]
SCRIPT = Path(__file__).with_name("train_vocabulary.py")
LAYOUTS = ("tp2", "tp2 selective")  # with and without a split sequence
TABLE, LOGITS, LOSS = "Module.embedding.word_embeddings.", "Module.output_layer.", "Module.root.GPTModel.forward.0"
COMPARED = {  # call → slots that must be compared
    f"{TABLE}VocabParallelEmbedding.forward.0": {"input.0", "output"},
    f"{TABLE}VocabParallelEmbedding.backward.0": {"grad_output.0"},
    f"{TABLE}VocabParallelEmbedding.parameters_grad.0": {"weight"},
    f"{LOGITS}ColumnParallelLinear.forward.0": {"input.0", "output.0"},
    f"{LOGITS}ColumnParallelLinear.backward.0": {"grad_input.0", "grad_output.0"},
    LOSS: {"output"},
    "Module.root.GPTModel.backward.0": {"grad_output.0"},
}
PLANTED = {
    "row": ("Parameter.embedding.word_embeddings.weight (step 0)", "the weights differ"),
    "range": (f"{TABLE}VocabParallelEmbedding.forward.0", "output is at least"),
    "logits": (LOSS, "output is at least"),
    "gradient": (f"{LOGITS}ColumnParallelLinear.backward.0", "grad_output.0 is at least"),
}


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("vocabulary")
    launch(SCRIPT, 1, str(folder), "alone")
    for layout in LAYOUTS:
        launch(SCRIPT, 2, str(folder), layout)
    for fault in PLANTED:  # in processes of their own, which the fault is left in
        launch(SCRIPT, 2, str(folder), *(f"{layout}!{fault}" for layout in LAYOUTS[1:]))
    return folder


def compared(folder: Path, layout: str, capsys) -> tuple[int, str, list[dict]]:
    code = main(["dump-compare", str(folder / "alone"), str(folder / layout), "--json", str(folder / "all.json")])
    return code, capsys.readouterr().out, orjson.loads((folder / "all.json").read_bytes())["calls"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_table_logits_and_loss_are_compared_and_agree_within_rounding(folder, capsys, layout):
    code, said, calls = compared(folder, layout, capsys)
    assert code == 1, said
    found = {call["a"]: {value["slot"] for value in call["values"]} for call in calls}
    assert {name: slots & found.get(name, set()) for name, slots in COMPARED.items()} == COMPARED
    assert "Parameter.embedding.word_embeddings.weight" in found


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_of_one_rank_in_its_part_of_the_vocabulary_is_named_first(folder, capsys, fault):
    code, said, _ = compared(folder, f"tp2 selective!{fault}", capsys)
    assert code == 2, said
    for words in PLANTED[fault]:
        assert words in said.splitlines()[0], said
