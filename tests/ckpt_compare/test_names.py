import numpy as np
import pytest

from tests.ckpt_compare.memory import checkpoint, tensor
from trainprobe.ckpt_compare.names import find_map, in_model_order, to_logical
from trainprobe.engine.model_names import built_in, read_map
from trainprobe.errors import FormatError

X = np.zeros((4, 2), np.float32)


def logical(*names, **config):
    return list(to_logical(checkpoint(*(tensor(n, X) for n in names)), config).tensors)


def test_every_built_in_map_can_be_read_and_has_a_signature():
    assert all(m.signature and m.rules for m in built_in())


@pytest.mark.parametrize("prefix", ["", "module.", "net.", "_forward_module.net."])
def test_what_wrappers_put_before_a_name_is_left_out(prefix):
    names = [prefix + n for n in ("model.layers.3.self_attn.o_proj.weight", "model.norm.weight")]
    assert logical(*names) == ["layers.3.attention.proj.weight", "final_norm.weight"]


def test_a_bare_backbone_is_known_as_well():
    assert logical("layers.0.self_attn.o_proj.weight", "norm.weight") == ["layers.0.attention.proj.weight", "final_norm.weight"]


def test_optimizer_slots_follow_their_weight():
    given = checkpoint(tensor("model.layers.0.self_attn.o_proj.weight", X, slot="exp_avg"))
    assert list(to_logical(given, {}).tensors) == ["layers.0.attention.proj.weight#exp_avg"]


def test_names_that_nobody_knows_are_kept():
    assert logical("conv1.weight", "fc.bias") == ["conv1.weight", "fc.bias"]


def test_a_name_that_the_family_s_map_lacks_is_kept():
    assert "strange.weight" in logical("model.layers.0.self_attn.o_proj.weight", "strange.weight")


def test_fused_attention_stays_fused_with_a_note_when_the_heads_are_unknown():
    given = checkpoint(
        tensor("decoder.layers.0.self_attention.linear_qkv.weight", X),
        tensor("decoder.layers.0.self_attention.linear_proj.weight", X),
    )
    found = to_logical(given, {})
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in found.tensors
    assert "heads, groups, head_dim unknown" in found.notes[0]


def test_mlp_halves_are_split_only_in_a_gated_model():
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert logical(name) == ["layers.0.mlp.fc1.weight"]
    assert logical(name, gated=True) == ["layers.0.mlp.gate.weight", "layers.0.mlp.up.weight"]


def test_a_user_s_map_is_asked_first(tmp_path):
    own = tmp_path / "own.yaml"
    rule = "{from: 'blocks.{L}.attn.{p}', to: 'layers.{L}.attention.proj.{p}'}"
    own.write_text(f"family: own\nsignature: ['blocks.{{L}}.attn.']\nrules:\n  - {rule}\n")
    found = to_logical(checkpoint(tensor("blocks.7.attn.weight", X)), {}, [str(own)])
    assert (list(found.tensors), found.family) == (["layers.7.attention.proj.weight"], "own")


def test_an_unknown_transform_in_a_map_is_refused_with_a_suggestion():
    with pytest.raises(FormatError, match="did you mean 'halves'"):
        read_map("rules:\n  - {from: a, by: halfs, to: [b, c]}\n", "own.yaml")


def test_a_map_without_rules_is_refused():
    with pytest.raises(FormatError, match=r"own\.yaml is no name map|own\.yaml is not a name map"):
        read_map("family: x", "own.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rules: [}", "own.yaml is no YAML: .* line 1"),
        ("rules: 5", "a list of `rules`"),
        ("rules:\n  - {from: a, to: b}\n  - {to: b}", "rule 2 is .* needs `from`"),
        ("rules: [a]", "rule 1 is 'a': it needs `from`"),
        ("rules: [{from: a}]", r"rule 1 \(a\) needs `to`"),
        ("rules: [{from: 'a.{L}', to: 'b.{K}'}]", r"`to` has \{K\}, which `from` does not have"),
        ("rules: [{from: 'a.{1}', to: b}]", r"'a.\{1\}' is no pattern"),
    ],
)
def test_a_map_that_cannot_be_used_is_refused_with_its_place(text, said):
    with pytest.raises(FormatError, match=said):
        read_map(text, "own.yaml")


@pytest.mark.parametrize(
    ("content", "said"), [(None, "No such file"), (b"family: \xff", "not UTF-8 text"), ("", "is no regular file")]
)
def test_a_map_that_cannot_be_read_is_told_by_its_path(tmp_path, content, said):
    own = tmp_path / "own.yaml"
    if isinstance(content, bytes):
        own.write_bytes(content)
    elif content is not None:
        own.mkdir()
    with pytest.raises(FormatError, match=f"own.yaml.*{said}"):
        to_logical(checkpoint(tensor("a", X)), {}, [str(own)])


def test_sorted_names_are_put_into_the_model_s_order():
    names = [
        "lm_head.weight",
        "model.embed_tokens.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
    ]
    assert in_model_order(names) == [names[1], names[3], names[2], names[0]]


def test_an_order_is_not_guessed_when_a_name_is_unknown():
    assert in_model_order(["model.layers.0.self_attn.o_proj.weight", "something.else"]) is None


def test_no_two_families_claim_the_same_names():
    for family in built_in():
        for pattern in family.signature:
            sample = pattern.pattern.replace("\\", "").replace("(?P<L>d+)", "0").replace("(?:", "").replace(")?", "")
            found = find_map(checkpoint(tensor(sample + "weight", X)))
            assert found is not None, sample
            assert found[0].signature is family.signature, sample
