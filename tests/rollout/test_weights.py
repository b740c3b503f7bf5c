"""Weights that a trainer pushes: shards add up to what NumPy says of the whole, and each fault is named with its tensor."""

from __future__ import annotations

import copy
from pathlib import Path

import numpy as np
import pytest
import torch

import trainprobe
from tests.distributed.launch import launch
from trainprobe.engine.arrays.torch_sketch import prints_of
from trainprobe.engine.core.sources import Part
from trainprobe.engine.geometry.shards import Shard
from trainprobe.engine.stats.checksum import fingerprint, hashed
from trainprobe.errors import FormatError, UsageError
from trainprobe.rollout.weights.prints import as_json, from_json, joined

HEADS = {"heads": 4, "groups": 2, "head_dim": 4}
_Q, _K, _V, _O = (f"model.layers.0.self_attn.{n}_proj.weight" for n in "qkvo")
_GATE, _UP, _DOWN = (f"model.layers.0.mlp.{n}_proj.weight" for n in ("gate", "up", "down"))


class Held(torch.nn.Module):
    """Parameters under dotted names."""

    def __init__(self, state):
        super().__init__()
        for name, tensor in state.items():
            *path, last = name.split(".")
            at = self
            for step in path:
                if not hasattr(at, step):
                    at.add_module(step, torch.nn.Module())
                at = getattr(at, step)
            at.register_parameter(last, torch.nn.Parameter(tensor.clone()))


def state(seed=0):
    draw = torch.Generator().manual_seed(seed)
    shapes = {
        "model.embed_tokens.weight": (20, 16),
        **{_Q: (16, 16), _K: (8, 16), _V: (8, 16), _O: (16, 16)},
        **{_GATE: (24, 16), _UP: (24, 16), _DOWN: (16, 24)},
        "model.layers.0.mlp.experts.gate_up_proj": (3, 12, 16),
        "model.norm.weight": (16,),
        "lm_head.weight": (20, 16),
    }
    return {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}


def fused(held):
    """Return what an engine makes of it: fused rows, another name for the experts, a padded vocabulary."""
    cat = torch.cat
    made = {n: t for n, t in held.items() if n not in (_Q, _K, _V, _GATE, _UP)}
    made["model.layers.0.self_attn.qkv_proj.weight"] = cat([held[_Q], held[_K], held[_V]])
    made["model.layers.0.mlp.gate_up_proj.weight"] = cat([held[_GATE], held[_UP]])
    made["model.layers.0.mlp.experts.w13_weight"] = made.pop("model.layers.0.mlp.experts.gate_up_proj")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        made[name] = cat([held[name], torch.full((4, 16), 9.0)])
    return made


def prints(model, **options):
    return trainprobe.fingerprints(model, config=HEADS, **options)


def test_a_fingerprint_is_that_of_numpy():
    held = state()
    found = prints(Held(held))
    assert found["layers.0.attention.q.weight"].fingerprint == fingerprint(held[_Q].numpy())
    assert found["final_norm.weight"].fingerprint == fingerprint(held["model.norm.weight"].numpy())
    expert = held["model.layers.0.mlp.experts.gate_up_proj"][2, 6:]
    assert found["layers.0.mlp.experts.2.up.weight"].fingerprint == fingerprint(expert.numpy())
    low = prints(Held(held), dtype="bfloat16")["layers.0.attention.q.weight"]
    assert low.fingerprint == fingerprint(held[_Q].bfloat16().view(torch.int16).numpy())
    assert (low.dtype, low.shape, low.complete) == ("bfloat16", (16, 16), True)


def test_the_sums_are_those_of_their_definition():
    t = torch.randn(5, 7, 3, generator=torch.Generator().manual_seed(1))

    def signs(place):
        return 1.0 - 2.0 * (hashed(np.asarray(place, np.uint64)) & np.uint64(1)).astype(np.float64)

    wide = t.double().numpy().reshape(5, 21)
    with np.errstate(over="ignore"):
        expected = [float(signs(np.arange(5) + (1 << 40)) @ wide @ signs(np.arange(21))), float((wide * wide).sum())]
    pieces = [(t, Shard((0, 0, 0), (5, 7, 3), (5, 7, 3)))]
    pieces += [
        (t[a : a + n, :, b : b + 1], Shard((a, 0, b), (n, 7, 1), (5, 7, 3))) for a, n in ((0, 2), (2, 3)) for b in range(3)
    ]
    found = np.asarray(prints_of(pieces), np.float64)[:, 1:]
    assert found[0].tolist() == pytest.approx(expected)
    assert found[1:].sum(0).tolist() == pytest.approx(expected)
    assert np.abs(prints_of([(torch.tensor(3.0), Shard((), (), ()))])[0][1:]).tolist() == [3.0, 9.0]
    t[1, 2, 0] = float("nan")
    assert np.isnan(prints_of([(t, pieces[0][1])])[0][1:]).all()


