"""A script up to its first update: the loss that is made again is the loop's own, to the bit, and nothing is trained."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, logsigmoid, softplus

import trainprobe
from trainprobe.errors import UsageError
from trainprobe.integrations.first_update import FirstUpdate
from trainprobe.preflight.batches import joined
from trainprobe.preflight.script.command import preflight_script
from trainprobe.preflight.subject import scalar_of
from trainprobe.preflight.training import tested as answers

SCHEMA = json.loads((Path(__file__).parents[2] / "docs/preflight.schema.json").read_text())
V = 13


class Enough(Exception):  # noqa: N818
    """Ends a loop where the command leaves the process."""


class Text(nn.Module):
    """A language model that returns its loss, too, where it is given targets."""

    def __init__(self):
        super().__init__()
        self.embed, self.drop, self.head = nn.Embedding(V, 8), nn.Dropout(0.0), nn.Linear(8, V)

    def forward(self, idx, targets=None):
        logits = self.head(self.drop(self.embed(idx)).cumsum(1))
        return logits if targets is None else (logits, cross_entropy(logits.view(-1, V), targets.reshape(-1)))


class Twice(torch.autograd.Function):
    """A function of the loop's own, which no tape sees."""

    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2


def learnt(loop):
    """Run a loop up to its first update; return what was learnt of it, and the losses that it computed itself."""
    torch.manual_seed(0)
    own, found = [], []

    def end(learn):
        try:
            found.append(learn())
        except UsageError as error:
            found.append(error)
        raise Enough

    with FirstUpdate(end), pytest.raises(Enough):
        loop(own)
    if isinstance(found[0], UsageError):
        raise found[0]
    return (*found[0], own)


def tokens(rows=3):
    whole = torch.randint(0, V, (rows, 8))
    return whole[:, :-1], whole[:, 1:]


def of_model(own):
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = tokens()
    _, loss = model(x, y)
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


def of_an_attribute(own):
    """As llama2.c's train.py reads the loss, and loops with experts the term of balance."""

    class Keeps(Text):
        def forward(self, idx, targets=None):
            logits, self.last_loss = super().forward(idx, targets)
            self.embed.balance = logits.square().mean()
            return logits

    model = Keeps()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(*tokens())
    loss = model.last_loss / 4 + 0.01 * model.embed.balance
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


def of_criterion(own):
    model, criterion = Text(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = tokens()
    logits = model(x)
    loss = criterion(logits.reshape(-1, V), y.reshape(-1)) * 2.0
    own.append(loss.detach().clone())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def of_counted_targets(own):
    model = Text()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = tokens()
    y = y.masked_fill(torch.rand(y.shape) < 0.3, -100)
    count = (y != -100).sum()
    loss = cross_entropy(model(x).flatten(0, 1), y.flatten(), reduction="sum") / count
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


def of_two_models(own):
    encoder, head = nn.Linear(4, 6), nn.Linear(6, 2)
    optimizer = torch.optim.SGD([*encoder.parameters(), *head.parameters()], lr=0.1)
    x, y = torch.randn(5, 4), torch.randn(5, 2)
    with torch.autocast("cpu", torch.bfloat16):
        out = head(torch.tanh(encoder(x)))
    loss = ((out - y) ** 2).mean()
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


def of_closure(own):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    x, y = torch.randn(5, 4), torch.randn(5, 1)

    def closure():
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        own.append(loss.detach().clone())
        loss.backward()
        return loss

    optimizer.step(closure)


def of_no_optimizer(own):
    model = nn.Linear(4, 1)
    x, y = torch.randn(5, 4), torch.randn(5, 1)
    for _ in range(2):
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-0.1)
            p.grad = None
    own.append(nn.functional.mse_loss(model(x), y))


def of_gradient_penalty(own):
    critic = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1))
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.1)
    real, made = torch.randn(5, 4), torch.randn(5, 4)
    loss = critic(made).mean() - critic(real).mean()
    between = ((real + made) / 2).requires_grad_(True)
    score = critic(between)
    (slope,) = torch.autograd.grad(score, between, torch.ones_like(score), create_graph=True)
    loss = loss + 10 * ((slope.norm(2, dim=1) - 1) ** 2).mean()
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


