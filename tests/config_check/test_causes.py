"""The first line names what explains a difference before what follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.config_check.made_packs import compare, entry, rank_pack
from trainprobe.config_check.capture.fingerprints import unpadded_fingerprints
from trainprobe.config_check.pack import RankPack

BATCHES = [[[float(i), i + 0.5], [i + 0.25, -i]] for i in range(1, 6)]
OTHER_ORDER = [BATCHES[i] for i in (2, 0, 1, 4, 3)]
OTHER_WEIGHTS = {"fc.weight": [1.0, 2.5], "fc.bias": [0.5]}


def trained(made: RankPack, weights: dict[str, Any] | None = None, steps: tuple[int, ...] = (0, 1, 2)) -> RankPack:
    """Return a pack of three micro-steps; weights are those from micro-step 1 on."""
    first = made.by_micro["weights"][0]["parameters"]
    later = first if weights is None else {name: {**entry(w), "kind": "parameter"} for name, w in weights.items()}
    for micro, step in enumerate(steps):
        made.by_micro["weights"][micro] = {"step": step, "parameters": later if micro else first}
    return made


def with_code(made: RankPack, **functions: str) -> RankPack:
    made.single["packages"]["sources"] = {"train.py": {"main": "1", **functions}, "model.py": {"Block.forward": "2"}}
    return made


def with_state(made: RankPack, **state: dict[str, str]) -> RankPack:
    made.single["hyperparameters"]["model_state"] = {"evaluation": {}, "hooks": {}, "methods": {}, "compiled": {}, **state}
    return made


def with_others(made: RankPack, **variables: str) -> RankPack:
    made.single["environment"]["others"] = variables
    return made


def call(count: int, function: str, detail: str = "", window: int = -1) -> dict[str, object]:
    return {"function": function, "detail": detail, "window": window, "count": count, "stack": 0}


def test_the_order_of_the_data_comes_before_the_call_that_shuffled_it():
    comparison = compare(rank_pack(batches=BATCHES), rank_pack(batches=OTHER_ORDER, calls=[call(1, "random.shuffle")]))
    assert comparison.sentence == "the same batches come in another order"
    assert "shuffle is called 0 times and 1 time" in comparison.consequences


def test_a_seed_still_comes_before_the_order_that_follows_from_it():
    calls = [[call(1, "random.seed", seed)] for seed in ("1", "2")]
    comparison = compare(rank_pack(batches=BATCHES, calls=calls[0]), rank_pack(batches=OTHER_ORDER, calls=calls[1]))
    assert comparison.sentence.startswith("seed of random.seed differs: 1 and 2")
    assert "another order" in comparison.consequences


def test_a_run_that_never_seeds_lacks_the_call_and_the_seed_that_torch_drew_follows():
    seeded = rank_pack(calls=[call(1, "torch.manual_seed", "7")], flags={"initial_seed": 7})
    comparison = compare(seeded, rank_pack(flags={"initial_seed": 17258700794230832928}))
    assert comparison.sentence.startswith("manual_seed 7 is called 1 time and 0 times")
    assert "seed of torch differs: 7 and 17258700794230832928" in comparison.consequences


def test_a_compiled_run_is_never_told_as_a_missing_seed():
    plain = with_state(rank_pack(calls=[call(1, "torch.manual_seed", "7"), call(4, "torch.nn.functional.dropout", "p=0.1", 0)]))
    compiled = with_state(rank_pack(), compiled={"the model": "backend=inductor"})
    compiled.single["randomness"]["counted_until"] = -1
    comparison = compare(plain, compiled)
    assert comparison.sentence == "torch.compile is applied to the model (backend=inductor) only in cmp"
    assert comparison.consequences == ""


def test_what_a_side_that_stopped_counting_called_all_the_same_is_still_told():
    compiled = rank_pack(calls=[call(1, "torch.manual_seed", "7")])
    compiled.single["randomness"]["counted_until"] = 1
    assert compare(rank_pack(), compiled).exit_code == 2


def test_equal_data_weights_and_settings_with_other_results_are_other_code():
    sides = with_code(trained(rank_pack()), step="3"), with_code(trained(rank_pack(), OTHER_WEIGHTS), step="4")
    comparison = compare(*sides)
    assert comparison.sentence == "the code differs: step in train.py"
    assert comparison.consequences.startswith("what follows: weight fc.weight differs from micro-step 1 on")
    assert comparison.exit_code == 2


def test_code_that_differs_stands_behind_a_setting_that_does():
    sides = with_code(rank_pack(settings={"lr": 1}), main="5"), with_code(rank_pack(settings={"lr": 2}))
    comparison = compare(*sides)
    assert (comparison.sentence, comparison.consequences) == (
        "learning rate differs: 1 and 2",
        "besides: the code differs: main in train.py",
    )


def test_equal_code_makes_another_commit_a_note():
    sides = with_code(rank_pack()), with_code(rank_pack())
    sides[1].single["packages"]["code"] = {"commit": "0123456789abcdef"}
    assert compare(*sides).exit_code == 0


def test_a_script_of_another_name_with_the_same_code_is_the_same():
    renamed = with_code(rank_pack())
    sources = renamed.single["packages"]["sources"]
    renamed.single["packages"]["sources"] = {"run/train.py" if n == "train.py" else n: f for n, f in sources.items()}
    assert compare(with_code(rank_pack()), renamed).exit_code == 0


def test_a_source_that_only_one_side_loads_is_told():
    more = with_code(rank_pack())
    more.single["packages"]["sources"]["patch.py"] = {"apply": "6"}
    assert compare(with_code(rank_pack()), more).sentence == "the code differs: patch.py, loaded only in cmp"


@pytest.mark.parametrize(
    ("package", "file"),
    [
        ("transformers", "transformers/models/llama/modeling_llama.py"),
        ("megatron-core", "megatron/core/transformer/attention.py"),
        ("pytorch-lightning", "pytorch_lightning/core/module.py"),
    ],
)
def test_the_sources_of_a_known_package_of_another_version_are_not_told_beside_it(package, file):
    def made(version: str, code: str, own: str) -> RankPack:
        made = with_code(rank_pack())
        made.single["packages"]["distributions"] = {package: version}
        made.single["packages"]["sources"] |= {file: {"Block.forward": code}, "mine.py": {"load": own}}
        return made

    assert compare(made("1.0", "1", "5"), made("1.1", "2", "5")).sentence == f"{package} differs: 1.0 and 1.1"
    assert "load in mine.py" in compare(made("1.0", "1", "5"), made("1.1", "2", "6")).sentence
    assert f"Block.forward in {file}" in compare(made("1.0", "1", "5"), made("1.0", "2", "5")).sentence


def test_the_sources_of_a_program_s_own_package_are_told_beside_its_version():
    """Installed editable, with a version for each commit."""

    def made(version: str, code: str) -> RankPack:
        made = with_code(rank_pack())
        made.single["packages"]["distributions"] = {"my-models": version}
        made.single["packages"]["sources"] |= {"my_models/llama.py": {"Block.forward": code}}
        return made

    said = compare(made("1.0.dev3+ga1", "1"), made("1.0.dev4+gb2", "2")).sentence
    assert "my-models differs: 1.0.dev3+ga1 and 1.0.dev4+gb2" in said
    assert "the code differs: Block.forward in my_models/llama.py" in said


@pytest.mark.parametrize(
    ("kind", "name", "package"),
    [
        ("megatron", "get_args", "megatron-core"),
        ("lightning", "Trainer", "lightning"),
        ("lightning", "Trainer", "pytorch-lightning"),
    ],
)
def test_settings_that_only_another_megatron_or_lightning_knows_follow_from_its_version(kind, name, package):
    def made(version: str, **values: Any) -> RankPack:
        return rank_pack(settings=[{"kind": kind, "name": name, "values": {"seed": 1, **values}}], packages={package: version})

    old, new = made("0.16.1", old_flag=True, other_flag=2, third_flag=None), made("0.17.1", new_flag=3)
    assert compare(old, new).sentence == f"{package} differs: 0.16.1 and 0.17.1"
    assert "3 settings" in compare(old, new).consequences
    assert "new_flag" in compare(made("0.17.1"), new).sentence


def test_settings_that_only_another_release_of_their_library_knows_follow_from_its_version():
    def made(version: str, settings: dict[str, Any], **variables: str) -> RankPack:
        sources = [{"kind": "transformers", "name": "TrainingArguments", "values": {"max_steps": 6, **settings}}]
        return rank_pack(settings=sources, packages={"transformers": version}, variables=variables)

    old = made("4.57.6", {"no_cuda": False, "tpu_num_cores": None, "jit_mode": False}, ACCELERATE_MIXED_PRECISION="no")
    found = compare(old, made("5.23.0", {"loss_type": "mean"}))
    assert found.sentence == "transformers differs: 4.57.6 and 5.23.0"
    assert "3 settings of the TrainingArguments are only in bench" in found.consequences
    assert "ACCELERATE_MIXED_PRECISION" in found.consequences
    assert "loss_type" in compare(made("5.23.0", {}), made("5.23.0", {"loss_type": "mean"})).sentence
    assert compare(old, made("5.23.0", {"max_steps": 7})).sentence.startswith("number of training steps differs: 6 and 7")


def test_a_variable_that_is_not_in_the_table_is_never_passed_over():
    comparison = compare(with_others(rank_pack(), MY_FLAG="1a"), with_others(rank_pack(), MY_FLAG="2b", OTHER="3c"))
    assert comparison.exit_code == 0
    assert comparison.sentence == "no difference found in what was captured; 2 other variables differ: MY_FLAG, OTHER"


def test_a_variable_that_is_not_in_the_table_is_named_where_nothing_else_explains_other_results():
    comparison = compare(with_others(trained(rank_pack()), MY_FLAG="1"), with_others(trained(rank_pack(), OTHER_WEIGHTS)))
    assert comparison.sentence == "1 other variable differs: MY_FLAG"
    explained = compare(
        with_others(trained(rank_pack(settings={"lr": 1})), MY_FLAG="1"), trained(rank_pack(settings={"lr": 2}), OTHER_WEIGHTS)
    )
    assert explained.sentence == "learning rate differs: 1 and 2"


@pytest.mark.parametrize("name", ["PWD", "SSH_TTY", "HOSTNAME", "USER", "TERM", "SLURM_JOB_ID", "VIRTUAL_ENV"])
def test_a_variable_that_says_where_a_run_was_started_is_not_mentioned(name):
    comparison = compare(with_others(rank_pack(), **{name: "1"}), with_others(rank_pack()))
    assert comparison.sentence == "no difference found: everything that was captured is the same"


@pytest.mark.parametrize("name", ["CLOSE_MATMUL_K_SHIFT", "FLASH_ATTENTION_DETERMINISTIC"])
def test_a_variable_that_one_side_has_not_set_says_so(name):
    comparison = compare(rank_pack(), rank_pack(variables={name: "1"}))
    assert (comparison.sentence, comparison.exit_code) == (f"{name} differs: (not set) and 1", 2)


def test_more_loader_workers_are_told_only_where_the_data_differ():
    workers = [{"kind": "loader", "name": "0", "values": {"num_workers": n}} for n in (0, 2)]
    assert compare(rank_pack(settings=workers[:1]), rank_pack(settings=workers[1:])).exit_code == 0
    comparison = compare(rank_pack(settings=workers[:1], batches=BATCHES), rank_pack(settings=workers[1:], batches=OTHER_ORDER))
    assert comparison.sentence == "data workers differs: 0 and 2"
    assert comparison.exit_code == 2


@pytest.mark.parametrize(("kind", "code"), [("loader", 2), ("idle loader", 0)])
def test_a_loader_from_which_no_step_drew_changes_nothing(kind, code):
    sides = [[{"kind": kind, "name": "1", "values": {"batch_size": n, "drop_last": False}}] for n in (8, 16)]
    comparison = compare(*(rank_pack(settings=side) for side in sides))
    assert comparison.exit_code == code
    assert any("batch size differs: 8 and 16" in f.text for check in comparison.checks for f in check.findings)


def test_gradient_accumulation_shows_in_the_steps_of_the_optimizer():
    comparison = compare(trained(rank_pack()), trained(rank_pack(), OTHER_WEIGHTS, steps=(0, 0, 1)))
    assert comparison.sentence == ("gradient accumulation differs: an optimizer step every 1 micro-step and 2 micro-steps")


def test_steps_that_were_skipped_are_no_gradient_accumulation():
    sentence = compare(trained(rank_pack()), trained(rank_pack(), steps=(0, 0, 0))).sentence
    assert "3 micro-steps or more" in sentence
    sentence = compare(trained(rank_pack(), steps=(0, 1, 2)), trained(rank_pack(), steps=(0, 1, 1))).sentence
    assert sentence == "optimizers step at other times: 2 optimizer steps and 1 optimizer step before micro-step 2"


def test_a_frozen_weight_is_named_before_the_weights_that_follow():
    sides = trained(rank_pack()), trained(rank_pack(), OTHER_WEIGHTS)
    for side, held in zip(sides, (True, False), strict=True):
        for micro in side.by_micro["weights"].values():
            for name, made in micro["parameters"].items():
                made["requires_grad"] = held or name != "fc.weight"
    comparison = compare(*sides)
    assert comparison.sentence == "requires_grad of fc.weight differs: true and false (is frozen in cmp)"


def test_a_model_in_evaluation_mode_explains_that_data_and_weights_are_missing():
    left = with_state(rank_pack(), evaluation={"the model": "Net", "drop": "Dropout"})
    silent = RankPack(0, left.single, {})
    comparison = compare(with_state(rank_pack()), silent)
    assert comparison.sentence == "the model is in evaluation mode only in cmp"
    assert comparison.exit_code == 2


def test_values_that_only_changed_places_are_told_as_such():
    left, right = rank_pack(), rank_pack()
    for side, flip in ((left, False), (right, True)):
        for i, micro in enumerate(side.by_micro["dataset"].values()):
            values = [[i + 1.0, i + 2.0, 0.0], [i + 3.0, 0.0, 0.0]]
            micro["tensors"] = {"ids": entry([row[::-1] if flip else row for row in values], samples=True)}
    assert compare(left, right).sentence == ("ids holds the same values in other places: padded on the other side, or permuted")


def test_a_switch_that_one_side_does_not_know_is_not_compared():
    flags = {"cudnn.allow_tf32": True, "flash attention": True}
    assert compare(rank_pack(flags=flags), rank_pack(flags={"cudnn.allow_tf32": True})).exit_code == 0
    comparison = compare(rank_pack(flags=flags), rank_pack(flags={**flags, "flash attention": False}))
    assert (comparison.sentence, comparison.exit_code) == ("flash attention differs: true and false", 1)


def test_a_switch_that_sets_another_is_told_alone():
    flags = {"float32_matmul_precision": "highest", "matmul.allow_tf32": False}
    other = {"float32_matmul_precision": "high", "matmul.allow_tf32": True}
    assert compare(rank_pack(flags=flags), rank_pack(flags=other)).sentence == (
        "float32 matmul precision differs: highest and high"
    )


def test_calls_that_both_sides_make_follow_from_whatever_else_differs():
    calls = [[call(4, "random.random", "", 0)], [call(5, "random.random", "", 0)]]
    comparison = compare(rank_pack(settings={"lr": 1}, calls=calls[0]), rank_pack(settings={"lr": 2}, calls=calls[1]))
    assert comparison.sentence == "learning rate differs: 1 and 2"
    assert comparison.consequences.startswith("what follows: random.random is called 4 times and 5 times")


def test_equal_totals_are_told_by_the_window_in_which_they_differ():
    calls = [
        [call(4, "random.random", "", 0), call(5, "random.random", "", 1)],
        [call(5, "random.random", "", 0), call(4, "random.random", "", 1)],
    ]
    sentence = compare(rank_pack(calls=calls[0]), rank_pack(calls=calls[1])).sentence
    assert sentence.startswith("random.random is called 4 times and 5 times, in micro-step 0")


def test_a_generator_of_its_own_that_draws_ahead_is_no_difference_by_itself():
    detail = "from a generator of its own"
    calls = [[call(1, "torch.randperm", detail, 0)], [call(1, "torch.randperm", detail, -1)]]
    assert compare(rank_pack(calls=calls[0]), rank_pack(calls=calls[1])).exit_code == 0
    assert compare(rank_pack(calls=calls[0]), rank_pack(calls=calls[0][:0])).exit_code == 2


@pytest.mark.parametrize(
    ("width", "value", "said"),
    [
        (8, 0, "the same samples are padded to another length: ids [2, 5] and ids [2, 8]"),
        (5, 9, "the same samples are padded with another value in ids"),
    ],
)
def test_samples_that_differ_only_in_padding_are_told_as_such(width, value, said):
    rows = [[1, 2, 3], [4, 5]]
    sides = []
    for columns, padding in ((5, 0), (width, value)):
        made = rank_pack(batches=[[1.0], [2.0]])
        for i, micro in enumerate(made.by_micro["dataset"].values()):
            ids = torch.tensor([[x + i for x in row] + [padding] * (columns - len(row)) for row in rows])
            unpadded = unpadded_fingerprints(ids)
            assert unpadded is not None
            micro["tensors"] = {"ids": {**entry(ids.numpy(), samples=True), "unpadded": [str(x) for x in unpadded.tolist()]}}
        sides.append(made)
    assert compare(*sides).sentence == said


def test_a_variable_explains_weights_of_the_start_that_differ_by_rounding_alone():
    a = rank_pack(variables={}, weights={"fc.weight": [1.0, 2.0]})

    def line(variable: str, value: float) -> str:
        return compare(a, rank_pack(variables={variable: "x"}, weights={"fc.weight": [1.0, value]})).sentence

    nearly = 2.0 * (1 + 1e-6)
    assert line("ATEN_CPU_CAPABILITY", nearly) == "ATEN_CPU_CAPABILITY differs: (not set) and x"
    assert line("ATEN_CPU_CAPABILITY", 2.1).startswith("weight fc.weight differs from the start")
    assert line("CUDA_LAUNCH_BLOCKING", nearly).startswith("weight fc.weight differs from the start")


def test_an_argument_comes_before_the_modules_that_it_makes():
    packs = [
        rank_pack(
            settings=[
                {"kind": "arguments", "name": "argparse", "values": {"disable_dp": off}},
                {"kind": "model", "name": "model", "values": {"0": kind}},
            ]
        )
        for off, kind in ((False, "GradSampleModule"), (True, "Linear"))
    ]
    assert compare(*packs).sentence.startswith("disable_dp differs: false and true; module 0 differs")


def test_the_class_of_an_optimizer_comes_before_the_defaults_that_it_brings():
    packs = [
        rank_pack(
            settings=[{"kind": "optimizer", "name": "0", "values": {"class": kind, "group0.weight_decay": decay}}],
        )
        for kind, decay in (("Adam", 0.0), ("AdamW", 0.01))
    ]
    assert compare(*packs).sentence.startswith("optimizer class differs: Adam and AdamW; weight decay differs: 0 and 0.01")


def test_the_number_of_workers_among_the_arguments_of_a_worker_function_is_no_difference():
    packs = [
        rank_pack(
            settings=[{"kind": "loader", "name": "0", "values": {"worker_init_fn": {"function": "seed", "num_workers": n}}}],
        )
        for n in (0, 2)
    ]
    assert compare(*packs).exit_code == 0


def test_a_rank_of_an_adapter_is_a_setting_and_the_rank_of_a_process_is_not():
    assert "LoRA rank differs: 4 and 8" in compare(*(rank_pack(settings={"lora_rank": n}) for n in (4, 8))).sentence
    assert compare(*(rank_pack(settings={"local_rank": n}) for n in (0, 1))).exit_code == 0


def test_a_variable_that_lightning_sets_follows_from_deterministic_algorithms():
    plain = rank_pack(flags={"deterministic_algorithms": False})
    deterministic = rank_pack(flags={"deterministic_algorithms": True}, variables={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"})
    assert compare(plain, deterministic).sentence == "deterministic algorithms differs: false and true"