class Cut:
    """Where one rank of tensor parallelism keeps the rows of a state dict."""

    def __init__(self, held, rank, ranks):
        self.held, self.rank, self.ranks = held, rank, ranks

    def parts(self, moment):
        for name, t in self.held.items():
            axis = next((a for a in range(t.dim()) if "norm" not in name and t.shape[a] % self.ranks == 0), None)
            if axis is None:
                yield Part(name, "value", t, Shard((0,) * t.dim(), tuple(t.shape), tuple(t.shape), ("tp",)))
                continue
            n = t.shape[axis] // self.ranks
            offset = tuple(self.rank * n if a == axis else 0 for a in range(t.dim()))
            piece = t.narrow(axis, self.rank * n, n)
            yield Part(name, "value", piece, Shard(offset, tuple(piece.shape), tuple(t.shape)))


@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_of_a_fused_engine_add_up_to_the_weights_of_a_plain_trainer(ranks):
    held = state()
    held.pop("model.layers.0.mlp.experts.gate_up_proj")
    plain = prints(Held(held))
    engine = fused(held | {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(3, 12, 16)})
    engine.pop("model.layers.0.mlp.experts.w13_weight")
    engine |= {n: held[n] for n in ("model.embed_tokens.weight", "lm_head.weight")}
    whole = joined([prints(None, source=Cut(engine, rank, ranks)) for rank in range(ranks)])
    assert whole.keys() == plain.keys()
    assert {n: p.fingerprint for n, p in whole.items()} == {n: p.fingerprint for n, p in plain.items()}
    assert all(p.complete for p in whole.values())
    assert not prints(None, source=Cut(engine, 0, ranks))["layers.0.attention.proj.weight"].complete


def test_ranks_that_hold_other_bits_of_one_piece():
    held, other = state(), state()
    other["model.norm.weight"] = held["model.norm.weight"] + 1
    both = joined([prints(None, source=Cut(s, rank, 2)) for rank, s in enumerate((held, other))])
    assert [name for name, each in both.items() if each.disagree] == ["final_norm.weight"]


def pushed(change=lambda new, old: new, versions=(1, 2), before=True):
    """Push two versions into a fused engine, the second with a fault; return what is said of it."""
    trainer, old, new = Held(state(0)), fused(state(0)), fused(state(1))
    engine = Held(old)
    with trainprobe.weight_sync(trainer, versions[0], config=HEADS) as sync:
        pass
    if before:
        assert sync.received(engine, config=HEADS).verdict.code == 0
    with trainprobe.weight_sync(trainer, versions[1], config=HEADS) as sync, torch.no_grad():
        for p, t in zip(trainer.parameters(), state(1).values(), strict=True):
            p.copy_(t)
    after = Held(change(new, old))
    with torch.no_grad():
        engine.__dict__["_modules"] = after.__dict__["_modules"]
    return sync.received(engine, config=HEADS)


def test_a_push_that_arrived():
    answer = pushed()
    assert (answer.verdict.code, answer.fates) == (0, [])
    assert answer.verdict.sentence == "All 16 tensors of version 2 arrived, bit for bit."


_QKV, _ROWS = "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.down_proj.weight"
_NOISE = torch.randn(16, 24, generator=torch.Generator().manual_seed(4)).sign() * 2.0**-23
FAULTS = {
    "stale": (lambda new, old: new | {_QKV: torch.cat([new[_QKV][:16], old[_QKV][16:]])}, {"layers.0.attention.k.weight"}),
    "transposed": (lambda new, old: new | {_ROWS: new[_ROWS].T.contiguous()}, {"layers.0.mlp.fc2.weight"}),
    "exchanged": (
        lambda new, old: new | {_QKV: torch.cat([new[_QKV][:16], new[_QKV][24:], new[_QKV][16:24]])},
        {"layers.0.attention.k.weight", "layers.0.attention.v.weight"},
    ),
    "permuted": (lambda new, old: new | {_ROWS: new[_ROWS].flip(0)}, {"layers.0.mlp.fc2.weight"}),
    "cast in another order": (lambda new, old: new | {_ROWS: new[_ROWS] * (1 + _NOISE)}, {"layers.0.mlp.fc2.weight"}),
    "other values": (lambda new, old: new | {_ROWS: new[_ROWS] * 1.5}, {"layers.0.mlp.fc2.weight"}),
    "never travels": (lambda new, old: {n: t for n, t in new.items() if n != _ROWS}, {"layers.0.mlp.fc2.weight"}),
}


