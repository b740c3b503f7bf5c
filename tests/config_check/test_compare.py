"""What a comparison says about packs in which one thing differs."""

from __future__ import annotations

import numpy as np
import pytest

from tests.config_check.made_packs import compare, entry, pack, rank_pack
from trainprobe.config_check.compare.values import same
from trainprobe.config_check.compare.verdicts import which_ranks

BATCHES = [[[float(i), i + 0.5], [i + 0.25, -i]] for i in range(1, 6)]


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("1e-4", 0.0001),
        ("1e-4", "0.0001"),
        ("True", True),
        ("none", None),
        ("8", 8.0),
        ([0.9, "0.95"], ["0.9", 0.95]),
        (0.1, float(np.float32(0.1))),
    ],
)
def test_settings_are_the_same_by_value(a, b):
    assert same(a, b)


@pytest.mark.parametrize(
    ("a", "b"), [("1e-4", 3e-4), (0.1, 0.1 + 1e-12), ("a", "b"), ([1], [1, 2]), (None, 0), ("", 0), ("1_0", 10)]
)
def test_settings_are_not_the_same_by_looks(a, b):
    assert not same(a, b)


def test_two_equal_packs_pass():
    comparison = compare(rank_pack(), rank_pack())
    assert (comparison.exit_code, comparison.sentence) == (0, "no difference found: everything that was captured is the same")


def test_the_example_of_the_manual():
    later = [*BATCHES[:3], *([[[9.0, 9.0], [8.0, 8.0]]] * 2)]
    comparison = compare(rank_pack(settings={"lr": 1e-4}, batches=BATCHES), rank_pack(settings={"lr": 3e-4}, batches=later))
    assert comparison.sentence == (
        "learning rate differs: 0.0001 and 0.0003; the data differs from micro-step 3 on: 4 of 10 samples are replaced"
    )


def test_one_setting_in_two_frameworks_is_one_setting():
    megatron = [{"kind": "megatron", "name": "get_args", "values": {"lr": 1e-4, "micro_batch_size": 4, "clip_grad": 1.0}}]
    hf = [
        {
            "kind": "transformers",
            "name": "TrainingArguments",
            "values": {"learning_rate": 1e-4, "per_device_train_batch_size": 8, "max_grad_norm": 1.0},
        }
    ]
    comparison = compare(rank_pack(settings=megatron), rank_pack(settings=hf))
    assert comparison.sentence == "micro-batch size differs: 4 and 8"


def test_a_setting_that_one_side_lacks_is_a_warning_and_never_a_pass():
    comparison = compare(rank_pack(settings={"lr": 1, "extra": 2}), rank_pack(settings={"lr": 1}))
    assert (comparison.exit_code, comparison.sentence) == (1, "extra is only in bench: 2")


def test_a_place_of_a_run_is_a_note():
    comparison = compare(rank_pack(settings={"output_dir": "/a"}), rank_pack(settings={"output_dir": "/b"}))
    assert comparison.exit_code == 0


def test_nccl_and_hccl_variables_are_the_same_variable():
    comparison = compare(rank_pack(variables={"NCCL_DETERMINISTIC": "0"}), rank_pack(variables={"HCCL_DETERMINISTIC": "true"}))
    assert comparison.exit_code == 2
    comparison = compare(rank_pack(variables={"NCCL_DETERMINISTIC": "1"}), rank_pack(variables={"HCCL_DETERMINISTIC": "true"}))
    assert comparison.exit_code == 0
    comparison = compare(rank_pack(variables={"NCCL_ALGO": "Ring"}), rank_pack(variables={"HCCL_ALGO": "Ring"}))
    assert comparison.exit_code == 0


@pytest.mark.parametrize(
    ("name", "code"), [("NVIDIA_TF32_OVERRIDE", 2), ("NCCL_ALGO", 1), ("CUDA_LAUNCH_BLOCKING", 1), ("MASTER_PORT", 0)]
)
def test_the_table_decides_how_grave_a_variable_is(name, code):
    assert compare(rank_pack(variables={name: "1"}), rank_pack()).exit_code == code


