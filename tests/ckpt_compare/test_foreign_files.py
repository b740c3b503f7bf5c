"""What other programs write: refused with the way to compare it, or read under the names of LitGPT, Meta and torchtune."""

from __future__ import annotations

import gzip
import tarfile
import zipfile

import msgpack
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import save_file

from trainprobe.ckpt_compare.compare import compare, logical
from trainprobe.ckpt_compare.formats import open_checkpoint
from trainprobe.errors import FormatError

HEADS, GROUPS, DIM, HIDDEN, FFN, LAYERS = 6, 3, 4, 20, 28, 2


def made_tar(folder):
    torch.save({"w": torch.ones(2)}, folder / "model_weights.ckpt")
    with tarfile.open(folder / "a.nemo", "w:") as archive:
        archive.add(folder / "model_weights.ckpt", arcname="./model_weights.ckpt")
    return folder / "a.nemo"


def made_zip(folder):
    torch.save({"w": torch.ones(2)}, folder / "policy.pth")
    with zipfile.ZipFile(folder / "a.zip", "w") as archive:
        archive.write(folder / "policy.pth", "policy.pth")
    return folder / "a.zip"


def made_msgpack(folder):
    (folder / "a.msgpack").write_bytes(msgpack.packb({"params": {"kernel": b"1234"}}))
    return folder / "a.msgpack"


def made_npz(folder):
    np.savez(folder / "a.npz", w=np.ones(3))
    return folder / "a.npz"


def made_gzip(folder):
    (folder / "a.nemo").write_bytes(gzip.compress(b"weights"))
    return folder / "a.nemo"


def made_exported(folder):
    model = torch.nn.Linear(3, 2).eval()
    torch.export.save(torch.export.export(model, (torch.ones(1, 3),)), folder / "a.pt2")
    return folder / "a.pt2"


def made_folder(name):
    def make(folder):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"x")
        return folder

    return make


REFUSED = {
    made_tar: ["an archive with ./model_weights.ckpt in it", "tar -xf a.nemo -C folder"],
    made_zip: ["an archive with policy.pth in it", "unzip a.zip -d folder"],
    made_msgpack: ["a MessagePack file (as Flax writes weights)", "open('a.msgpack', 'rb')"],
    made_npz: ["an archive of NumPy arrays", "dict(numpy.load('a.npz'))"],
    made_folder(".snapshot_metadata"): ["a snapshot of torchsnapshot", "get_state_dict_for_key"],
    made_gzip: ["a file that gzip compressed", "tar -xf 'a.nemo'"],
    made_folder("_METADATA"): ["a checkpoint of Orbax (JAX)", "StandardCheckpointer"],
    made_folder("_CHECKPOINT_METADATA"): ["a step of an Orbax CheckpointManager", "which has a file _METADATA"],
    made_folder("100/_CHECKPOINT_METADATA"): ["a folder of steps of an Orbax CheckpointManager", "which has a file _METADATA"],
    made_folder("saved_model.pb"): ["a SavedModel of TensorFlow", "tf.saved_model.load"],
    made_folder("weight.memmap"): ["a memory-mapped TensorDict", "load_memmap"],
    made_folder("a.onnx"): ["an ONNX model", "onnx.load('a.onnx').graph.initializer"],
    made_exported: ["a program of torch.export", "torch.save(torch.export.load('a.pt2').state_dict, 'out.pt')"],
    made_folder("a.keras"): ["a model of Keras", "load_model('a.keras')"],
}


@pytest.mark.parametrize("make", REFUSED)
def test_a_file_of_another_program_is_refused_with_the_way_to_compare_it(make, tmp_path):
    with pytest.raises(FormatError) as caught:
        open_checkpoint(make(tmp_path))
    said = str(caught.value)
    assert "which ckpt-compare and ckpt-show do not read: " in said
    assert [part for part in REFUSED[make] if part not in said] == []


def test_keras_weights_are_known_by_their_first_bytes(tmp_path):
    (tmp_path / "a.weights.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + bytes(100))
    with pytest.raises(FormatError, match=r"an HDF5 file \(as Keras writes weights\)"):
        open_checkpoint(tmp_path / "a.weights.h5")


def test_what_lies_beside_a_model_and_is_not_read_is_noted(tmp_path):
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "pytorch_model.bin")
    torch.save({"state": {}, "param_groups": []}, tmp_path / "scheduler.pt")
    (tmp_path / "global_step3").mkdir()
    torch.save({"w": torch.zeros(2)}, tmp_path / "global_step3" / "mp_rank_00_model_states.pt")
    said = "not read, as the model is in other files: global_step3/, pytorch_model.bin"
    assert open_checkpoint(tmp_path).notes == (said,)


def test_a_folder_around_one_checkpoint_names_its_file(tmp_path):
    torch.save({"w": torch.ones(2)}, tmp_path / "checkpoint_1.pt")
    with pytest.raises(FormatError, match=r"checkpoint_1\.pt in it is one: name that file"):
        open_checkpoint(tmp_path)