def of_distribution(own):
    """As policies are: what they return is an object that holds the logits."""

    class Policy(nn.Linear):
        def forward(self, x):
            return torch.distributions.Categorical(logits=super().forward(x))

    policy = Policy(4, 3)
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    actions = policy(torch.randn(6, 4))
    loss = -(actions.log_prob(torch.randint(0, 3, (6,))) * torch.randn(6)).mean() - actions.entropy().mean()
    own.append(loss.detach().clone())
    loss.backward()
    optimizer.step()


LOOPS = [
    of_model,
    of_an_attribute,
    of_criterion,
    of_counted_targets,
    of_two_models,
    of_closure,
    of_gradient_penalty,
    of_distribution,
]


@pytest.mark.parametrize("loop", LOOPS)
def test_the_loss_is_that_of_the_loop_to_the_bit(loop):
    training, optimizers, own = learnt(loop)
    assert len(training.micros) == len(optimizers) == 1
    with torch.no_grad():
        assert torch.equal(scalar_of(training.loss(training.model, training.micros[0])), own[0])


def test_calls_that_only_act_are_no_part_of_the_step():
    """As where an agent acts in its environment with gradients enabled, and then trains on what it remembers."""

    def loop(own):
        critic = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        actor = nn.Linear(3, 2)
        optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
        seen = torch.randn(9, 3)
        for row in seen:
            critic(actor(row[None]).sum() * row[None]).argmax()
        critic(Twice.apply(actor(seen)).sum() * seen)
        loss = nn.functional.mse_loss(critic(torch.randn(6, 3)), torch.ones(6, 1))
        loss.backward()
        optimizer.step()

    training, *_ = learnt(loop)
    assert {name: len(x) for name, x in training.micros[0].items()} == {"input": 6, "target": 6}
    assert isinstance(training.model, nn.Sequential)
    report = trainprobe.preflight(training.loss, training.model, training.micros[0], only=["split", "gradient"], seconds=600)
    assert [found.status for found in report.lines] == ["holds"] * 2, report


def test_rows_whose_gradient_a_penalty_takes_are_rows_of_the_batch():
    training, *_ = learnt(of_gradient_penalty)
    assert [list(x.shape) for x in training.micros[0].values()] == [[5, 4]] * 3
    wanted = ["split", "rows", "gradient"]
    report = trainprobe.preflight(training.loss, training.model, training.micros[0], only=wanted, seconds=600)
    assert [found.status for found in report.lines] == ["holds"] * 3, report
    assert "float64" in report.lines[2].text


def test_targets_are_taken_before_they_are_flattened_and_counted_again():
    training, *_ = learnt(of_counted_targets)
    (batch,) = training.micros
    assert [list(x.shape) for x in batch.values()] == [[3, 7], [3, 7]]
    halves = [{name: x[rows] for name, x in batch.items()} for rows in (slice(0, 2), slice(2, 3))]
    counts = [int((x["target"] != -100).sum()) if "target" in x else int((list(x.values())[1] != -100).sum()) for x in halves]
    with torch.no_grad():
        parts = [float(training.loss(training.model, half)) for half in halves]
        whole = float(training.loss(training.model, batch))
    assert sum(p * c for p, c in zip(parts, counts, strict=True)) / sum(counts) == pytest.approx(whole, rel=1e-5)


def test_targets_have_the_name_that_the_loss_gives_them():
    """Not `self`, of the method of tensors that they went through."""

    def loop(own):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ids, labels = torch.randint(0, V, (2, 3, 8))
        own.append(cross_entropy(model(ids).flatten(0, 1), labels.unflatten(1, (2, 4)).flatten()))
        own[-1].backward()
        optimizer.step()

    assert learnt(loop)[0].micros[0].keys() == {"idx", "target"}