@pytest.mark.parametrize(("name", "code"), [("numpy", 2), ("nvidia-cublas-cu12", 2), ("rich", 1), ("pip", 0)])
def test_the_table_decides_how_grave_a_package_is(name, code):
    assert compare(rank_pack(packages={name: "1.0"}), rank_pack(packages={name: "1.1"})).exit_code == code


def test_a_build_tag_is_part_of_a_version():
    comparison = compare(rank_pack(packages={"torch": "2.13.0+cpu"}), rank_pack(packages={"torch": "2.13.0+cu126"}))
    assert comparison.sentence == "torch differs: 2.13.0+cpu and 2.13.0+cu126"


@pytest.mark.parametrize(
    ("batches", "said"),
    [
        ([BATCHES[i] for i in (2, 0, 1, 4, 3)], "the same batches come in another order"),
        ([BATCHES[0], *BATCHES[:4]], "the same batches come 1 micro-step later in cmp"),
        (BATCHES[2:] + [[[7.0, 7.0], [6.0, 6.0]]] * 2, "the same batches come 2 micro-steps later in bench"),
        ([[[100.0 + i, 1.0], [2.0, 3.0 + i]] for i in range(5)], "the data is other data altogether"),
        (np.array(BATCHES).reshape(5, 2, 2)[:, ::-1].tolist(), "the same samples come in another order"),
        (
            np.array(BATCHES).reshape(10, 2)[[0, 2, 1, 3, 4, 6, 5, 7, 8, 9]].reshape(5, 2, 2).tolist(),
            "the same samples come in another order",
        ),
    ],
)
def test_how_the_data_differs_is_explained(batches, said):
    assert compare(rank_pack(batches=BATCHES), rank_pack(batches=batches)).sentence == said


def test_the_same_samples_in_batches_of_another_size_are_told():
    rows = np.array(BATCHES).reshape(10, 2)
    comparison = compare(rank_pack(batches=BATCHES), rank_pack(batches=[rows[:5], rows[5:]]))
    assert "the same samples are cut into batches of another size" in comparison.sentence


def test_other_weights_from_the_start_follow_from_another_seed():
    comparison = compare(
        rank_pack(settings={"seed": 1}), rank_pack(settings={"seed": 2}, weights={"fc.weight": [9.0, 2.0], "fc.bias": [0.5]})
    )
    assert comparison.sentence == "seed differs: 1 and 2"
    assert comparison.consequences == "what follows: weight fc.weight differs from the start: norm 2.236067977 and 9.219544457"


def test_a_renamed_weight_is_recognised_by_its_bits():
    comparison = compare(rank_pack(), rank_pack(weights={"model.fc.weight": [1.0, 2.0], "fc.bias": [0.5]}))
    assert comparison.sentence == "1 weight has another name and equal values: fc.weight is model.fc.weight in cmp"
    assert comparison.exit_code == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_a_weight_that_one_side_lacks_is_an_error(swapped):
    both = [rank_pack(), rank_pack(weights={"fc.weight": [1.0, 2.0]})]
    comparison = compare(*(both[::-1] if swapped else both))
    assert comparison.sentence == f"weight fc.bias is only in {'cmp' if swapped else 'bench'}"
    assert comparison.exit_code == 2


def call(
    count: int, function: str = "torch.nn.functional.dropout", detail: str = "p=0.1", window: int = 0
) -> dict[str, object]:
    return {"function": function, "detail": detail, "window": window, "count": count, "stack": 0}


def test_a_dropout_called_a_different_number_of_times_is_told_with_its_place():
    comparison = compare(rank_pack(calls=[call(4)]), rank_pack(calls=[call(6)]))
    assert (
        comparison.sentence
        == "dropout p=0.1 is called 4 times and 6 times, first in micro-step 0, at model.py:31 in Block.forward"
    )


