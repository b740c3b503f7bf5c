"""Router features against NumPy: a plain gate, and Hugging Face's mixtures of experts."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

import trainprobe
from trainprobe.engine.capture.features.routers import chosen, similarity

EXPERTS, WIDTH, TOKENS = 6, 16, 40


def softmax(x):
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)


def entropy(p):
    return -(p * np.log(p)).sum(-1).mean()


def counted(indices, experts=EXPERTS):
    counts = np.bincount(np.asarray(indices).reshape(-1), minlength=experts)
    return counts / counts.sum()


class Mixture(nn.Module):
    """Experts behind a linear gate."""

    def __init__(self, k):
        super().__init__()
        self.top_k = k
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=True)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, x):
        scores, places = self.gate(x).softmax(-1).topk(self.top_k, -1)
        self.kept = (x.detach(), places)
        out = torch.zeros_like(x)
        for i, expert in enumerate(self.experts):
            out = out + (scores * (places == i)).sum(-1, keepdim=True) * expert(x)
        return out


def train(folder, model, batches, features, loss=lambda out: out.square().mean()):
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    plan = {"level": "off", "sinks": ["memory"], "monitor": {"features": features} if features else True}
    collected_steps = []
    with trainprobe.watch(model, optimizer, output=folder, on_error="raise", **plan) as probe:
        for step, batch in enumerate(batches):
            probe.begin_step(step)
            optimizer.zero_grad()
            loss(model(batch)).backward()
            optimizer.step()
            collected_steps.append(probe.end_step())
    return collected_steps


def test_a_linear_gate(tmp_path):
    torch.manual_seed(0)
    model = nn.ModuleDict({"mlp": Mixture(2)})["mlp"]
    model = nn.Sequential(model)
    weight, bias = (t.detach().double().numpy().copy() for t in (model[0].gate.weight, model[0].gate.bias))
    (step_data,) = train(tmp_path, model, [torch.randn(4, TOKENS // 4, WIDTH)], {"routers": True})
    x, places = model[0].kept
    found = {f.slot: f.numbers for f in step_data.features}
    p = softmax(x.double().numpy().reshape(TOKENS, WIDTH) @ weight.T + bias)
    assert found["router_entropy"] == pytest.approx(entropy(p), rel=1e-5)
    assert found["router_load"].tolist() == pytest.approx(counted(places).tolist())
    assert {f.name for f in step_data.features} == {"0.gate"}


def test_similarity_is_the_mean_cosine_of_pairs():
    w = np.random.default_rng(0).normal(size=(5, 30))
    w[3] = 2 * w[1]
    pairs = [w[i] @ w[j] / np.linalg.norm(w[i]) / np.linalg.norm(w[j]) for i in range(5) for j in range(i)]
    assert float(similarity(torch.from_numpy(w).float())) == pytest.approx(np.mean(pairs), rel=1e-4)


def test_dropped_tokens_and_masks():
    places = torch.tensor([[0, 2], [2, -1], [5, 6]])
    assert chosen([torch.rand(3, 2), places], 6).tolist() == [1, 0, 2, 0, 0, 1]
    kept = torch.tensor([[True, False, True], [False, False, True]])
    assert chosen([torch.rand(2, 3), kept], 3).tolist() == [1, 0, 2]
    assert chosen([torch.rand(2, 3)], 3) is None


def test_a_gate_that_does_not_say_how_many_experts_counts_first_choices_and_says_so(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(Mixture(2))
    del model[0].top_k
    model[0].forward = lambda x: model[0].gate(x)
    (step_data,) = train(tmp_path, model, [torch.randn(TOKENS, WIDTH)], {"routers": True})
    assert any("does not say how many experts" in note for note in step_data.notes)
    load = next(f.numbers for f in step_data.features if f.slot == "router_load")
    assert np.allclose(load * TOKENS, np.rint(load * TOKENS))


@pytest.fixture(params=["mixtral", "qwen3_moe"])
def family(request):
    transformers = pytest.importorskip("transformers")
    small = {
        **{"hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50},
        **{"num_key_value_heads": 2, "max_position_embeddings": 32, "num_experts_per_tok": 2, "head_dim": 8},
    }
    if request.param == "mixtral":
        config = transformers.MixtralConfig(**small, num_local_experts=EXPERTS)
        return lambda: transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(**small, num_experts=EXPERTS, moe_intermediate_size=24, decoder_sparse_step=1)
    return lambda: transformers.Qwen3MoeForCausalLM(config)


def run(folder, make, features):
    torch.manual_seed(1)
    model = make()
    ids = torch.randint(0, 50, (3, 12), generator=torch.Generator().manual_seed(2))
    kept = {}
    handles = [
        module.register_forward_hook(lambda m, args, out, name=name: kept.__setitem__(name, (args[0].detach(), out)))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    weights = {
        n: model.get_submodule(n).weight.detach().double().numpy().copy()
        for n, _ in model.named_modules()
        if n.endswith("mlp.gate")
    }
    collected_steps = train(folder, model, [ids], features, lambda out: out.logits.square().mean())
    for handle in handles:
        handle.remove()
    return collected_steps, kept, weights, [p.detach().clone() for p in model.parameters()]


def test_routers_of_hugging_face_models(tmp_path, family):
    (step_data,), kept, weights, trained = run(tmp_path / "on", family, {"routers": True, "attention": True})
    assert len(kept) == 2
    for name, (x, out) in kept.items():
        found = {f.slot: f.numbers for f in step_data.features if f.name == name}
        logits = x.double().numpy().reshape(-1, 32) @ weights[name].T
        assert found["router_entropy"] == pytest.approx(entropy(softmax(logits)), rel=1e-5)
        assert found["router_load"].tolist() == pytest.approx(counted(out[-1]).tolist())
        assert found["router_similarity"][0] == pytest.approx(
            float(similarity(torch.from_numpy(weights[name]).float())), rel=1e-5
        )
    assert {f.name for f in step_data.features if f.slot == "attention_entropy"} == {
        f"model.layers.{i}.self_attn" for i in range(2)
    }
    _, _, _, bare = run(tmp_path / "off", family, None)
    assert all(map(torch.equal, trained, bare))