def test_targets_that_were_flattened_keep_their_name_where_time_comes_first():
    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(V, 8), nn.Linear(8, V)

        def forward(self, src):
            return self.head(self.embed(src).cumsum(0)).log_softmax(-1)

    def loop(own):
        model, criterion = Encoder(), nn.NLLLoss()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        whole = torch.randint(0, V, (8, 3))
        x, y = whole[:-1], whole[1:].view(-1)
        criterion(model(x).view(-1, V), y).backward()
        optimizer.step()

    training, *_ = learnt(loop)
    assert {name: list(x.shape) for name, x in training.micros[0].items()} == {"src": [7, 3], "target": [7, 3]}
    report = trainprobe.preflight(training.loss, training.model, training.micros[0], only=["causality", "rows"], seconds=600)
    assert [found.status for found in report.lines] == ["holds", "holds"]


def test_a_compiled_model_is_tested_as_it_is_written():
    def loop(own):
        model = torch.compile(Text(), backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = tokens()
        _, loss = model(x, y)
        loss.backward()
        optimizer.step()

    torch._dynamo.reset()
    training, *_ = learnt(loop)
    assert list(training.micros[0]) == ["idx", "targets"]
    frames = torch._dynamo.utils.counters["frames"]["total"]
    wanted = ["causality", "rows", "gradient", "determinism"]
    report = trainprobe.preflight(training.loss, training.model, training.micros[0], only=wanted, seconds=600)
    assert [found.status for found in report.lines] == ["holds"] * 4, report
    assert torch._dynamo.utils.counters["frames"]["total"] == frames


def test_an_update_that_no_optimizer_makes_ends_it_too():
    training, optimizers, own = learnt(of_no_optimizer)
    assert (len(training.micros), optimizers, own) == (1, [], [])


def accumulated(divisor, uneven=False):
    def loop(own):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(2):
            x, y = tokens()
            if uneven and number:
                y = y.masked_fill(torch.arange(7) > 2, -100)
            loss = cross_entropy(model(x).view(-1, V), y.reshape(-1)) / divisor
            loss.backward()
        optimizer.step()

    return loop


@pytest.mark.parametrize(("divisor", "uneven", "status", "told"), [
    (2, False, "holds", ""), (1.0, False, "BROKEN", "factor 2"), (4, False, "BROKEN", "factor 1/2"),
    (2, True, "BROKEN", "alike"),
])  # fmt: skip
def test_how_a_loop_accumulates(divisor, uneven, status, told):
    training, optimizers, _ = learnt(accumulated(divisor, uneven))
    assert len(training.micros) == 2
    report = trainprobe.preflight(
        training.loss, training.model, joined(training.micros), step=training.step, micro_batches=2, optimizer=optimizers,
        only=["split", "causality"], seconds=600,
    )  # fmt: skip
    split, causality = report.lines
    assert split.status == status and told in split.text, split
    assert causality.status == "holds", causality


def test_what_cannot_be_followed_is_refused():
    def loop(own):
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        Twice.apply(model(torch.randn(3, 4))).sum().backward()
        optimizer.step()

    with pytest.raises(UsageError, match=r"(?s)cannot be made again.*def loss\(model, batch\)"):
        learnt(loop)


def test_torch_is_left_as_it_was():
    before = torch.autograd.backward, torch.nn.Module._call_impl
    learnt(of_model)
    assert (torch.autograd.backward, torch.nn.Module._call_impl) == before
    assert torch.overrides._get_current_function_mode_stack() == []


@pytest.mark.parametrize(("checkpointed", "smoothed"), [(False, 0.0), (True, 0.0), (False, 0.1)])
def test_the_trainer_of_hugging_face(tmp_path, checkpointed, smoothed):
    """Which takes the labels out of the batch where it smooths them."""
    import transformers

    config = transformers.GPT2Config(vocab_size=V, n_embd=8, n_layer=1, n_head=2, n_positions=8, bos_token_id=1, eos_token_id=2)
    rows = [
        {"input_ids": x, "labels": x.masked_fill(torch.arange(8) > 2 + i, -100)}
        for i, x in enumerate(torch.randint(0, V, (4, 8)))
    ]

    def loop(own):
        arguments = transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, report_to="none",
            use_cpu=True, save_strategy="no", disable_tqdm=True, gradient_checkpointing=checkpointed,
            label_smoothing_factor=smoothed,
        )  # fmt: skip
        transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows).train()

    training, optimizers, _ = learnt(loop)
    assert len(training.micros) == 2 and len(optimizers) == 1
    report = trainprobe.preflight(
        training.loss, training.model, joined(training.micros), step=training.step, micro_batches=2, optimizer=optimizers,
        only=["split", "start", "update"], seconds=600,
    )  # fmt: skip
    assert report.broken == [] and report.lines[0].status == "holds", str(report)


