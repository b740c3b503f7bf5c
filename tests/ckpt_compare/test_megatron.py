"""Checkpoints that megatron-core wrote from the same weights: identical bit for bit in every layout, faults found and named."""

import re
import shutil

import pytest
import torch

from tests.ckpt_compare.memory import dense
from tests.ckpt_compare.verdicts import compared, judged, kinds
from tests.matrices import matrix
from trainprobe.ckpt_compare.formats import open_checkpoint, recognise
from trainprobe.ckpt_compare.names import to_logical
from trainprobe.cli import main

pytestmark = [pytest.mark.slow, pytest.mark.frameworks]

FAMILIES = {  # name of the one that was trained → (other layouts, weights, optimizer tensors)
    "tp1": (["tp2", "pp2", "pp2vpp2"], 38, 76),
    "zero2": (["zero1", "zerotp2", "zeropp2vpp2", "bucketpp2vpp2"], 38, 114),
    "odd1": (["bucketodd2", "sharedodd2"], 92, 276),
    "even1": (["sharedeven2"], 39, 117),
    "zeromoeep2": ([], 78, 234),
    "half1": (["half2"], 92, 276),
    "mla1": (["mlatp2"], 50, 100),
    "mtp1": (["mtptp2"], 51, 102),
    "moe1": (["moetp2"], 90, 180),
    "grouped1": (["groupedtp2"], 78, 234),
}
LAYOUTS = [(one, other) for one, (others, _, _) in FAMILIES.items() for other in [one, *others]]


