"""Mapping files of mindstudio-probe: the examples of its documentation, and what is wrong in a file as a sentence."""

from __future__ import annotations

import json
import subprocess

import pytest
import yaml

from tests.interop.peer import PEER, needs_peer
from trainprobe.cli import main
from trainprobe.pytorch import compare

# the modules of both sides in the example of layers in its documentation (layer_mapping_example.md), and their partners there
LAYERS = {
    "module.Float16Module": "model.FloatModule",
    "module.module.GPTModel": "model.module.GPT2Model",
    "module.module.language_model.TransformerLanguageModel": None,
    "module.module.language_model.embedding.Embedding": "model.module.embedding.LanguageModelEmbedding",
    "module.module.language_model.rotary_pos_emb.RotaryEmbedding": "model.module.rotary_pos_emb.RotaryEmbedding",
    "module.module.language_model.encoder.ParallelTransformer": "model.module.decoder.TransformerBlock",
    "module.module.language_model.encoder.layers.0.ParallelTransformerLayer": "model.module.decoder.layers.0.TransformerLayer",
    "module.module.language_model.encoder.layers.0.mlp.ParallelMLP": "model.module.decoder.layers.0.mlp.MLP",
    "module.module.language_model.encoder.layers.0.mlp.dense_h_to_4h.ColumnParallelLinear": (
        "model.module.decoder.layers.0.mlp.linear_fc1.TELayerNormColumnParallelLinear"
    ),
    "module.module.language_model.encoder.layers.0.mlp.dense_4h_to_h.RowParallelLinear": (
        "model.module.decoder.layers.0.mlp.linear_fc2.TERowParallelLinear"
    ),
}
LAYER_MAPPING = """
TopLayer:
  module: model

GPTModel:
    language_model.embedding: embedding
    language_model.rotary_pos_emb: rotary_pos_emb
    language_model.encoder: decoder

ParallelMLP:
    dense_h_to_4h: linear_fc1
    dense_4h_to_h: linear_fc2
"""
CELL_MAPPING = "fc2.Dense: fc2.Linear\nconv1.Conv2d: conv3.Conv2d\n"
DATA_MAPPING = """
# API
Functional.flash_attention_score.4.forward.input.0: NPU.npu_fusion_attention.4.forward.input.0
# a module, and the gradient of its weight
Cell.relu.ReLU.forward.0.input.0: Module.embedding.word_embedding.VocabParallelEmbedding.forward.0.input.0
Cell.relu.ReLU.parameters_grad.weight: Module.embedding.word_embedding.VocabParallelEmbedding.parameters_grad.weight
"""
API_MAPPING = """
ms_api: Functional.abs
pt_api: Torch.abs
ms_args:
- 0
- 1
pt_args:
- 0
- 1
ms_outputs:
- 0
- 1
pt_outputs:
- 0
- 1
"""


def tensor(number, framework="pytorch", size=3):
    kind = {"type": "mindspore.Tensor", "dtype": "Float32"} if framework == "mindspore" else {"type": "torch.Tensor"}
    numbers = {"Max": number, "Min": -number, "Mean": 0.0, "Norm": number, "requires_grad": False}
    return {"dtype": "torch.float32", **kind, "shape": [size], **numbers}


def call(*given, out=(1.0,), framework="pytorch"):
    made = [[tensor(number, framework) for number in side] for side in (given, out)]
    return {"input_args": made[0], "input_kwargs": {}, "output": made[1]}


