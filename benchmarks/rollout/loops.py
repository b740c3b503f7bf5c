"""Loops of others on a CPU: their batches, advantages and losses, with `note_rollout` in them.

    python benchmarks/rollout/loops.py --verl DIR --slime DIR --openrlhf DIR --areal DIR [--site DIR:DIR]

DIR is a checkout of the project; --site has what it imports, behind all else. A tiny Llama writes four responses to each of
four prompts, twelve times. Each project's own code makes the batch, the advantages and the loss: of verl and AReaL the whole
actor (`DataParallelPPOActor`, `PPOActor`), of slime and OpenRLHF the functions that their actors call. With and without the
probe the bits must be equal; the healthy loop must have no finding, and two faults must be named: rewards that are always
equal, and advantages over groups of shifted rows.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import subprocess
import sys
import tempfile
import types
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

PROMPTS, EACH, PROMPT, NEW, END, STEPS, VOCABULARY = 4, 4, 6, 10, 2, 12, 40
FAULTS = {"": "no findings", "flat": "the responses of each prompt have equal rewards", "cut": "cut across prompts"}
Batch = dict[str, torch.Tensor]


def sampled(model: Any, step: int) -> Batch:
    """Return prompts, whole texts, responses and their mask; padding is on the right."""
    draw = torch.Generator().manual_seed(step)
    prompts = torch.randint(3, VOCABULARY, (PROMPTS, PROMPT), generator=draw).repeat_interleave(EACH, 0)
    torch.manual_seed(1000 + step)
    with torch.no_grad():
        out = model.eval().generate(prompts, max_new_tokens=NEW, do_sample=True, top_k=0, eos_token_id=END, pad_token_id=0)
    out = torch.nn.functional.pad(out, (0, PROMPT + NEW - out.shape[1]))
    ends = (out[:, PROMPT:] == END).cumsum(1) - (out[:, PROMPT:] == END).int()
    model.train()
    return {"prompts": prompts, "texts": out, "responses": out[:, PROMPT:], "mask": (ends == 0).long()}


def log_probs(model: Any, batch: Batch) -> torch.Tensor:
    """Return the log-probabilities of the responses, with gradients."""
    seen = torch.cat([torch.ones_like(batch["prompts"]), batch["mask"]], 1)
    logits = model(batch["texts"], attention_mask=seen).logits[:, PROMPT - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, batch["responses"][..., None])[..., 0]


def scored(batch: Batch, fault: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the reward of each rollout, and its group as the loop takes it."""
    rewards = ((batch["responses"] % 3 == 0) * batch["mask"]).sum(1).float()
    groups = torch.arange(PROMPTS * EACH) // EACH
    return torch.ones_like(rewards) if fault == "flat" else rewards, groups.roll(1) if fault == "cut" else groups


