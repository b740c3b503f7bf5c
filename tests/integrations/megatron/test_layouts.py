"""Megatron-core on the CPU in every layout: the same bits with the probe, and the numbers that torch alone gives."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest

from tests.distributed.launch import launch
from trainprobe.cli import main

SCRIPT = Path(__file__).with_name("train.py")
EXACT = {  # layout → the layout of one process that is the same mathematics
    **dict.fromkeys(
        ["alone", "tp2", "tp2 selective", "pp2", "vpp2", "dp2", "dp2 distributed", "dp2 distributed gather"], "alone"
    ),
    **dict.fromkeys(["alone moe", "ep2"], "alone moe"),
    "tp2 pp2": "alone",
}
RANKS = {"alone": 1, "alone moe": 1, "tp2 dp2": 4, "tp2 pp2": 4}
LOW = ["ep2 grouped", "dp2 bf16", "dp2 precise", "dp2 fp16", "dp2 fp16 low", "tp2 dp2"]
EVERY = [*EXACT, *LOW]
EXPERT = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc2.weight"
NANS = {  # layout → the weight that becomes a NaN behind the first step, and the ranks that hold it
    "pp2": ("decoder.layers.3.mlp.linear_fc2.weight", [1]),
    "vpp2": ("decoder.layers.2.self_attention.linear_proj.weight", [0]),  # of the second chunk
    "tp2": ("decoder.layers.1.mlp.linear_fc1.weight", [0, 1]),
    "tp2 selective": ("decoder.layers.2.mlp.linear_fc2.weight", [0, 1]),
    "ep2": (EXPERT, [1]),
    "dp2 distributed": ("decoder.layers.0.mlp.linear_fc2.weight", [0, 1]),
    "dp2 precise": ("decoder.layers.3.mlp.linear_fc1.weight", [0, 1]),
    "tp2 pp2": ("decoder.layers.2.mlp.linear_fc2.weight", [2, 3]),
}
PLANTED = {  # what two dumps are to show → the first line of the comparison
    "tp2!weight": ("Parameter.decoder.layers.3.mlp.linear_fc2.weight (step 0)", "the weights differ"),
    "tp2 selective!reduce": (
        "Module.decoder.layers.1.mlp.linear_fc2.RowParallelLinear.forward.0 (step 0, micro-batch 0)",
        "rank 1 holds another copy than rank 0",
    ),
    "pp2!weight": ("Parameter.decoder.layers.3.mlp.linear_fc2.weight (step 0)", "the weights differ"),
    "cp2!weight": ("Parameter.decoder.layers.3.mlp.linear_fc2.weight (step 0)", "rank 1 holds another copy than rank 0"),
    "cp2!scale": (".grad (step 0)", "grad_unclipped is twice as large in B"),
    "dp2!scale": (".grad (step 0)", "all that it is given agrees, grad_unclipped is twice as large in B"),
    "tp2 selective!column": (
        "Module.decoder.layers.1.mlp.linear_fc1.ColumnParallelLinear.parameters_grad.0 (step 0, micro-batch 0)",
        "weight is at least",
    ),
    "tp2 moe!expert": (f"Parameter.{EXPERT} (step 0)", "the weights differ"),
    "tp2 etp1!expert": (f"Parameter.{EXPERT} (step 0)", "the weights differ"),
    "etp2!expert": (f"Parameter.{EXPERT} (step 0)", "the weights differ"),
    # Megatron's own: without EP it takes the shards of experts for copies, and hands rank 0's to all when training begins
    "etp2 alone!whole": (
        "Parameter.decoder.layers.0.mlp.experts.local_experts.0.linear_fc1.weight (step 0)",
        "the weights differ",
    ),
}
HEALTHY = {"cp2": "alone", "tp2 moe": "alone moe", "tp2 etp1": "alone moe", "etp2": "alone moe"}  # dumps of one step
DRIFT = "decoder.layers.2.self_attention.linear_proj.weight"
pytestmark = [pytest.mark.slow, pytest.mark.frameworks]


@pytest.fixture(scope="module")
def folder(require, tmp_path_factory) -> Path:
    require("megatron.core")
    folder = tmp_path_factory.mktemp("megatron")
    two = [layout for layout in EVERY if RANKS.get(layout, 2) == 2]
    wholes = ["alone!whole", "alone moe!whole"]
    launch(SCRIPT, 1, str(folder), "alone", "alone moe", *wholes, "alone oracle", "alone moe oracle")
    faults = [planted for planted in PLANTED if not planted.startswith("etp2!")]
    healthy = [f"{layout}!whole" for layout in HEALTHY if layout != "etp2"]
    nans = [f"{layout}@nan@{name}" for layout, (name, _) in NANS.items()]
    launch(SCRIPT, 2, str(folder), *two, *nans[:-1], f"dp2@drift@{DRIFT}", "dp2 behaviour", *faults, *healthy, timeout=600)
    launch(SCRIPT, 4, str(folder), "tp2 dp2", "tp2 pp2", nans[-1], "etp2!whole", "etp2!expert", timeout=400)
    return folder


def ranks(folder: Path, layout: str) -> list[dict]:
    return [json.loads((folder / f"{layout}.{r}.json").read_text()) for r in range(RANKS.get(layout, 2))]


def shards(folder: Path, layout: str) -> dict[tuple, dict[str, list]]:
    """(step, moment, name, slot) → rectangle → what each rank saw there."""
    found: dict[tuple, dict[str, list]] = {}
    for told in ranks(folder, layout):
        for step, moment, name, slot, norm, high, low, _, shard, _ in told["rows"]:
            if shard is not None:
                where = json.dumps([shard["offset"], shard["shape"], shard["whole"], shard.get("within")])
                found.setdefault((step, moment, name, slot), {}).setdefault(where, []).append((norm, high, low, shard))
    return found


@pytest.mark.proves("Megatron-core", {"alone": "one process", "alone moe": "one process with experts"})
@pytest.mark.proves(
    "Megatron-core",
    {
        "tp2": "TP 2 with sequence parallel and recompute",
        "pp2": "PP 2",
        "vpp2": "PP 2 with virtual stages",
        "dp2": "DP 2",
        "dp2 distributed": "distributed optimizer",
        "ep2": "EP 2",
    },
    ranks=2,
)
@pytest.mark.proves(
    "Megatron-core", {"dp2 bf16": "bf16", "dp2 fp16": "fp16", "dp2 precise": "precision-aware optimizer"}, ranks=2
)
@pytest.mark.proves("Megatron-core", {"tp2 dp2": "TP 2 × DP 2", "tp2 pp2": "TP 2 × PP 2"}, ranks=4)
@pytest.mark.parametrize("layout", EVERY)
def test_the_bits_are_those_of_a_training_without_the_probe(folder, layout):
    for told in ranks(folder, layout):
        assert told["on"] == told["off"]


@pytest.mark.parametrize("layout", EVERY)
def test_nothing_is_left_behind(folder, layout):
    assert [told["left"] for told in ranks(folder, layout)] == [[]] * RANKS.get(layout, 2)


@pytest.mark.proves("Megatron-core", {"alone": "one process", "alone moe": "one process with experts"})
@pytest.mark.proves(
    "Megatron-core",
    {
        "tp2": "TP 2 with sequence parallel and recompute",
        "pp2": "PP 2",
        "vpp2": "PP 2 with virtual stages",
        "dp2": "DP 2",
        "dp2 distributed": "distributed optimizer",
        "ep2": "EP 2",
    },
    ranks=2,
)
@pytest.mark.proves("Megatron-core", {"tp2 pp2": "TP 2 × PP 2"}, ranks=4)
@pytest.mark.parametrize("layout", EXACT)
def test_every_logical_tensor_has_the_norm_that_torch_alone_gives(folder, layout):
    """Values, gradients before and after clipping, Adam's state, around each step; the shards of a tensor are put together."""
    expected = json.loads((folder / f"{EXACT[layout]} oracle.json").read_text())["rows"]
    found = shards(folder, layout)
    late = "gather" in layout  # values are gathered when the next forward needs them
    for key, norm in expected.items():
        step, moment, slot, name = key.split()
        if late and slot == "value_after":
            continue
        pieces = found[int(step), moment, name, slot]
        measured = math.sqrt(sum(seen[0][0] ** 2 for seen in pieces.values()))
        assert measured == pytest.approx(norm, rel=1e-6 if step == "0" else 2e-4), key