def llama():
    """Return weights under transformers' names."""
    generator = torch.Generator().manual_seed(3)
    shapes = {"model.embed_tokens.weight": (32, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (32, HIDDEN)}
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.self_attn.q_proj.weight": (HEADS * DIM, HIDDEN),
            f"model.layers.{i}.self_attn.k_proj.weight": (GROUPS * DIM, HIDDEN),
            f"model.layers.{i}.self_attn.v_proj.weight": (GROUPS * DIM, HIDDEN),
            f"model.layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * DIM),
            f"model.layers.{i}.mlp.gate_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.up_proj.weight": (FFN, HIDDEN),
            f"model.layers.{i}.mlp.down_proj.weight": (HIDDEN, FFN),
            f"model.layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"model.layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
        }
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def paired(rows):
    """Return the rows of heads as torchtune's `hf_to_tune` and Meta have them."""
    return rows.view(-1, 2, DIM // 2, rows.shape[1]).transpose(1, 2).reshape(rows.shape)


def renamed(weights, names, turn=lambda x: x):
    """Rename by parts of names; turn q and k."""
    out = {}
    for name, value in weights.items():
        new = name.removeprefix("model.")
        for old, other in names.items():
            new = new.replace(old, other)
        out[new] = turn(value) if "q_proj" in name or "k_proj" in name else value
    return out


META = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv", "self_attn.o_proj": "attention.wo", "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3", "mlp.down_proj": "feed_forward.w2", "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}  # fmt: skip
TORCHTUNE = {
    "embed_tokens": "tok_embeddings", "lm_head": "output", "self_attn.o_proj": "attn.output_proj", "self_attn": "attn",
    "mlp.gate_proj": "mlp.w1", "mlp.up_proj": "mlp.w3", "mlp.down_proj": "mlp.w2",
    "post_attention_layernorm.weight": "mlp_norm.scale",
    "input_layernorm.weight": "sa_norm.scale", "norm.weight": "norm.scale",
}  # fmt: skip


def litgpt(weights):
    """Return the weights as `convert_hf_checkpoint` of LitGPT has them: q, k and v one after the other."""
    names = {
        "embed_tokens": "wte", "self_attn.o_proj": "attn.proj", "mlp.gate_proj": "mlp.fc_1", "mlp.up_proj": "mlp.fc_2",
        "mlp.down_proj": "mlp.proj", "input_layernorm": "norm_1", "post_attention_layernorm": "norm_2", "layers.": "h.",
    }  # fmt: skip
    out = renamed({k: v for k, v in weights.items() if "q_proj" not in k and "k_proj" not in k and "v_proj" not in k}, names)
    out = {k if k.startswith("lm_head") else f"transformer.{k.replace('norm.w', 'ln_f.w')}": v for k, v in out.items()}
    for i in range(LAYERS):
        parts = [weights[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        out[f"transformer.h.{i}.attn.qkv.weight"] = torch.cat(parts)
    return out


def verdict(a, b, config=None):
    return compare(*logical(open_checkpoint(a), open_checkpoint(b), config))


@pytest.mark.parametrize("names", [META, TORCHTUNE], ids=["Meta", "torchtune"])
def test_rotated_pairs_of_meta_and_torchtune_are_put_in_transformers_order(names, tmp_path):
    weights = llama()
    torch.save(weights, tmp_path / "hf.pt")
    torch.save(renamed(weights, names, paired), tmp_path / "other.pt")
    found = verdict(tmp_path / "hf.pt", tmp_path / "other.pt", {"head_dim": DIM})
    assert [r.verdict for r in found.rows] == ["identical"] * len(weights)
    torch.save(renamed(weights, names), tmp_path / "unturned.pt")  # a conversion that forgot to turn q and k
    found = verdict(tmp_path / "hf.pt", tmp_path / "unturned.pt", {"head_dim": DIM})
    assert sum(r.verdict == "differ" for r in found.rows) == 2 * LAYERS
    assert "in the other rotary order" in found.causes[0].sentence


def test_litgpt_says_in_a_file_beside_its_weights_how_many_heads_it_has(tmp_path):
    weights = llama()
    torch.save(weights, tmp_path / "hf.pt")
    other = tmp_path / "litgpt"
    other.mkdir()
    torch.save(litgpt(weights), other / "lit_model.pth")
    settings = {"n_head": HEADS, "n_query_groups": GROUPS, "head_size": DIM, "n_embd": HIDDEN}
    (other / "model_config.yaml").write_text(yaml.safe_dump(settings))
    found = verdict(tmp_path / "hf.pt", other / "lit_model.pth")
    assert [r.verdict for r in found.rows] == ["identical"] * len(weights)


def test_q_and_k_exchanged_are_named_under_the_names_of_diffusers(tmp_path):
    weights = {f"blocks.{i}.attn1.{p}.weight": torch.randn(8, 8) for i in range(3) for p in ("to_q", "to_k", "to_v")}
    torch.save(weights, tmp_path / "a.pt")
    names = {"to_q": "to_k", "to_k": "to_q", "to_v": "to_v"}
    torch.save({k.replace(p := k.split(".")[3], names[p]): v for k, v in weights.items()}, tmp_path / "b.pt")
    found = verdict(tmp_path / "a.pt", tmp_path / "b.pt")
    assert found.causes[0].sentence == "q and k are exchanged in 3 layers"