@pytest.mark.parametrize("cause", FAULTS)
def test_a_fault_is_named_with_its_tensor(cause):
    change, names = FAULTS[cause]
    answer = pushed(change)
    assert answer.verdict.code == 2
    assert answer.fates[0].cause == cause
    assert names <= {fate.name for fate in answer.fates if fate.cause == cause}
    assert min(names) in answer.verdict.sentence


def test_what_was_repacked_or_quantised_is_never_called_equal():
    answer = pushed(lambda new, old: new | {_ROWS: new[_ROWS].reshape(8, 48)})
    assert (answer.verdict.code, answer.fates[0].cause) == (3, "not comparable")
    assert "repacked: sent as [16, 24], held as [8, 48]" in answer.verdict.sentence
    trainer = Held(state())
    with trainprobe.weight_sync(trainer, 1, config=HEADS) as sync:
        pass
    engine = Held(fused(state()) | {_ROWS: state()[_ROWS].bfloat16()})
    answer = sync.received(engine, config=HEADS)
    assert (answer.verdict.code, answer.fates[0].note) == (3, "sent as float32, held as bfloat16: give dtype='bfloat16'")


def test_shards_that_nobody_gathered_are_not_comparable():
    trainer = torch.nn.Linear(1, 1)
    with trainprobe.weight_sync(trainer, 1, source=Cut({_O: state()[_O]}, 0, 2)) as sync:
        pass
    answer = sync.received(Held({_O: state()[_O]}))
    assert answer.verdict.code == 3
    assert "128 of its 256 elements were stamped: give gather=" in answer.verdict.sentence


def test_a_tensor_that_no_push_sends():
    answer = pushed(lambda new, old: new | {_ROWS: old[_ROWS]})
    assert answer.fates[0].cause == "stale"
    trainer = Held({n: t for n, t in state().items() if n != _DOWN})
    engine = Held(fused(state()))
    for version in (1, 2):
        with trainprobe.weight_sync(trainer, version, config=HEADS) as sync, torch.no_grad():
            for p in trainer.parameters():
                p.mul_(2)
            engine.model.layers.__getattr__("0").self_attn.qkv_proj.weight.mul_(2)
        answer = sync.received(engine, config=HEADS)
    assert "never sent" in {fate.cause for fate in answer.fates if fate.name == "layers.0.mlp.fc2.weight"}


def test_a_tied_copy_in_the_engine_is_no_tensor_of_its_own():
    held = {n: t for n, t in state().items() if n != "lm_head.weight"}
    engine = Held(fused(held | {"lm_head.weight": held["model.embed_tokens.weight"]}))
    with trainprobe.weight_sync(Held(held), 1, config=HEADS) as sync:
        pass
    assert sync.received(engine, config=HEADS).verdict.code == 0


def test_the_history_of_pushes_is_judged():
    trainer, engine = Held(state()), Held(fused(state()))
    codes = []
    for version in (1, 2, 1):
        with trainprobe.weight_sync(trainer, version, config=HEADS) as sync:
            pass
        codes.append(sync.received(engine, config=HEADS).verdict)
    assert codes[0].code == 0
    assert codes[1].sentence == "Version 2 has the bits of version 1: the optimizer moved nothing that was sent."
    assert codes[2].sentence == "Version 1 was pushed behind version 2: the engine goes back."


def test_a_file_carries_the_pushes_to_another_process(tmp_path):
    trainer = Held(state())
    with trainprobe.weight_sync(trainer, 7, config=HEADS) as sync, pytest.raises(UsageError, match="when the push is over"):
        sync.received(trainer)
    path = sync.write(tmp_path / "pushes.json")
    again = trainprobe.read_sync(path)
    assert again.pushes == sync.pushes
    assert again.received(Held(fused(state())), config=HEADS).verdict.code == 0
    assert from_json(as_json(sync.pushes[0].sent)) == sync.pushes[0].sent
    for text in ("", "[1]", '[{"version": 1}]', '[{"version": 1, "sent": {"a": {"pieces": 3}}}]', "{"):
        path.write_text(text)
        with pytest.raises(FormatError, match="holds no pushes of weights"):
            trainprobe.read_sync(path)