@pytest.mark.parametrize("layout", EVERY)
def test_replicas_are_equal_and_rectangles_cover_each_tensor_once(folder, layout):
    for key, pieces in shards(folder, layout).items():
        covered = Counter()
        for seen in pieces.values():
            shard = seen[0][3]
            inside = shard.get("within")
            if inside is None:
                covered[tuple(shard["whole"])] += math.prod(shard["shape"])
            else:
                covered[tuple(inside["whole"])] += math.prod(shard["shape"])
            if key[3] != "grad_unreduced":
                assert len({(norm, high, low) for norm, high, low, _ in seen}) == 1, key
        assert len(covered) == 1, key
        ((whole, count),) = covered.items()
        assert count == math.prod(whole), key


def test_a_distributed_optimizer_cuts_a_tensor_split_over_tp_into_pieces_of_its_rectangle(folder):
    pieces = shards(folder, "tp2 dp2")[1, "before_step", "decoder.layers.1.mlp.linear_fc1.weight", "main_value"]
    assert {tuple(seen[0][3]["within"]["whole"]) for seen in pieces.values()} == {(2, 48, 32)}


def test_a_precision_aware_optimizer_shows_its_own_master_weights_and_unscaled_moments(folder):
    """Megatron itself then holds None where its master weights would be."""
    found = shards(folder, "dp2 precise")
    names = {key[2] for key in found}
    for slot in ("grad", "main_value", "exp_avg", "exp_avg_sq"):
        assert {key[2] for key in found if key[0] == 2 and key[1] == "before_step" and key[3] == slot} == names
    norm = lambda *key: math.sqrt(sum(seen[0][0] ** 2 for seen in found[key].values()))  # noqa: E731
    for name in names:
        assert norm(0, "after_step", name, "exp_avg_after") == pytest.approx(
            0.1 * norm(0, "before_step", name, "grad"), rel=1e-5
        )