def test_random_calls_that_only_one_side_made_are_an_error():
    assert compare(rank_pack(calls=[call(4)]), rank_pack()).exit_code == 2


def test_a_torch_seed_and_a_mindspore_seed_are_the_same_call():
    mine, theirs = call(1, "torch.manual_seed", "7", -1), call(1, "mindspore.set_seed", "7", -1)
    assert compare(rank_pack(calls=[mine]), rank_pack(calls=[theirs])).exit_code == 0


def test_a_random_state_that_differs_without_other_cause_is_told():
    states = [{"0": {"torch": "aa"}, "1": {"torch": s}} for s in ("bb", "cc")]
    comparison = compare(*(rank_pack(states=s) for s in states))
    assert comparison.sentence == "random state of torch differs from micro-step 1 on"


def test_one_of_64_ranks_is_named():
    bench = pack(*(rank_pack(r) for r in range(64)))
    cmp = pack(*(rank_pack(r, weights={"fc.weight": [1.0, 2.0 + (r == 17)], "fc.bias": [0.5]}) for r in range(64)))
    comparison = compare(bench, cmp)
    assert comparison.sentence == (
        "weight fc.weight differs from the start: norm 2.236067977 and 3.16227766 on rank 17 (ranks 0–16, 18–63 agree)"
    )


def test_a_missing_rank_is_never_a_pass():
    comparison = compare(pack(rank_pack(0), rank_pack(1)), pack(rank_pack(0), world_size=2))
    assert comparison.exit_code == 2
    assert "cmp lacks rank 1 of 2" in comparison.sentence


def test_a_missing_capture_is_never_a_pass():
    whole, part = rank_pack(), rank_pack()
    part = type(part)(0, {k: v for k, v in part.single.items() if k != "packages"}, part.by_micro)
    comparison = compare(whole, part)
    assert (comparison.exit_code, comparison.sentence) == (2, "packages: missing in cmp, so it could not be compared")


def test_a_micro_step_that_one_side_lacks_is_a_warning():
    comparison = compare(rank_pack(batches=BATCHES), rank_pack(batches=BATCHES[:4]))
    assert comparison.exit_code == 1
    assert comparison.sentence == "micro-step 4 of rank 0 is missing in cmp: 5 and 4 were captured"


def test_the_pack_of_a_killed_run_is_a_warning():
    comparison = compare(pack(complete=False), pack())
    assert (comparison.exit_code, comparison.sentence) == (1, "bench is the pack of a run that ended early")


def test_nothing_in_common_cannot_be_compared():
    a, b = rank_pack(), rank_pack()
    empty = type(a)(0, {"environment": a.single["environment"]}, {})
    other = type(b)(0, {"packages": b.single["packages"]}, {})
    assert compare(empty, other).exit_code == 3


def test_ranks_that_exchanged_their_data_are_recognised():
    one, two = BATCHES[:2], BATCHES[2:4]
    comparison = compare(
        pack(rank_pack(0, batches=one), rank_pack(1, batches=two)), pack(rank_pack(0, batches=two), rank_pack(1, batches=one))
    )
    assert comparison.sentence == "ranks 0, 1 see each other's data"


def test_a_tensor_with_equal_statistics_and_other_bits_is_found():
    a = np.array([1.0, 2.0, 3.0, 4.0])
    b = a[[1, 0, 2, 3]]
    assert {k: v for k, v in entry(a).items() if k != "checksum"} == {k: v for k, v in entry(b).items() if k != "checksum"}
    comparison = compare(rank_pack(weights={"w": a}), rank_pack(weights={"w": b}))
    assert comparison.sentence == (
        "weight w differs from the start: other bits with equal statistics, as the same numbers in another order have"
    )