def test_lora_is_sent_merged_and_an_adapter_that_stays_behind_is_named():
    peft = pytest.importorskip("peft")
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    plain = LlamaForCausalLM(LlamaConfig(vocab_size=20, num_hidden_layers=1, tie_word_embeddings=False, **small))
    base = copy.deepcopy(plain)
    model = peft.get_peft_model(plain, peft.LoraConfig(target_modules=["q_proj", "o_proj"], init_lora_weights=False))
    with trainprobe.weight_sync(model, 1) as sync:
        merged = copy.deepcopy(model).merge_and_unload()
    assert sync.received(merged).verdict.code == 0
    answer = sync.received(base)
    assert {(f.name, f.cause) for f in answer.fates} == {
        (f"layers.0.attention.{n}.weight", "adapter never travels") for n in ("q", "proj")
    }
    assert answer.verdict.code == 2


def test_a_trainer_keeps_its_bits():
    trainer = Held(state())
    before = {n: p.clone() for n, p in trainer.named_parameters()}
    random = torch.random.get_rng_state()
    with trainprobe.weight_sync(trainer, 1, config=HEADS, dtype="bfloat16"):
        pass
    assert all(torch.equal(p, before[n]) for n, p in trainer.named_parameters())
    assert torch.equal(random, torch.random.get_rng_state())
    with pytest.raises(UsageError, match="bfloat17"):
        prints(trainer, dtype="bfloat17")


@pytest.mark.parametrize(
    ("fault", "begins"), [("none", "0 All 10 tensors of version 2 arrived"), ("stale", "2 Stale: layers.1.attention.v.weight")]
)
def test_fsdp2_in_two_processes(fault, begins):
    said = launch(Path(__file__).with_name("push_sharded.py"), 2, fault)
    assert all(rank.startswith(begins) for rank in said), said


SMALL = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
FAMILIES = {  # class of transformers → its configuration
    "Qwen2": {"intermediate_size": 24, "num_key_value_heads": 2},
    "Gemma2": {"intermediate_size": 24, "num_key_value_heads": 2, "head_dim": 8},
    "Mixtral": {"intermediate_size": 24, "num_key_value_heads": 2, "num_local_experts": 2},
    "GPTNeoX": {"intermediate_size": 24},  # its q, k and v lie head by head: several pieces of each
    "DeepseekV3": {
        "intermediate_size": 24, "moe_intermediate_size": 8, "n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1,
        "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 4, "v_head_dim": 4, "num_key_value_heads": 4,
    },
}  # fmt: skip


def fused_as_engines_do(model):
    held = {name: p.detach() for name, p in model.named_parameters()}
    for name in list(held):
        for parts, whole in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
            all_parts = [name.replace(parts[0], part) for part in parts]
            if f".{parts[0]}." in name and all(part in held for part in all_parts):
                held[name.replace(parts[0], whole)] = torch.cat([held.pop(part) for part in all_parts])
    made = Held(held)
    made.config = model.config
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_other_families_arrive_in_fused_layouts_and_a_wrong_row_is_named(family):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SMALL, **FAMILIES[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    engine = fused_as_engines_do(model)
    with trainprobe.weight_sync(model, version=1) as sync:
        pass
    answer = sync.received(engine)
    assert answer.verdict.code == 0, answer.verdict
    name = next(
        n for n, p in engine.named_parameters() if ("qkv" in n or "query_key_value" in n or "kv_b" in n) and p.dim() == 2
    )
    with torch.no_grad():
        engine.get_parameter(name)[-1] += 0.01
    fates = sync.received(engine).fates
    assert len(fates) == 1 and fates[0].name.startswith("layers.0.attention."), fates


def test_a_fused_layout_that_no_map_knows_is_neither_equal_nor_missed():
    names = [f"decoder.layers.{i}.attn.{part}.weight" for i in range(2) for part in ("a", "b", "out")]
    model = Held({name: torch.randn(4, 4) for name in names})
    held = dict(model.named_parameters())
    engine = Held({f"decoder.layers.{i}.attn.ab.weight": torch.cat([held[n].detach() for n in names[3 * i : 3 * i + 2]])
                   for i in range(2)} | {n: held[n].detach() for n in names[2::3]})  # fmt: skip
    with trainprobe.weight_sync(model, version=1) as sync:
        pass
    verdict = sync.received(engine).verdict
    assert verdict.code == 3 and "under names that are not known: fused" in verdict.sentence, verdict
    del engine.decoder.layers.get_submodule("1.attn").ab
    assert sync.received(engine).verdict.sentence.startswith("Never travels: decoder.layers.1.attn.a.weight")