def test_gradients_before_the_reduction_average_to_those_after_it(folder):
    """Of each rank, as it holds them: they differ, and the squared norm of their mean is at most their mean square."""
    found = shards(folder, "dp2 distributed")
    for (step, moment, name, slot), pieces in list(found.items()):
        if slot == "grad_unreduced":
            ((first, *_), (second, *_)) = next(iter(pieces.values()))
            reduced = found[step, "unclipped", name, "grad_unclipped"]
            joined = sum(seen[0][0] ** 2 for seen in reduced.values())
            assert first != second
            assert moment == "unreduced"
            assert joined <= (first**2 + second**2) / 2 * (1 + 1e-6), name


def test_the_gradient_norm_that_megatron_reports_is_that_of_the_unclipped_gradients(folder):
    for layout in ("tp2", "pp2", "vpp2", "dp2 distributed", "ep2"):
        found = shards(folder, layout)
        for step in range(3):
            norms = [seen[0][0] for key, pieces in found.items() if key[:2] == (step, "unclipped") for seen in pieces.values()]
            (reported,) = {told["scalars"][str(step)]["grad_norm"] for told in ranks(folder, layout)}
            assert reported == pytest.approx(math.hypot(*norms), rel=1e-6), (layout, step)


@pytest.mark.parametrize("layout", ["alone", "tp2", "pp2", "vpp2", "dp2", "ep2"])
def test_loss_learning_rate_and_micro_batches_are_noted_as_megatron_has_them(folder, layout):
    for told in ranks(folder, layout):
        for step, (loss, _, _) in enumerate(told["off"][0]):
            scalars = told["scalars"][str(step)]
            assert scalars["micro_batches"] == (2 if layout in ("dp2", "ep2") else 4)
            assert (scalars["lr"], scalars["step_skipped"]) == (0.01, 0)
            assert scalars.get("lm loss") == (None if loss is None else pytest.approx(loss, rel=1e-6))


@pytest.mark.parametrize("layout", ["pp2", "vpp2", "tp2 pp2"])
def test_stages_and_chunks_carry_global_layer_numbers(folder, layout):
    seen = Counter()
    for told in ranks(folder, layout):
        forwards = [(name, micro) for step, name, phase, micro, _ in told["calls"] if step == 1 and phase == "forward"]
        seen.update({(name, micro) for name, micro in forwards if name.startswith("decoder.layers.") and name.count(".") == 2})
        below = [forward for forward in forwards if "." in forward[0]]
        assert len(below) == len(set(below)), "each module of this process runs once a micro-batch"
    processes = 2 if layout == "tp2 pp2" else 1
    assert seen == {(f"decoder.layers.{n}", micro): processes for n in range(4) for micro in range(4)}