@pytest.mark.parametrize(("layouts", "kind"), matrix(LAYOUTS, ["dist", "legacy"]))
def test_the_same_weights_and_optimizer_are_identical_in_every_layout(megatron, layouts, kind):
    one, other = layouts
    found = compared(megatron(f"dist_{one}"), megatron(f"{kind}_{other}"))
    assert [(r.key, r.verdict, r.note) for r in found.rows if r.verdict != "identical"] == []
    assert not found.faults
    _, weights, optimizer = FAMILIES[one]
    tied = "pp2" in other and kind == "legacy"  # the last stage keeps its own copy of the embedding
    assert kinds(found) == {"weights": weights + tied, "optimizer": optimizer + tied * optimizer // weights}


@pytest.mark.parametrize(("one", "other"), [("moe1", "moeep2"), ("moe1", "moeetp1"), ("grouped1", "groupedep2")])
@pytest.mark.parametrize("kind", ["dist", "legacy"])
def test_experts_of_two_expert_ranks_are_those_of_one(megatron, one, other, kind):
    found = compared(megatron(f"dist_{one}"), megatron(f"{kind}_{other}"), ["weights"])
    assert {r.verdict for r in found.rows} == {"identical"}
    assert len(found.rows) == FAMILIES[one][1]


@pytest.mark.parametrize("kind", ["dist", "legacy"])
def test_arguments_of_classes_that_nobody_listed_are_kept_as_data(megatron, kind):
    found = open_checkpoint(megatron(f"{kind}_arguments1"))
    args = found.state["args"]
    assert (args["exit_signal"], args["attention_backend"], args["config.hidden_size"]) == ("Signals(15)", "AttnBackend(5)", 8)
    assert (found.problems, found.warnings) == ((), ())


def test_two_legacy_layouts_are_compared_with_each_other(megatron):
    assert judged(megatron("legacy_tp2"), megatron("legacy_pp2vpp2")).code == 0


def test_formats_are_recognised_from_root_and_from_iteration_folder(megatron):
    for kind, name in (("dist", "megatron_dist"), ("legacy", "megatron_legacy")):
        root = megatron(f"{kind}_tp1")
        assert recognise(root) == recognise(root / "iter_0000002") == name


def test_a_folder_that_holds_only_what_was_converted_is_followed(megatron, tmp_path):
    shutil.copytree(megatron("dist_tp1"), tmp_path / "torch_dist")
    assert judged(tmp_path, megatron("dist_tp1")).code == 0


def test_a_release_folder_is_followed(megatron, tmp_path):
    shutil.copytree(megatron("legacy_tp1") / "iter_0000002", tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert judged(tmp_path, megatron("legacy_tp1")).code == 0


def test_the_logical_weights_mean_what_megatron_means_by_them(megatron, require):
    """Put them into a Hugging Face Llama under its own names: it must give Megatron's logits."""
    model = llama(require, megatron)
    said = torch.load(megatron("logits.pt"))
    with torch.no_grad():
        logits = model(said["tokens"]).logits
    assert torch.allclose(logits, said["logits"][..., : logits.shape[-1]], atol=2e-5)


def test_a_hugging_face_model_with_these_weights_is_identical_to_every_megatron_layout(megatron, require, tmp_path):
    llama(require, megatron).save_pretrained(tmp_path)
    for name in ("legacy_tp2", "dist_tp2", "legacy_pp2vpp2"):
        found = judged(tmp_path, megatron(name))
        assert found.code == 0, found.sentence


def llama(require, megatron):
    """Return a tied Hugging Face Llama with the weights of the tp1 checkpoint, rows of padding left out."""
    transformers = require("transformers")
    config = transformers.LlamaConfig(
        vocab_size=119, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4,
        rms_norm_eps=1e-5, rope_theta=10000.0, tie_word_embeddings=True, max_position_embeddings=64,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    checkpoint = open_checkpoint(megatron("legacy_tp2"))
    held = to_logical(checkpoint, checkpoint.config).tensors
    names = {
        "self_attn.q_proj": "attention.q", "self_attn.k_proj": "attention.k", "self_attn.v_proj": "attention.v",
        "self_attn.o_proj": "attention.proj", "mlp.gate_proj": "mlp.gate", "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.fc2",
        "input_layernorm": "attention.norm", "post_attention_layernorm": "mlp.norm",
    }  # fmt: skip
    state = {
        "model.embed_tokens.weight": dense(held["embedding.word.weight"])[:119],
        "model.norm.weight": dense(held["final_norm.weight"]),
    }
    for layer in range(4):
        state |= {
            f"model.layers.{layer}.{hf}.weight": dense(held[f"layers.{layer}.{ours}.weight"]) for hf, ours in names.items()
        }
    model.load_state_dict({k: torch.from_numpy(v) for k, v in state.items()}, strict=False)
    model.tie_weights()
    return model.eval()


@pytest.fixture
def copy(megatron, tmp_path):
    """Return a function that copies a checkpoint, to be spoiled."""

    def make(name):
        target = tmp_path / name
        shutil.copytree(megatron(name), target)
        return target

    return make


def spoil(path, edit):
    """Load one rank's file, change it, and write it again."""
    content = torch.load(path, weights_only=False)
    edit(content)
    torch.save(content, path)


def rank(root, name):
    return root / "iter_0000002" / name / "model_optim_rng.pt"


def test_states_whose_masters_are_not_the_weights_are_not_placed_and_never_said_to_differ(megatron, copy):
    """Weights that are no rounded masters any more: to whom the states of that place belong cannot be known."""
    spoiled = copy("legacy_even1")

    def edit(content):
        for layer in range(4):
            key = f"decoder.layers.{layer}.self_attention.linear_proj.weight"
            content["model"][key] = content["model"][key].flip(0)

    spoil(rank(spoiled, "mp_rank_00"), edit)
    found = compared(megatron("dist_even1"), spoiled)
    states = [r for r in found.rows if r.what == "optimizer"]
    assert {r.verdict for r in states} == {"identical", "only in A"}
    assert len([r for r in states if r.verdict == "only in A"]) == 12
    assert any("the states of 4 parameters are not placed" in f.message for f in found.faults)


def test_a_check_finds_nothing_in_what_megatron_wrote(megatron, capsys):
    for name in ("dist_sharedeven2", "legacy_half2"):
        assert main(["ckpt-show", "--check", str(megatron(name))]) == 0
        assert re.search(r"sound: .* (39|92) of them held against their masters", capsys.readouterr().out)


def test_a_check_names_nan_masters_copies_and_missing_parts(megatron, copy, capsys):
    spoiled = copy("legacy_half2")

    def edit(content):
        content["model"]["decoder.layers.1.input_layernorm.weight"].add_(0.5)
        content["model"]["decoder.layers.2.mlp.linear_fc2.weight"][3, 4] = float("nan")

    spoil(rank(spoiled, "mp_rank_01"), edit)
    assert main(["ckpt-show", "--check", str(spoiled)]) == 2
    said = capsys.readouterr().out
    assert "layers.2.mlp.fc2.weight: 1 NaN and 0 infinite of 6,144 elements" in said
    assert "layers.1.attention.norm.weight: copies disagree in 64 of 64 elements" in said
    assert "layers.2.mlp.fc2.weight#master: rounded to bfloat16, 1 of 6,144 master weights are not the weight" in said
    (rank(spoiled, "mp_rank_01")).unlink()
    assert main(["ckpt-show", "--check", str(spoiled)]) == 3
    assert "no file holds" in capsys.readouterr().out


def test_one_changed_element_in_one_shard_is_found_named_and_located(megatron, copy):
    spoiled = copy("legacy_tp2")

    def edit(content):
        content["model"]["decoder.layers.2.mlp.linear_fc1.weight"][50, 7] += 1  # row 50 of [gate 48; up 48]: up, row 2

    spoil(rank(spoiled, "mp_rank_01"), edit)
    found = judged(megatron("dist_tp1"), spoiled)
    assert found.code == 2
    assert "1 of 114 tensors" in found.sentence
    assert "layers.2.mlp.up.weight" in found.sentence
    assert "1 of 6,144 elements, largest at [50, 7]" in found.sentence  # 48 rows of rank 0 before it
    assert "mp_rank_01: decoder.layers.2.mlp.linear_fc1.weight" in found.sentence


def test_a_replicated_layernorm_that_drifted_on_one_rank_is_named(megatron, copy):
    spoiled = copy("legacy_tp2")
    spoil(rank(spoiled, "mp_rank_01"), lambda c: c["model"]["decoder.layers.1.input_layernorm.weight"].add_(1e-3))
    found = judged(megatron("legacy_tp2"), spoiled)
    assert found.code == 2
    assert any("layers.1.attention.norm.weight: copies disagree" in d and "mp_rank_01" in d for d in found.details)


def test_swapped_layers_are_named(megatron, copy):
    spoiled = copy("legacy_tp1")

    def edit(content):
        for key in [k for k in content["model"] if ".layers.0." in k and content["model"][k] is not None]:
            other = key.replace(".layers.0.", ".layers.2.")
            content["model"][key], content["model"][other] = content["model"][other], content["model"][key]

    spoil(rank(spoiled, "mp_rank_00"), edit)
    details = "\n".join(judged(megatron("dist_tp2"), spoiled, ["weights"]).details)
    assert re.search(r"layers\.2 of B holds layers\.0 of A", details)


def test_a_lost_shard_is_named_with_the_rows_that_nobody_holds(megatron, copy):
    spoiled = copy("legacy_tp2")
    shutil.rmtree(rank(spoiled, "mp_rank_01").parent)
    found = judged(megatron("dist_tp1"), spoiled)
    assert found.code == 3
    assert any("tensor rank 1, pipeline rank 0, expert rank 0 is missing" in d for d in found.details)
    assert any("B: no file holds [64:128, 0:64]" in d for d in found.details)


@pytest.mark.parametrize("name", ["mp_rank_00", "mp_rank_01"])
def test_a_truncated_rank_file_is_named(megatron, copy, name):
    spoiled = copy("legacy_tp2")
    file = rank(spoiled, name)
    file.write_bytes(file.read_bytes()[:20000])
    found = judged(megatron("dist_tp1"), spoiled)
    assert found.code == 3
    assert any(str(file) in d for d in found.details)


def test_a_lost_file_of_a_distributed_checkpoint_is_named(megatron, copy):
    spoiled = copy("dist_tp2")
    (spoiled / "iter_0000002" / "__1_0.distcp").unlink()
    found = judged(megatron("dist_tp1"), spoiled)
    assert found.code == 3
    assert any("__1_0.distcp" in d for d in found.details)


def test_zeroed_moments_are_named(megatron, copy):
    spoiled = copy("legacy_tp1")

    def edit(content):
        for state in content["optimizer"]["state"].values():
            state["exp_avg"].zero_()

    spoil(rank(spoiled, "mp_rank_00"), edit)
    found = judged(megatron("dist_tp1"), spoiled)
    assert found.code == 2
    assert any("exp_avg tensors are all zeros in B" in d for d in (found.sentence, *found.details))


def test_the_rng_of_another_rank_is_named(megatron, copy):
    spoiled = copy("legacy_pp2")
    first = torch.load(rank(spoiled, "mp_rank_00_000"), weights_only=False)["rng_state"]
    spoil(rank(spoiled, "mp_rank_00_001"), lambda c: c.update(rng_state=first))
    found = judged(megatron("legacy_pp2"), spoiled, ["weights", "optimizer", "rng"])
    assert found.code == 2
    assert any("B's tp 0 pp 1 holds the state of A's tp 0 pp 0" in d for d in found.details)


def test_another_step_count_is_a_difference(megatron, copy):
    spoiled = copy("legacy_tp1")

    def edit(content):
        for state in content["optimizer"]["state"].values():
            state["step"] += 5

    spoil(rank(spoiled, "mp_rank_00"), edit)
    assert "step is 2 in A and 7 in B" in judged(megatron("dist_tp1"), spoiled).sentence