def dump(folder, framework, data):
    """Write a dump of another tool; return its folder."""
    folder.mkdir()
    header = {"task": "statistics", "level": "mix", "framework": framework, "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps({**header, "data": data}))
    (folder / "stack.json").write_text(json.dumps({entry: ["File a, line 1, in b, \n c"] for entry in data}))
    (folder / "construct.json").write_text(json.dumps(dict.fromkeys(data)))
    return folder


def written(folder, text):
    folder.joinpath("mapping.yaml").write_text(text)
    return folder / "mapping.yaml"


@pytest.fixture
def compared(tmp_path, capsys):
    """Return a function that compares two dumps under a mapping, and gives entry of A → of B, verdicts, and what was said."""

    def compare(a, b, text, code=None):
        capsys.readouterr()
        found = main(
            ["dump-compare", str(a), str(b), "--json", str(tmp_path / "all.json"), "--mapping", str(written(tmp_path, text))]
        )
        assert code is None or found == code
        calls = json.loads((tmp_path / "all.json").read_bytes())["calls"]
        return {each["a"]: each["b"] for each in calls}, {each["a"]: each["verdict"] for each in calls}, capsys.readouterr().out

    return compare


@pytest.fixture
def layered(tmp_path):
    """Return two dumps with the modules of the example of layers; each module gives a number of its own."""
    entries = {f"Module.{name}.forward.0": call(i, out=(i + 0.5,)) for i, name in enumerate(LAYERS)}
    others = {
        f"Module.{other}.forward.0": call(i, out=(i + 0.5,)) for i, other in enumerate(LAYERS.values()) if other is not None
    }
    return dump(tmp_path / "a", "pytorch", entries), dump(tmp_path / "b", "pytorch", others)


def test_layers_have_the_partners_of_the_documentation(layered, compared):
    partners, verdicts, said = compared(*layered, LAYER_MAPPING, 3)
    assert {
        a[len("Module.") : -len(".forward.0")]: b and b[len("Module.") : -len(".forward.0")] for a, b in partners.items()
    } == LAYERS
    assert (
        sorted(verdicts.values()) == ["identical"] * 9 + ["missing"]
        and "the first is Module.module.module.language_model." in said
    )


@needs_peer
def test_layers_have_the_partners_that_mindstudio_probe_finds(layered, compared, tmp_path):
    partners, _, _ = compared(*layered, LAYER_MAPPING)
    paths = [*(str(side / "dump.json") for side in layered), str(tmp_path / "mapping.yaml")]
    code = (
        "import json, sys; from msprobe.core.compare.layer_mapping import generate_api_mapping_by_layer_mapping as find; "
        "print('FOUND', json.dumps(find(*sys.argv[1:])))"
    )
    for name in ("construct.json", "stack.json"):
        for side in layered:
            (side / name).write_text((side / name).read_text().replace("null", '"TopLayer"'))
    done = subprocess.run([str(PEER), "-c", code, *paths], capture_output=True, text=True, timeout=120, check=True)
    theirs = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[len("FOUND") :])
    assert {a: b or "N/A" for a, b in partners.items()} == theirs


def test_cells_are_renamed_whole_or_in_part(tmp_path, compared):
    cells = {
        "Cell.fc2.Dense.forward.0": call(1.0, framework="mindspore"),
        "Cell.conv1.Conv2d.forward.0": call(2.0, framework="mindspore"),
    }
    modules = {"Module.fc2.Linear.forward.0": call(1.0), "Module.conv3.Conv2d.forward.0": call(2.0)}
    a, b = dump(tmp_path / "a", "mindspore", cells), dump(tmp_path / "b", "pytorch", modules)
    partners, _, _ = compared(a, b, CELL_MAPPING, 0)
    assert partners == {
        "Cell.fc2.Dense.forward.0": "Module.fc2.Linear.forward.0",
        "Cell.conv1.Conv2d.forward.0": "Module.conv3.Conv2d.forward.0",
    }
    partners, _, said = compared(a, b, "conv1: conv3\nfc9: fc2\n", 0)
    assert partners["Cell.conv1.Conv2d.forward.0"] == "Module.conv3.Conv2d.forward.0"
    assert "1 of 2 names of the mapping fit no module of A; the first is fc9" in said


def test_single_values_are_put_beside_each_other(tmp_path, compared):
    word = "Module.embedding.word_embedding.VocabParallelEmbedding"
    a = dump(tmp_path / "a", "mindspore", {
        "Functional.flash_attention_score.4.forward": call(1.0, 9.0, framework="mindspore"),
        "Cell.relu.ReLU.forward.0": call(2.0, framework="mindspore"),
        "Cell.relu.ReLU.parameters_grad.0": {"weight": [tensor(3.0, "mindspore")]},
    })  # fmt: skip
    b = dump(tmp_path / "b", "pytorch", {
        "NPU.npu_fusion_attention.4.forward": call(1.5),
        f"{word}.forward.0": call(2.0),
        f"{word}.parameters_grad.0": {"weight": [tensor(3.5)]},
    })  # fmt: skip
    partners, verdicts, _ = compared(a, b, DATA_MAPPING, 2)
    assert partners == {
        "Functional.flash_attention_score.4.forward": "NPU.npu_fusion_attention.4.forward",
        "Cell.relu.ReLU.forward.0": f"{word}.forward.0",
        "Cell.relu.ReLU.parameters_grad.0": f"{word}.parameters_grad.0",
    }
    assert verdicts["Cell.relu.ReLU.forward.0"] == "identical" and verdicts["Cell.relu.ReLU.parameters_grad.0"] == "bug"
    said = compared(a, b, f"{DATA_MAPPING}\nMint.add.0.forward.input.0: Torch.add.0.forward.input.0")[2]
    assert "2 values of the mapping are in no dump; the first is Mint.add.0.forward.input.0, of A" in said