def test_experts_carry_global_numbers(folder):
    for rank, told in enumerate(ranks(folder, "ep2")):
        numbers = {int(row[2].split("local_experts.")[1].split(".")[0]) for row in told["rows"] if "local_experts" in row[2]}
        assert numbers == {2 * rank, 2 * rank + 1}


@pytest.mark.parametrize("layout", ["tp2", "pp2"])
def test_a_recomputed_forward_is_marked_and_not_counted_as_a_forward(folder, layout):
    for told in ranks(folder, layout):
        phases = Counter((name, phase) for step, name, phase, _, _ in told["calls"] if step == 1 and ".linear_fc1" in name)
        assert {phase for _, phase in phases} == {"forward", "recompute", "backward"}
        assert set(phases.values()) == {4}, phases


@pytest.mark.parametrize("layout", ["pp2", "vpp2"])
def test_the_tied_embedding_of_the_last_stage_is_known_as_a_replica_of_the_first(folder, layout):
    ((seen),) = shards(folder, layout)[2, "before_step", "embedding.word_embeddings.weight", "value"].values()
    assert len(seen) == 2
    assert all("pp" in shard["replicas"] for *_, shard in seen)


def test_a_step_that_the_loss_scaler_skips_says_so_and_shows_its_gradients(folder):
    for told in ranks(folder, "dp2 fp16"):
        first = told["scalars"]["0"]
        assert first["step_skipped"] == 1
        assert first["loss_scale"] == 2**32
        moments = {(row[1], row[3]) for row in told["rows"] if row[0] == 0}
        assert {("before_step", "grad"), ("after_step", "value_after"), ("unreduced", "grad_unreduced")} <= moments
        assert {row[9] for row in told["rows"] if row[0] == 0 and row[3] == "grad_unreduced"} == {2**32}
        assert [finding[1] for finding in told["findings"]] == ["info"]


def test_gradients_in_half_precision_are_told_without_the_loss_scale_at_every_moment(folder):
    """Against the same training in float32: only the rounding of half precision lies between them."""
    scaled, plain = shards(folder, "dp2 fp16 low"), shards(folder, "dp2")
    seen = {row[9] for told in ranks(folder, "dp2 fp16 low") for row in told["rows"] if row[3] == "grad_unreduced"}
    assert seen == {256.0}
    assert ranks(folder, "dp2 fp16 low")[0]["scalars"]["0"]["loss_scale"] == 256.0
    for slot in ("grad_unreduced", "grad_unclipped", "grad"):
        keys = [key for key in plain if key[0] == 0 and key[3] == slot]
        assert keys
        for key in keys:
            pairs = zip(*(next(iter(found[key].values())) for found in (scaled, plain)), strict=True)
            assert all(low[0] == pytest.approx(high[0], rel=0.04, abs=1e-4) for low, high in pairs), key


@pytest.mark.parametrize("layout", [layout for layout in EVERY if layout != "dp2 fp16"])
def test_a_healthy_training_raises_no_alarm(folder, layout):
    assert [told["findings"] for told in ranks(folder, layout)] == [[]] * RANKS.get(layout, 2)


@pytest.mark.parametrize(
    ("layout", "axes"),
    [
        ("tp2", {"tp": 2}), ("pp2", {"pp": 2}), ("vpp2", {"pp": 2, "vpp": 2}), ("ep2", {"dp": 2, "ep": 2}), ("dp2", {"dp": 2}),
        ("tp2 dp2", {"dp": 2, "tp": 2}), ("tp2 pp2", {"tp": 2, "pp": 2}),
    ],
)  # fmt: skip
def test_the_place_of_each_process_is_known_on_every_axis(folder, layout, axes):
    places = [told["place"] for told in ranks(folder, layout)]
    assert [{axis: size for axis, (_, size) in place.items()} for place in places] == [axes] * len(places)
    assert len({json.dumps(place) for place in places}) == len(places)


@pytest.mark.parametrize("layout", NANS)
def test_a_planted_nan_is_named_with_its_global_name_on_its_ranks(folder, layout):
    name, owners = NANS[layout]
    told = [json.loads((folder / f"{layout} nan.{rank}.json").read_text()) for rank in range(RANKS.get(layout, 2))]
    assert [rank for rank, found in enumerate(told) if found["owner"]] == owners
    for rank in owners:
        rule, severity, step, message = told[rank]["findings"][0]
        assert (rule, severity, step) == ("nonfinite", "error", 101)
        assert name in message or name.rpartition(".")[0] in message, message