def test_ranks_are_said_the_short_way():
    assert which_ranks([0], [0]) == ""
    assert which_ranks(list(range(8)), list(range(8))) == ""
    assert which_ranks([r for r in range(64) if r != 3], list(range(64))) == " on all ranks except 3"


@pytest.mark.parametrize(("a", "b"), [(20240000, 20240001), ("20240000", 20240001), (123456789, 123456792.0)])
def test_whole_numbers_that_float32_rounds_to_one_are_not_the_same(a, b):
    assert not same(a, b)
    assert compare(rank_pack(settings={"seed": a}), rank_pack(settings={"seed": b})).exit_code == 2


def with_arguments(scalars: list[dict[str, object]]):
    made = rank_pack()
    for micro, given in enumerate(scalars):
        made.by_micro["dataset"][micro]["scalars"] = given
    return made


@pytest.mark.parametrize(
    ("cmp", "code", "said"),
    [
        ([{"scale": 1.0}, {"scale": 2.0}, {"scale": 2.0}], 2, "from micro-step 1 on: 1 and 2"),
        ([{}, {}, {}], 1, "from micro-step 0 on: 1 and (not given)"),
    ],
)
def test_a_plain_argument_of_the_model_that_differs_is_told(cmp, code, said):
    comparison = compare(with_arguments([{"scale": 1.0}] * 3), with_arguments(cmp))
    assert (comparison.exit_code, comparison.sentence) == (code, f"scale, with which the model is called, differs {said}")
    assert compare(with_arguments([{"scale": 1.0}] * 3), with_arguments([{"scale": 1.0, "cache": None}] * 3)).exit_code == 0


def test_two_tensors_of_a_batch_that_were_exchanged_are_named():
    sides = [rank_pack(), rank_pack()]
    for side, names in zip(sides, ("xy", "yx"), strict=True):
        for micro in side.by_micro["dataset"].values():
            micro["tensors"] = {name: entry([[i + 0.5, 1.0]], samples=True) for i, name in enumerate(names)}
            micro["tensors"] = {name: micro["tensors"][name] for name in "xy"}
    assert compare(*sides).sentence == "x and y hold each other's values"


def test_a_commit_that_only_one_side_knows_is_a_warning():
    known = rank_pack()
    known.single["packages"]["code"] = {"commit": "0123456789abcdef"}
    comparison = compare(known, rank_pack())
    assert comparison.exit_code == 1
    assert comparison.sentence == "commit of the training code differs: 0123456789ab and (not known: no git repository)"


# settings as two releases of one framework write them: transformers 4.57 and 5.23, DeepSpeed, torchtitan
OF_TWO_RELEASES = (
    {
        **{"optim": "adamw_torch", "lr_scheduler_kwargs": {}, "gradient_checkpointing": False, "trackio_space_id": "trackio"},
        **{
            "zero_optimization.reduce_bucket_size": 5e8,
            "wall_clock_breakdown": False,
            "job.dump_folder": "a",
            "betas": (0.9, 0.95),
        },
        "logits_scaling": 8.0,
    },
    {
        **{"optim": "adamw_torch_fused", "lr_scheduler_kwargs": None, "gradient_checkpointing": None, "trackio_space_id": None},
        **{"zero_optimization.reduce_bucket_size": 500000000, "wall_clock_breakdown": True, "job.dump_folder": "b"},
        **{"betas": [0.9, 0.95], "logits_scaling": 16.0},
    },
)


def test_what_two_releases_of_a_framework_write_differently_is_no_cause():
    comparison = compare(*(rank_pack(settings=settings) for settings in OF_TWO_RELEASES))
    causes = [f.text for check in comparison.checks for f in check.findings if f.level == "error"]
    assert causes == ["optimizer differs: adamw_torch and adamw_torch_fused", "logits_scaling differs: 8 and 16"]
    assert "recomputation differs: false and none" in [
        f.text for c in comparison.checks for f in c.findings if f.level == "warning"
    ]