def test_lightning():
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = nn.Linear(4, 3)

        def training_step(self, batch, index):
            loss = cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def loop(own):
        data = torch.utils.data.TensorDataset(torch.randn(8, 4), torch.randint(0, 3, (8,)))
        trainer = lightning.Trainer(
            max_steps=1, accelerator="cpu", accumulate_grad_batches=2, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        )  # fmt: skip
        trainer.fit(Module(), torch.utils.data.DataLoader(data, batch_size=4))

    training, optimizers, _ = learnt(loop)
    assert len(training.micros) == 2 and len(optimizers) == 1
    report = trainprobe.preflight(
        training.loss, training.model, joined(training.micros), step=training.step, micro_batches=2, optimizer=optimizers,
        only=["split", "rows", "start", "update"], seconds=600,
    )  # fmt: skip
    assert [line.status for line in report.lines] == ["holds"] * 4, str(report)


SCRIPT = """
import sys, torch, trainprobe
from torch import nn
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=float(sys.argv[1]))
model[2] = nn.Linear(8, 3)
trainprobe.watch(model, optimizer).__enter__()
try:
    for _ in range(3):
        x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
finally:
    open("weights", "w").write("never")
"""


def test_the_command(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [
        sys.executable,
        "-m",
        "trainprobe",
        "preflight",
        "--json",
        "answer.json",
        "--skip",
        "gradient",
        "train.py",
        "0.1",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "start        BROKEN: no optimizer holds 2.weight and 1 more" in done.stdout
    assert done.stdout.splitlines()[-1].startswith("broken: start (1 of ")
    answer = json.loads((tmp_path / "answer.json").read_text())
    jsonschema.validate(answer, SCHEMA)
    assert answer["code"] == 2 and len(answer["properties"]) == 9
    assert sorted(path.name for path in tmp_path.iterdir()) == ["answer.json", "train.py"]


def test_a_module_stands_for_a_script(tmp_path):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "trainprobe", "preflight", "--only", "start", "--", "-m", "package.train", "0.1"]
    tree = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(command, cwd=tmp_path, env=tree, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2, done.stderr
    assert "start        BROKEN: no optimizer holds 2.weight and 1 more" in done.stdout


def test_a_script_that_fails_before_its_first_update(tmp_path):
    (tmp_path / "train.py").write_text("import torch\nprint(1 / 0)")
    command = [sys.executable, "-m", "trainprobe", "preflight", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 3 and "ZeroDivisionError" in done.stderr, done.stderr
    assert "train.py failed without an update" in done.stderr
    assert "guard.py" not in done.stderr and "runpy" not in done.stderr


def test_labels_that_were_written_since_are_taken_as_they_are():
    def loop(own):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, V, (3, 8))
        y = x.clone()
        y[:, 5:] = -100
        loss = cross_entropy(model(x)[:, :-1].flatten(0, 1), y[:, 1:].flatten())
        own.append(loss.detach().clone())
        loss.backward()
        optimizer.step()

    training, _, own = learnt(loop)
    with torch.no_grad():
        assert torch.equal(scalar_of(training.loss(training.model, training.micros[0])), own[0])


def test_a_loss_that_is_another_when_it_is_made_again_is_refused():
    def loop(own):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.randint(0, V, (3, 8))
        logits = model(x)
        logits.detach().numpy()[:] *= 3  # by no function of torch
        cross_entropy(logits[:, :-1].flatten(0, 1), x[:, 1:].flatten()).backward()
        optimizer.step()

    with pytest.raises(UsageError, match="cannot be made again, it is"):
        learnt(loop)


def test_a_pipe_that_nobody_reads_gets_no_other_answer(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = f"{sys.executable} -m trainprobe preflight --only start train.py 0.1 | true"
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert "cannot be run again" not in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_a_backward_of_the_engine_itself_is_seen_as_megatron_makes_it():
    def loop(own):
        model = Text()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = tokens()
        loss = model(x, y)[1]
        own.append(loss.detach().clone())
        engine = torch.autograd.Variable._execution_engine
        given = {"keep_graph": False, "create_graph": False, "inputs": (), "allow_unreachable": True, "accumulate_grad": True}
        engine.run_backward(tensors=(loss,), grad_tensors=(torch.ones_like(loss),), **given)
        optimizer.step()

    before = torch.autograd.Variable._execution_engine
    training, _, own = learnt(loop)
    assert torch.equal(scalar_of(training.loss(training.model, training.micros[0])), own[0])
    assert torch.autograd.Variable._execution_engine is before


def test_an_update_whose_backward_was_not_seen_trains_nothing():
    def loop(own):
        model = nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()  # as what makes the state of an optimizer does
        model.weight.grad = torch.ones(1, 2)
        optimizer.step()

    with pytest.raises(UsageError, match="no backward was seen before the first update"):
        learnt(loop)


def of_critic(own):
    """A critic and a generator, whose update comes later; the loss is a mean over rows of each of two batches."""
    make, judge = (nn.Sequential(nn.Linear(a, 6), nn.ReLU(), nn.Linear(6, b)) for a, b in ((3, 2), (2, 1)))
    later, first = (torch.optim.Adam(net.parameters(), 1e-3) for net in (make, judge))
    real, made = torch.randn(8, 2), make(torch.randn(8, 3))
    loss = softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()
    own.append(loss.item())
    loss.backward()
    first.step()
    later.step()


def of_preferences(own):
    """A loss over two calls of one model, as that of DPO is."""
    model = Text()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    pairs = torch.randint(V, (8, 6))
    chosen, rejected = (model(x).log_softmax(-1)[:, :-1].gather(-1, x[:, 1:, None]).sum((1, 2)) for x in pairs.chunk(2))
    loss = -logsigmoid(chosen - rejected).mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_halves(own):
    """Chosen and rejected texts of one batch, one half behind the other, beside a reference whose scores are of pairs."""
    model, reference = Text(), Text()
    reference.load_state_dict(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    input_ids, attention_mask = torch.randint(V, (8, 6)), torch.ones(8, 6, dtype=torch.long)
    completion_mask = (torch.arange(6) > torch.tensor([1, 2, 3, 2] * 2)[:, None]).long()

    def scored(net):
        each = net(input_ids).log_softmax(-1)[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)
        return (each * (completion_mask * attention_mask)[:, 1:]).sum(1).chunk(2)

    chosen, rejected = scored(model)
    with torch.no_grad():
        base = scored(reference)
    loss = -logsigmoid(chosen - rejected - base[0] + base[1]).mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_triplets(own):
    """Positive and negative texts in one batch, one behind the other, as the triplet loss of sentence-transformers has them."""
    net = nn.Sequential(nn.Embedding(V, 8), nn.Flatten(), nn.Linear(48, 4))
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    anchor, positive, negative = (torch.randint(V, (8, 6)) for _ in range(3))
    near, far = net(torch.cat([positive, negative])).chunk(2)
    loss = ((net(anchor) - near).norm(dim=1) - (net(anchor) - far).norm(dim=1) + 5).relu().mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_experts(own):
    """Experts whose loss has a term of balance over the rows of a micro-batch."""
    import transformers

    sizes = {"vocab_size": V, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "shared_expert_intermediate_size": 8}
    more = {"num_key_value_heads": 2, "output_router_logits": True, "router_aux_loss_coef": 1e-4}
    model = transformers.Qwen2MoeForCausalLM(transformers.Qwen2MoeConfig(**sizes, **experts, **more))
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
    for _ in range(2):
        x = torch.randint(V, (4, 6))
        loss = model(input_ids=x, labels=x).loss / 2
        own.append(loss.item())
        loss.backward()
    optimizer.step()


def of_statistics(own):
    """As ACKTR: a first backward pass is for statistics of the optimizer, and cleared; that optimizer steps another one."""

    class Natural(torch.optim.Optimizer):
        def __init__(self, parameters):
            super().__init__(parameters, {})
            self.inner = torch.optim.SGD(self.param_groups[0]["params"], lr=0.01)

        def step(self, closure=None):
            self.inner.step()

    model = nn.Linear(4, 2)
    optimizer = Natural(model.parameters())
    out = model(torch.randn(6, 4))
    model.zero_grad()
    (out - (out + torch.randn(6, 2)).detach()).square().mean().backward(retain_graph=True)
    optimizer.zero_grad()
    loss = (out - torch.randn(6, 2)).square().mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_two_heads(own):
    """As InfoGAN: the generator's loss reaches one head of the critic; a third optimizer holds both models for another loss."""
    generator, critic, heads = nn.Linear(4, 6), nn.Linear(6, 6), nn.ModuleList([nn.Linear(6, 1), nn.Linear(6, 2)])

    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.heads = critic, heads

        def forward(self, x):
            return [head(self.body(x).relu()) for head in self.heads]

    judge = Critic()
    optimizer = torch.optim.SGD(generator.parameters(), lr=0.01)
    others = [torch.optim.Adam(judge.parameters()), torch.optim.Adam([*judge.parameters(), *generator.parameters()])]
    loss = (judge(generator(torch.randn(6, 4)))[0] - 1).square().mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()
    others.clear()


def of_moved_centre(own):
    """As DINO and MoCo: the pass itself moves the centre of the loss and the momentum encoder, and a queue of it."""

    class Student(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 6), nn.Linear(4, 6).requires_grad_(False)

        def forward(self, x):
            with torch.no_grad():
                self.teacher.weight.data = 0.5 * self.teacher.weight.data + 0.5 * self.student.weight.data
                target = self.teacher(x)
            return self.student(x), target

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("centre", torch.zeros(6))

        def forward(self, student, teacher):
            loss = -((teacher - self.centre).softmax(-1) * student.log_softmax(-1)).sum(-1).mean()
            self.centre = 0.1 * self.centre + 0.9 * 40 * teacher.mean(0)
            return loss

    model, criterion = Student(), Loss()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.01)
    loss = criterion(*model(torch.randn(6, 4)))
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_chosen(own):
    """As C51: numbers read from a shape and numbers of the rows choose the values of the actions, which agents act by, too."""
    net, critic = nn.Linear(3, 2 * 5), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

    def value(x, action):
        shares = net(x).view(len(x), 2, 5).softmax(-1)
        return shares[torch.arange(len(x)), action]

    for _ in range(3):
        value(torch.randn(1, 3), torch.tensor([0]))
    x = torch.randn(6, 3)
    loss = -(torch.rand(6, 5).softmax(-1) * value(x, torch.randint(0, 2, (6,))).log()).sum(-1).mean()
    critic(x).clamp(max=torch.rand(6, 1)).mean()  # is looked at and has no part in the loss
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_teacher(own):
    """As a wrapper for distillation: the teacher is a part of the model, and no optimizer has it."""

    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student, self.teacher = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x, target):
            out = self.student(x)
            with torch.no_grad():
                taught = self.teacher(x).softmax(-1)
            return cross_entropy(out, target) + cross_entropy(out, taught)

    model = Distilled()
    optimizer = torch.optim.SGD(model.student.parameters(), lr=0.1)
    loss = model(torch.randn(6, 4), torch.randint(0, 3, (6,)))
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_actor_and_critic(own):
    """As A2C: the advantage, of which the critic is a part, weighs log-probabilities and is detached."""
    actor, critic = nn.Linear(4, 3), nn.Linear(4, 1)
    optimizer = torch.optim.SGD([*actor.parameters(), *critic.parameters()], lr=0.01)
    x = torch.randn(6, 4)
    policy = torch.distributions.Categorical(logits=actor(x))
    advantage = torch.randn(6, 1) - critic(x)
    scores = policy.log_prob(torch.randint(0, 3, (6,)))
    loss = advantage.square().mean() - (advantage.detach().squeeze(1) * scores).mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_temperature(own):
    """As SAC: the first to step is the optimizer of a temperature, which is no parameter of a model."""
    actor, heat = nn.Linear(4, 2), torch.zeros(1, requires_grad=True)
    optimizers = [torch.optim.Adam([heat], lr=0.01), torch.optim.SGD(actor.parameters(), lr=0.01)]
    chances = actor(torch.randn(6, 4)).log_softmax(1)
    (-heat * (chances + 1).detach()).mean().backward()
    optimizers[0].step()
    optimizers[1].zero_grad()
    loss = actor(torch.randn(6, 4)).square().mean()
    own.append(loss.item())
    loss.backward()
    optimizers[1].step()


def of_views(own):
    """As SupContrast: two views of each picture, one batch behind the other, through batch norm."""
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    one, other = net(torch.cat([torch.randn(6, 4), torch.randn(6, 4)])).chunk(2)
    loss = (nn.functional.cosine_similarity(one, other) - 1).square().mean()
    own.append(loss.item())
    loss.backward()
    optimizer.step()


def of_any_arguments(own, wrapped=False):
    """Positions are one row for all rows of the tokens, as in Megatron-LM: they are no list of samples of other lengths."""

    class Placed(Text):
        def forward(self, *inputs):
            idx, at = inputs
            return self.head(self.embed(idx).cumsum(1) + at[..., None])

    class Named(Text):
        def forward(self, idx, at):
            return self.head(self.embed(idx).cumsum(1) + at[..., None])

    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.module = Named()

        def forward(self, *inputs, **kwargs):
            return self.module(*inputs, **kwargs)

    model = Cast() if wrapped else Placed()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = tokens(4)
    own.append(cross_entropy(model(x, torch.arange(7).view(1, 7)).flatten(0, 1), y.flatten()))
    own[-1].backward()
    optimizer.step()


@pytest.mark.parametrize(("wrapped", "names"), [(False, {"inputs0", "inputs1"}), (True, {"idx", "at"})])
def test_any_number_of_arguments_are_no_list_of_samples(wrapped, names):
    training, optimizers, _ = learnt(lambda own: of_any_arguments(own, wrapped))
    assert training.micros[0].keys() >= names
    report = answers(training, optimizers, only=["split", "causality", "rows"])
    assert [line.status for line in report.lines] == ["holds"] * 3, report


@pytest.mark.parametrize(
    ("loop", "by_design"),
    [
        (of_views, ["split", "rows"]),
        (of_temperature, []),
        (of_chosen, []),
        (of_teacher, []),
        (of_actor_and_critic, ["gradient"]),
        (of_statistics, []),
        (of_moved_centre, []),
        (of_two_heads, []),
        (of_critic, []),
        (of_preferences, []),
        (of_halves, []),
        (of_triplets, []),
        (of_experts, ["split"]),
    ],
)
def test_a_healthy_loop_of_another_form_has_nothing_broken(loop, by_design):
    training, optimizers, _ = learnt(loop)
    report = answers(training, optimizers, seconds=600)
    assert (report.broken, [line.name for line in report.lines if line.status == "by design"]) == ([], by_design), str(report)
    assert not [str(line) for line in report.lines if "could not be tested" in str(line)]
    assert loop is not of_critic or "4 parameters belong to the optimizer of another loss" in str(report)


def test_the_value_of_an_action_is_no_logit_of_a_class():
    """The gradient of a learner of values is negative for the action that was taken and for no other."""

    def loop(own):
        net = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        values = net(torch.randn(8, 4)).gather(1, torch.randint(0, 2, (8, 1)))
        nn.functional.smooth_l1_loss(values, torch.full((8, 1), 50.0)).backward()
        optimizer.step()

    training, optimizers, _ = learnt(loop)
    (start,) = answers(training, optimizers, seconds=600, only=["start"]).lines
    assert start.status == "holds" and "uniform" not in start.text, start


def test_the_models_of_a_loop_have_the_names_of_their_classes():
    training, *_ = learnt(of_two_heads)
    assert [name for name, _ in training.model.named_children()] == ["Linear", "Critic"]


def test_a_word_that_is_no_option_is_not_taken_for_a_launcher():
    with pytest.raises(UsageError, match="--html is no option of `trainprobe preflight`"):
        preflight_script(["--html", "page.html", "train.py"])