def test_a_replica_that_drifts_is_found_by_the_groups_that_are_told(folder):
    told = [json.loads((folder / f"dp2 drift.{rank}.json").read_text())["rows"] for rank in range(2)]
    differ = [
        a[2]
        for a, b in zip(*told, strict=True)
        if a[0] == 101 and a[3] == "value" and a[8]["replicas"] == ["dp"] and a[4:7] != b[4:7]
    ]
    assert differ == [DRIFT]


def test_attaching_twice_gives_the_probe_that_is_there_and_a_closed_one_is_not_there(folder):
    for rank in range(2):
        told = json.loads((folder / f"dp2 behaviour.{rank}.json").read_text())
        assert (told["twice"], told["again"]) == (True, True)


def test_an_error_in_a_step_goes_on_and_the_next_step_is_whole(folder):
    told = json.loads((folder / "dp2 behaviour.0.json").read_text())
    assert told["error"] == "the data loader has died"
    assert told["steps"] == [[0, False], [1, True], [2, True]]


def test_a_rule_that_stops_the_run_stops_it_on_all_ranks_at_the_same_step(folder):
    stops = [json.loads((folder / f"dp2 behaviour.{rank}.json").read_text())["stop"] for rank in range(2)]
    assert [step for step, _ in stops] == [2, 2]


@pytest.mark.parametrize("layout", [layout for layout in EXACT if not layout.startswith("alone")])
def test_the_dump_of_a_layout_agrees_with_that_of_one_process(folder, layout, capsys):
    code = main(["dump-compare", str(folder / f"{EXACT[layout]} probe"), str(folder / f"{layout} probe")])
    said = capsys.readouterr().out
    assert code == 1, said
    assert " bug" not in said


def assert_weights_are_the_same_bits(found: dict) -> None:
    """Whatever way the ranks hold them."""
    weights = [call for call in found["calls"] if call["a"].startswith("Parameter.") and ".grad" not in call["a"]]
    before = [(call["a"], value) for call in weights for value in call["values"] if value["slot"].startswith("parameters.")]
    told = {name: (value["evidence"], value["high"]) for name, value in before}
    assert told and set(told.values()) == {("bits", 0.0)}, {name: way for name, way in told.items() if way != ("bits", 0.0)}


@pytest.mark.proves("Megatron-core", {"cp2": "CP 2"}, ranks=2)
@pytest.mark.proves("Megatron-core", {"etp2": "EP 2 × expert TP 2"}, ranks=4)
@pytest.mark.parametrize("layout", HEALTHY)
def test_a_step_of_context_or_expert_parallelism_agrees_with_one_process(folder, layout, capsys):
    sides = str(folder / f"{HEALTHY[layout]} whole probe"), str(folder / f"{layout} whole probe")
    code = main(["dump-compare", *sides, "--json", str(folder / "all.json")])
    said = capsys.readouterr().out
    assert code == 1, said
    assert " bug" not in said
    assert_weights_are_the_same_bits(json.loads((folder / "all.json").read_text()))


@pytest.mark.parametrize(("one", "other"), [("tp2", "vpp2"), ("dp2", "dp2 distributed")])
def test_the_dumps_of_two_layouts_agree(folder, one, other, capsys):
    """A distributed optimizer has the axes of a plain one, and holds its states flat."""
    code = main(["dump-compare", str(folder / f"{one} probe"), str(folder / f"{other} probe"), "-q"])
    assert code in (0, 1), capsys.readouterr().out


@pytest.mark.parametrize("planted", PLANTED)
def test_a_fault_of_one_rank_is_the_first_place_where_dumps_part(folder, planted, capsys):
    layout = planted.partition("!")[0]
    alone = "alone moe" if layout == "etp2 alone" else HEALTHY.get(layout, "alone")
    code = main(
        ["dump-compare", str(folder / f"{alone} whole probe"), str(folder / f"{planted.replace('!', ' ')} probe"), "-q"]
    )
    said = capsys.readouterr().out
    assert code == 2, said
    for words in PLANTED[planted]:
        assert words in said