def centred(rewards: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return rewards less the mean of their group, over its spread: what slime does before its actor sees a batch."""
    found = torch.zeros_like(rewards)
    for group in groups.unique():
        of_group = rewards[groups == group]
        found[groups == group] = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
    return found


def verl(model: Any, optimizer: Any) -> Any:
    """Return a step of verl's actor, with its DataProto and its GRPO advantages."""
    import numpy as np

    proto = importlib.import_module("verl").DataProto
    algorithms = importlib.import_module("verl.trainer.ppo.core_algos")
    config = importlib.import_module("verl.workers.config")
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
    settings = config.FSDPActorConfig(
        strategy="fsdp", rollout_n=EACH, ppo_mini_batch_size=16, ppo_micro_batch_size_per_gpu=8, use_torch_compile=False,
        optim=config.FSDPOptimizerConfig(lr=1e-3),
    )  # fmt: skip
    actor = importlib.import_module("verl.workers.actor.dp_actor").DataParallelPPOActor(settings, model, optimizer)

    def step(batch: Batch, rewards: torch.Tensor, groups: torch.Tensor, number: int, note: Callable[[Any], None]) -> None:
        seen = torch.cat([torch.ones_like(batch["prompts"]), batch["mask"]], 1)
        data = proto.from_single_dict(
            {
                "prompts": batch["prompts"], "responses": batch["responses"], "input_ids": batch["texts"],
                "attention_mask": seen, "position_ids": (seen.cumsum(1) - 1).clamp(min=0), "response_mask": batch["mask"],
                "uid": np.array([str(i // EACH) for i in range(len(rewards))], dtype=object),
            },
            meta_info={"temperature": 1.0, "micro_batch_size": 8, "use_dynamic_bsz": False, "pad_token_id": 0},
        )  # fmt: skip
        out = actor.compute_log_prob(data, calculate_entropy=True)
        old, entropy = (out["log_probs"], out["entropys"]) if isinstance(out, dict) else out[:2]
        scores = torch.zeros(old.shape)
        scores[torch.arange(len(scores)), batch["mask"].sum(1) - 1] = rewards
        advantages, returns = algorithms.compute_grpo_outcome_advantage(
            scores, batch["mask"], index=np.array(groups.tolist()), norm_adv_by_std_in_grpo=True
        )
        more = {"old_log_probs": old, "rollout_log_probs": old + noise(old, number), "entropys": entropy}
        for name, column in (more | {"token_level_scores": scores, "advantages": advantages, "returns": returns}).items():
            data.batch[name] = column
        note(data)
        actor.update_policy(data)

    return step


def noise(like: torch.Tensor, number: int) -> torch.Tensor:
    """Return what an engine's log-probabilities are apart by."""
    return 1e-3 * torch.randn(like.shape, generator=torch.Generator().manual_seed(number))


def slime(model: Any, optimizer: Any) -> Any:
    """Return a step with slime's advantages and policy loss, over lists of sequences."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tempfile.mkdtemp()}/meet", rank=0, world_size=1)
    importlib.import_module("megatron.core.parallel_state").initialize_model_parallel()
    losses = importlib.import_module("slime.backends.megatron_utils.loss")
    clipped = importlib.import_module("slime.utils.ppo_utils").compute_policy_loss
    given = Namespace(
        use_rollout_logprobs=False, kl_coef=0, custom_advantage_function_path=None, advantage_estimator="grpo",
        normalize_advantages=False, use_opd=False, qkv_format="thd",
    )  # fmt: skip

    def step(batch: Batch, rewards: torch.Tensor, groups: torch.Tensor, number: int, note: Callable[[Any], None]) -> None:
        lengths = batch["mask"].sum(1).tolist()
        now = log_probs(model, batch)
        old = now.detach()
        data: dict[str, Any] = {
            "tokens": [row[: PROMPT + n] for row, n in zip(batch["texts"], lengths, strict=True)],
            "loss_masks": [torch.ones(n, dtype=torch.int) for n in lengths],
            "log_probs": [row[:n] for row, n in zip(old, lengths, strict=True)],
            "rollout_log_probs": [row[:n] for row, n in zip(old + noise(old, number), lengths, strict=True)],
            "rewards": centred(rewards, groups).tolist(),
            "response_lengths": lengths,
            "total_lengths": [PROMPT + n for n in lengths],
        }
        losses.compute_advantages_and_returns(given, data)
        note(data)
        whole = torch.cat([row[:n] for row, n in zip(now, lengths, strict=True)])
        loss = clipped(torch.cat(data["log_probs"]) - whole, torch.cat(data["advantages"]), 0.2, 0.2)[0].mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def openrlhf(model: Any, optimizer: Any) -> Any:
    """Return a step with OpenRLHF's Experience and policy loss; its models' `__init__` needs a GPU and is not run."""
    package = types.ModuleType("openrlhf.models")
    package.__path__ = [str(Path(next(iter(importlib.import_module("openrlhf").__path__)), "models"))]
    sys.modules["openrlhf.models"] = package
    experience = importlib.import_module("openrlhf.trainer.ppo_utils.experience").Experience
    loss_of = importlib.import_module("openrlhf.models.loss").PolicyLoss()

    def step(batch: Batch, rewards: torch.Tensor, groups: torch.Tensor, number: int, note: Callable[[Any], None]) -> None:
        now = torch.nn.functional.pad(log_probs(model, batch), (PROMPT - 1, 0))
        old, mask = now.detach(), torch.nn.functional.pad(batch["mask"], (PROMPT - 1, 0))
        data = experience(
            sequences=batch["texts"],
            action_mask=mask.bool(),
            action_log_probs=old,
            rollout_log_probs=old + noise(old, number),
            advantages=centred(rewards, groups)[:, None] * mask,
            rewards=rewards,
            prompts=[str(row.tolist()) for row in batch["prompts"]],
        )
        note(data)
        loss = loss_of(
            now, data.action_log_probs, data.advantages, action_mask=data.action_mask, rollout_log_probs=data.rollout_log_probs
        )[0]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def areal(model: Any, optimizer: Any) -> Any:
    """Return a step of AReaL's actor with its advantages and losses; a loop of micro-batches stands for its FSDP engine."""
    settings = importlib.import_module("areal.api.cli_args")
    trainer = importlib.import_module("areal.trainer.ppo.actor")

    class Engine:
        def train(self) -> None:
            model.train()

        def get_version(self) -> int:
            return 0

        def train_batch(self, given: Any, loss_fn: Callable[..., torch.Tensor], loss_weight_fn: Any) -> dict[str, float]:
            logits = model(given["input_ids"], attention_mask=given["attention_mask"]).logits.float().log_softmax(-1)
            found = logits.gather(-1, given["input_ids"].roll(-1, 1)[..., None])[..., 0]
            loss_fn(found, -(logits.exp() * logits).sum(-1), given).backward()
            optimizer.step()
            optimizer.zero_grad()
            return {}

    by_group = settings.NormConfig(mean_level="group", std_level="group", group_size=EACH)
    config = settings.PPOActorConfig(
        experiment_name="loop", trial_name="cpu", path="", ppo_n_minibatches=1, kl_ctl=0.0,
        reward_norm=by_group, adv_norm=None, use_decoupled_loss=True, recompute_logprob=True, discount=1.0, gae_lambda=1.0,
        mask_no_eos_with_zero=False,
    )  # fmt: skip
    actor = trainer.PPOActor(config, Engine())

    def step(batch: Batch, rewards: torch.Tensor, groups: torch.Tensor, number: int, note: Callable[[Any], None]) -> None:
        rows, place = torch.nn.functional.pad(batch["mask"], (PROMPT, 0)), PROMPT - 1
        old = torch.nn.functional.pad(log_probs(model, batch).detach(), (place, 1))  # of the token behind each place
        order = groups.argsort(stable=True)
        data = {
            "input_ids": batch["texts"], "attention_mask": torch.cat([torch.ones_like(batch["prompts"]), batch["mask"]], 1),
            "loss_mask": rows, "logprobs": (old + noise(old, number)).roll(1, 1), "prox_logp": old, "rewards": rewards,
            "prompt_ids": batch["prompts"],
        }  # fmt: skip
        data = {name: column[order] for name, column in data.items()}
        prompts = [{name: column[i : i + EACH] for name, column in data.items()} for i in range(0, len(rewards), EACH)]
        found = actor.compute_advantages(prompts)
        note(found)
        actor.ppo_update(found)

    return step


LOOPS = {"verl": verl, "slime": slime, "openrlhf": openrlhf, "areal": areal}


def train(loop: str, folder: str, fault: str) -> None:
    """Train twelve steps, with the probe where a folder is given; print the bits of the weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    import trainprobe
    from trainprobe.rollout.health import note_rollout

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    step = LOOPS[loop](model, optimizer)
    with trainprobe.watch(model, optimizer, output=folder) if folder else nullcontext() as probe:
        for number in range(STEPS):
            with probe.step() if probe is not None else nullcontext():
                batch = sampled(model, number)
                rewards, groups = scored(batch, fault)

                def note(data: Any) -> None:
                    if probe is not None:
                        note_rollout(probe, data, end_token=END, group_size=EACH)

                step(batch, rewards, groups, number, note)
    bits = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    print("bits", hashlib.sha256(bits).hexdigest())


def said(loop: str, given: Namespace, folder: str, fault: str = "") -> tuple[str, str]:
    """Train in a process of its own; return the bits, and all that it said."""
    call = [sys.executable, __file__, "--train", loop, folder, fault, "--site", given.site or ""]
    done = subprocess.run([*call, f"--{loop}", getattr(given, loop)], capture_output=True, text=True, check=False, timeout=600)
    if done.returncode:
        raise RuntimeError(done.stderr[-3000:])
    return next(line for line in done.stdout.splitlines() if line.startswith("bits")), " ".join(
        (done.stdout + done.stderr).split()
    )


def main() -> None:
    """Run the loops whose checkouts are given."""
    parser = argparse.ArgumentParser(description=__doc__)
    for loop in LOOPS:
        parser.add_argument(f"--{loop}")
    parser.add_argument("--site")
    parser.add_argument("--train", nargs=3)
    given = parser.parse_args()
    if given.train:
        sys.path[0] = getattr(given, given.train[0])
        sys.path += [folder for folder in (given.site or "").split(":") if folder]
        train(*given.train)
        return
    good = True
    for loop in (loop for loop in LOOPS if getattr(given, loop)):
        plain, _ = said(loop, given, "")
        for fault, words in FAULTS.items():
            with tempfile.TemporaryDirectory() as folder:
                bits, text = said(loop, given, f"{folder}/run", fault)
            fine = words in text and (bool(fault) or bits == plain) and "nonfinite" not in text
            good &= fine
            end = text[max(0, text.find(f"trainprobe: {STEPS} steps")) :][:90]
            print(f"{'ok  ' if fine else 'MISS'} {loop:9} {fault or 'healthy':8} {end}", flush=True)
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