@pytest.mark.parametrize("places", [((0, 2), (0, 1)), ()])
def test_operators_of_two_frameworks_belong_together_as_told(tmp_path, compared, places):
    """As in the documentation: an operator is given (a b c) in MindSpore and (a c) in PyTorch."""
    name, other = ("Functional.abs", "Torch.abs") if not places else ("Functional.roll_back", "NPU.roll_forth")
    args = (1.0, 2.0) if not places else (1.0, 7.0, 2.0)
    a = dump(tmp_path / "a", "mindspore", {f"{name}.0.forward": call(*args, out=(3.0, 4.0), framework="mindspore")})
    b = dump(tmp_path / "b", "pytorch", {f"{other}.0.forward": call(1.0, 2.0, out=(3.0, 4.5))})
    told = API_MAPPING
    if places:
        told = yaml.safe_dump([{"ms_api": name, "pt_api": other, "ms_args": [*places[0]], "pt_args": [*places[1]]}])
    for sides in ((a, b), (b, a)):
        partners, verdicts, _ = compared(*sides, told, 2)
        assert {*partners, *partners.values()} == {f"{name}.0.forward", f"{other}.0.forward"}
        assert [*verdicts.values()] == ["bug"]


WRONG = {
    "nothing": ("", "holds nothing: expected names of A with those of B"),
    "text": ("words", "holds str: expected names of A with those of B"),
    "no YAML": ("a: [", "is no YAML"),
    "a number": ("fc2.Dense: 3", r"has 'fc2.Dense': 3: both must be names"),
    "two kinds": ("fc2: fc3\nTorch.add.0.forward.input.0: Torch.add.1.forward.input.0", "names single values and also 'fc2'"),
    "one of B twice": (
        "Torch.add.0.forward.input.0: Torch.add.1.forward.input.0\nTorch.add.0.forward.input.1: Torch.add.1.forward.input.0",
        r"gives 'Torch.add.1.forward.input.0' of B to two values of A",
    ),
    "arguments": ("{ms_api: Functional.abs, pt_api: Torch.abs, ms_args: [0, 1], pt_args: [0]}", "has 2 ms_args and 1 pt_args"),
    "a place twice": ("{ms_api: F.abs, pt_api: T.abs, ms_args: [0, 0], pt_args: [0, 1]}", "a place stands there twice"),
    "a place": ("{ms_api: F.abs, pt_api: T.abs, ms_args: [-1], pt_args: [0]}", "whole numbers from 0"),
    "one operator": ("- {ms_api: F.abs}", "entry 1 has pt_api None"),
    "layers": ("GPTModel: {h: 3}", "GPTModel: has 'h': 3: both must be names"),
    "operators of one framework": ("{ms_api: Functional.abs, pt_api: Torch.abs}", "A and B are both of pytorch"),
}


@pytest.mark.parametrize("what", WRONG)
def test_what_is_wrong_in_a_mapping_is_a_sentence(layered, tmp_path, capsys, what):
    text, words = WRONG[what]
    assert main(["dump-compare", *map(str, layered), "--mapping", str(written(tmp_path, text))]) == 3
    said = capsys.readouterr().err
    assert words in said and "mapping" in said and "Traceback" not in said


def test_the_classic_function_takes_mapping_files(layered, tmp_path, capsys):
    told = {"npu_path": f"{layered[0]}/dump.json", "bench_path": f"{layered[1]}/dump.json"}
    assert compare(told, tmp_path / "out", layer_mapping=str(written(tmp_path, LAYER_MAPPING)), cell_mapping=True) == 3
    assert "has no effect" not in capsys.readouterr().err
    sheet = next((tmp_path / "out").glob("*.csv")).read_text()
    assert "Module.module.module.GPTModel.forward.0.input.0,Module.model.module.GPT2Model.forward.0.input.0" in sheet
