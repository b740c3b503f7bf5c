"""Real models of transformers run twice: with a loss of their own, with hooks of their own, called twice a backward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

import trainprobe

SIZES: dict[str, Any] = {
    **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32},
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


def llama(**more: Any) -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, **more))


def experts(**more: Any) -> Any:
    """Return a model that installs hooks on itself at its first forward, which record the routers' logits."""
    return Qwen2MoeForCausalLM(Qwen2MoeConfig(**SIZES, **EXPERTS, num_experts_per_tok=2, output_router_logits=True))


def own_loss(model: Any, x: Tensor) -> Tensor:
    return model(input_ids=x, labels=x).loss


def preferences(model: Any, x: Tensor) -> Tensor:
    """Return a loss over two calls of the model, as that of DPO is."""
    chosen, rejected = (model(input_ids=part).logits.log_softmax(-1)[..., 0].sum(-1) for part in x.chunk(2))
    return -nn.functional.logsigmoid(chosen - rejected).mean()


def own_loss_and_logits(model: Any, x: Tensor) -> Tensor:
    out = model(input_ids=x, labels=x)
    return out.loss + out.logits.square().mean()


def trained(make: Callable[..., Any], loss: Callable[[Any, Tensor], Tensor], plan: Any, strike: Any = None, **more: Any) -> Any:
    """Train three steps of two micro-batches; return (weights, what `repeat` found, steps that ran twice)."""
    torch.manual_seed(0)
    model = make(**more)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    with trainprobe.watch(model, optimizer, {"console": False, "on_error": "raise", **plan}) as probe:
        for step in range(3):
            with probe.step():
                for _ in range(2):
                    value = loss(model, torch.randint(64, (4, 12)))
                    if strike is not None:
                        strike(step, value)
                    value.backward()
                optimizer.step()
                optimizer.zero_grad()
    ran = probe.program("repeat").repeated if "audit" in plan else 0
    return [p.detach().clone() for p in model.parameters()], [f for f in probe.findings if f.rule == "repeat"], ran


@pytest.mark.parametrize(
    ("make", "loss", "more"),
    [
        (llama, own_loss, {}),
        (llama, own_loss, {"output_hidden_states": True, "tie_word_embeddings": True}),
        (llama, preferences, {"attention_dropout": 0.1}),
        (experts, own_loss, {}),
    ],
)
def test_a_healthy_model_is_found_equal_and_trains_to_the_same_bits(tmp_path: Path, make: Any, loss: Any, more: Any):
    plain, _, _ = trained(make, loss, {"output": tmp_path / "plain", "record": "nothing"}, **more)
    twice, found, ran = trained(make, loss, {"output": tmp_path / "twice", "audit": {"repeat": 1}}, **more)
    assert ([f.message for f in found], ran) == ([], 3)
    assert all(torch.equal(a, b) for a, b in zip(plain, twice, strict=True))


def test_logits_that_the_program_uses_beside_the_models_own_loss_are_said_to_be_not_run_again(tmp_path: Path):
    _, found, _ = trained(llama, own_loss_and_logits, {"output": tmp_path, "audit": {"repeat": 1}})
    assert [f.severity for f in found] == ["info"]
    assert "were not run again: an output of the model is used by another one and by the program" in found[0].message


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_activations_are_run_again_where_torch_can(tmp_path: Path, reentrant: bool):
    def checkpointed() -> Any:
        model = llama(attention_dropout=0.1)
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        return model

    _, found, ran = trained(checkpointed, own_loss, {"output": tmp_path, "audit": {"repeat": 1}})
    assert ran == (0 if reentrant else 3)
    assert [f.message.partition(": ")[2][:64] for f in found] == (
        ["activations are checkpointed with use_reentrant=True, which refu"] if reentrant else []
    )


def test_a_bit_that_flips_behind_an_op_of_the_models_own_loss_is_no_use_by_the_program(tmp_path: Path):
    def strike(step: int, loss: Tensor) -> None:
        if step != 1 or struck:
            return
        node: Any = loss.grad_fn
        while type(node).__name__ != "NllLossBackward0":
            node = node.next_functions[0][0]
        struck.append(node)

        def flips(gradients: Any, given: Any) -> Any:
            changed = gradients[0].clone()
            changed.view(torch.int32).view(-1)[5 * 64 + 9] ^= 1 << 30
            return (changed, *gradients[1:])

        node.register_hook(flips)

    struck: list[Any] = []
    _, found, _ = trained(llama, own_loss, {"output": tmp_path, "audit": {"repeat": 1}}, strike)
    assert struck and [(f.severity, f.step) for f in found] == [("warning", 1)]
    assert "grad_output.1.logits had other bits in the training's own run than in all of 5 others" in found[0].message
