"""Healthy loops of many forms under the default plan: whatever is told of them is a false alarm.

Each function trains once. `plain` is the loop of the README; forms that are no plain loop write their own.
"""

from __future__ import annotations

import copy
import itertools
from collections import deque
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.parts import Block, Causal, Transformer, clusters, convolutions, mlp, pictures, stream, text

Form = Callable[[], None]
HEALTHY: dict[str, Form] = {}


def form(program: Form) -> Form:
    """Enter a program under its name."""
    HEALTHY[program.__name__] = program
    return program


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, loss_of: Callable[[int], Tensor], after: Callable[[int], object] = int
) -> None:
    """Train as the README shows it; `after` runs behind each update."""
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            with probe.step():
                loss = loss_of(step)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                after(step)


def classes(model: nn.Module, draw: torch.Generator, batch: int = 64, **how: float) -> Callable[[int], Tensor]:
    """Return the loss of a classifier of clusters, with a new batch at each step."""

    def loss_of(step: int) -> Tensor:
        x, y = clusters(batch, draw)
        return functional.cross_entropy(model(x), y, **how)

    return loss_of


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    """Return the loss of a language model."""
    return functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@form
def closure_lbfgs() -> None:
    """L-BFGS with a closure, on one batch."""
    model, (x, y) = mlp(12, 16, 5), clusters(128, stream(1))
    optimizer = torch.optim.LBFGS(model.parameters(), 0.1, max_iter=4)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(30):
            with probe.step():

                def closure() -> Tensor:
                    optimizer.zero_grad()
                    loss = functional.cross_entropy(model(x), y)
                    loss.backward()
                    return loss

                probe.note("loss", optimizer.step(closure))


@form
def accumulation() -> None:
    """Four micro-batches an update."""
    model, draw = mlp(12, 32, 5), stream(2)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            with probe.step():
                for i in range(4):
                    probe.moment("micro", i)
                    x, y = clusters(16, draw)
                    (functional.cross_entropy(model(x), y) / 4).backward()
                optimizer.step()
                optimizer.zero_grad()


@form
def accumulation_by_modulo() -> None:
    """An update each fourth batch, where each batch is a step of the loop's own count."""
    model, draw = mlp(12, 32, 5), stream(3)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS // 2):
            with probe.step():
                for i in range(4):
                    x, y = clusters(16, draw)
                    (functional.cross_entropy(model(x), y) / 4).backward()
                    if (i + 1) % 4 == 0:
                        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                        optimizer.step()
                        optimizer.zero_grad(set_to_none=False)


@form
def adversaries_of_one_optimizer_each() -> None:
    """Two networks, of which the generator is watched."""
    generator, critic, draw = mlp(8, 32, 2), mlp(2, 32, 1), stream(4)
    g, d = torch.optim.Adam(generator.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
    with trainprobe.watch(generator, g) as probe:
        for _ in range(STEPS):
            real, noise = torch.randn(64, 2, generator=draw) * 0.2 + 1, torch.randn(64, 8, generator=draw)
            with probe.step():
                d.zero_grad()
                (
                    functional.softplus(-critic(real)).mean() + functional.softplus(critic(generator(noise).detach())).mean()
                ).backward()
                d.step()
                g.zero_grad()
                loss = functional.softplus(-critic(generator(noise))).mean()
                loss.backward()
                g.step()
                probe.note("loss", loss)


@form
def two_optimizers() -> None:
    """One optimizer for matrices and one for vectors."""
    model, draw = mlp(12, 32, 5), stream(5)
    one = torch.optim.SGD([p for p in model.parameters() if p.dim() > 1], 0.05, momentum=0.9)
    two = torch.optim.Adam([p for p in model.parameters() if p.dim() == 1], 3e-3)
    with trainprobe.watch(model, [one, two]) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                one.zero_grad()
                two.zero_grad()
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                one.step()
                two.step()
                probe.note("loss", loss)


@form
def averaged_weights() -> None:
    """An exponential average, and one step in ten is evaluated with it."""
    model, draw = convolutions(), stream(6)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.95))
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)

    def loss_of(step: int) -> Tensor:
        x, y, _ = pictures(16, draw)
        return functional.cross_entropy(model(x), y)

    def after(step: int) -> None:
        average.update_parameters(model)
        if step % 10 == 9:
            with torch.no_grad():
                average(pictures(16, stream(7))[0])

    plain(model, optimizer, loss_of, after)


@form
def stochastic_averages() -> None:
    """SWA: the rate is held from the middle on, and weights are averaged."""
    model, draw = mlp(12, 32, 5), stream(8)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    average, held = torch.optim.swa_utils.AveragedModel(model), torch.optim.swa_utils.SWALR(optimizer, 0.05, anneal_epochs=5)
    decay = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)

    def after(step: int) -> None:
        if step < 40:
            decay.step()
        else:
            average.update_parameters(model)
            held.step()

    plain(model, optimizer, classes(model, draw), after)


@form
def sharpness_aware() -> None:
    """SAM: up along the gradient, a second gradient there, and back."""
    model, draw = mlp(12, 32, 5), stream(9)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                with torch.no_grad():
                    norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
                    ups = [0.05 * p.grad / (norm + 1e-12) for p in model.parameters()]
                    for p, up in zip(model.parameters(), ups, strict=True):
                        p.add_(up)
                optimizer.zero_grad()
                functional.cross_entropy(model(x), y).backward()
                with torch.no_grad():
                    for p, up in zip(model.parameters(), ups, strict=True):
                        p.sub_(up)
                optimizer.step()
                probe.note("loss", loss)


@form
def momentum_contrast() -> None:
    """MoCo: a queue of keys from a slow encoder."""
    query, draw = mlp(12, 32, 16), stream(10)
    key = copy.deepcopy(query).requires_grad_(False)
    queue = functional.normalize(torch.randn(256, 16, generator=draw), dim=1)
    optimizer = torch.optim.SGD(query.parameters(), 0.05, momentum=0.9)

    def loss_of(step: int) -> Tensor:
        nonlocal queue
        x, _ = clusters(32, draw)
        q = functional.normalize(query(x + 0.1 * torch.randn(x.shape, generator=draw)), dim=1)
        with torch.no_grad():
            for slow, fast in zip(key.parameters(), query.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
            k = functional.normalize(key(x), dim=1)
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ queue.T], 1) / 0.2
        queue = torch.cat([k, queue])[:256]
        return functional.cross_entropy(logits, torch.zeros(32, dtype=torch.long))

    plain(query, optimizer, loss_of)


@form
def curriculum() -> None:
    """Rows grow from 4 to 24 tokens."""
    model, draw = Causal(24, 25), stream(11)
    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), lambda step: next_token(model, text(16, 5 + step // 4, 24, draw)))


@form
def mixed_precision() -> None:
    """Autocast to bfloat16."""
    model, draw = Causal(24, 24), stream(12)

    def loss_of(step: int) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return next_token(model, text(16, 25, 24, draw))

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


@form
def scaled_loss() -> None:
    """A gradient scaler, clipping between unscaling and the update."""
    model, draw = mlp(12, 32, 5), stream(13)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), 3e-3), torch.amp.GradScaler("cpu", 1024.0, growth_interval=20)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                probe.note("grad_norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                scaler.step(optimizer)
                scaler.update()
                probe.note("loss", loss)


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(4, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


@form
def low_rank_adapters() -> None:
    """LoRA: adapters that begin at zero, on a frozen model."""
    model, draw = mlp(12, 32, 5), stream(14)
    model[0], model[2] = Adapted(model[0]), Adapted(model[2])
    plain(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2), classes(model, draw))


@form
def frozen_backbone() -> None:
    """Only the head learns; the backbone's statistics stand still."""
    model, draw = convolutions(), stream(15)
    model[0].requires_grad_(False).eval()
    optimizer = torch.optim.Adam(model[1].parameters(), 1e-2)

    def loss_of(step: int) -> Tensor:
        x, y, _ = pictures(16, draw)
        return functional.cross_entropy(model(x), y)

    plain(model, optimizer, loss_of)


@form
def gradual_unfreezing() -> None:
    """The backbone joins at step 30, as a group of its own."""
    model, draw = mlp(12, 32, 5), stream(16)
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model[2].parameters(), 3e-3)

    def after(step: int) -> None:
        if step == 30:
            model[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 1e-3})

    plain(model, optimizer, classes(model, draw), after)


@form
def weights_of_tasks_learned() -> None:
    """Two tasks, weighted by learned uncertainties."""
    draw = stream(17)
    model = nn.ModuleDict({"trunk": mlp(12, 32, 16), "kind": nn.Linear(16, 5), "size": nn.Linear(16, 1)})
    model.register_parameter("uncertainty", nn.Parameter(torch.zeros(2)))

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        seen = torch.relu(model["trunk"](x))
        losses = torch.stack(
            [functional.cross_entropy(model["kind"](seen), y), functional.mse_loss(model["size"](seen).squeeze(1), x[:, 0])]
        )
        return (losses * (-model.uncertainty).exp() + model.uncertainty).sum()

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def truncated_backpropagation() -> None:
    """A recurrent model whose state goes on from window to window, detached."""
    draw = stream(18)
    model = nn.ModuleDict({"tokens": nn.Embedding(24, 16), "rnn": nn.LSTM(16, 32, batch_first=True), "head": nn.Linear(32, 24)})
    ids, state = text(8, STEPS * 10 + 1, 24, draw), None

    def loss_of(step: int) -> Tensor:
        nonlocal state
        part = ids[:, step * 10 : step * 10 + 11]
        seen, state = model["rnn"](model["tokens"](part[:, :-1]), state)
        state = tuple(s.detach() for s in state)
        return functional.cross_entropy(model["head"](seen).flatten(0, 1), part[:, 1:].flatten())

    plain(model, torch.optim.Adam(model.parameters(), 5e-3), loss_of)


@form
def hidden_words() -> None:
    """A masked language model with 80, 10 and 10 % of the hidden tokens masked, replaced and left."""
    model, draw = Transformer(25, 20), stream(19)

    def loss_of(step: int) -> Tensor:
        ids = text(16, 20, 24, draw)
        chosen, kind = torch.rand(ids.shape, generator=draw) < 0.15, torch.rand(ids.shape, generator=draw)
        inputs = torch.where(chosen & (kind < 0.8), 24, ids)
        inputs = torch.where(chosen & (kind > 0.9), torch.randint(1, 24, ids.shape, generator=draw), inputs)
        return functional.cross_entropy(model(inputs).flatten(0, 1), ids.masked_fill(~chosen, -100).flatten())

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


@form
def packed_rows() -> None:
    """Two documents a row, with a mask of blocks and positions that begin again."""
    model, draw = Causal(24, 12), stream(20)
    document = torch.arange(24) // 12
    mask = (document[:, None] == document) & torch.ones(24, 24, dtype=torch.bool).tril()

    def loss_of(step: int) -> Tensor:
        ids = torch.cat([text(8, 12, 24, draw), text(8, 12, 24, draw)], 1)
        labels = ids.roll(-1, 1)
        labels[:, [11, 23]] = -100
        return functional.cross_entropy(model(ids, mask, torch.arange(24) % 12).flatten(0, 1), labels.flatten())

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


@form
def replayed() -> None:
    """DQN with a growing buffer, exploration, and a target that is copied each twenty steps."""
    online, draw = mlp(6, 32, 3), stream(21)
    target = copy.deepcopy(online).requires_grad_(False)
    buffer: deque[tuple[Tensor, int, float, Tensor]] = deque(maxlen=300)
    worth, state = torch.randn(6, 3, generator=stream(22)), torch.randn(6, generator=draw)

    def loss_of(step: int) -> Tensor:
        nonlocal state
        for _ in range(8):
            explores = torch.rand((), generator=draw) < max(0.1, 1 - step / 40)
            with torch.no_grad():
                action = int(torch.randint(0, 3, (), generator=draw)) if explores else int(online(state).argmax())
            following = 0.5 * state + torch.randn(6, generator=draw)
            buffer.append((state, action, float(state @ worth[:, action]), following))
            state = following
        picked = [buffer[int(i)] for i in torch.randint(0, len(buffer), (32,), generator=draw)]
        s, a, r, n = (torch.stack([torch.as_tensor(item[i]) for item in picked]) for i in range(4))
        with torch.no_grad():
            wanted = r + 0.9 * target(n).max(1).values
        return functional.smooth_l1_loss(online(s).gather(1, a[:, None]).squeeze(1), wanted)

    def after(step: int) -> None:
        if step % 20 == 19:
            target.load_state_dict(online.state_dict())

    plain(online, torch.optim.Adam(online.parameters(), 3e-3), loss_of, after)


@form
def clipped_policy() -> None:
    """PPO with an entropy bonus and four mini-batches a rollout."""
    actor, draw = mlp(8, 32, 4, act=nn.Tanh), stream(23)
    worth = torch.randn(8, 4, generator=stream(24))
    optimizer = torch.optim.Adam(actor.parameters(), 3e-3)
    with trainprobe.watch(actor, optimizer) as probe:
        for _ in range(STEPS // 8):
            states = torch.randn(256, 8, generator=draw)
            with torch.no_grad():
                before = actor(states).log_softmax(1)
                actions = torch.multinomial(before.exp(), 1, generator=draw)
            gains = (states @ worth).gather(1, actions).squeeze(1)
            gains = (gains - gains.mean()) / gains.std()
            for part in [*torch.randperm(256, generator=draw).chunk(4), *torch.randperm(256, generator=draw).chunk(4)]:
                with probe.step():
                    logp = actor(states[part]).log_softmax(1)
                    ratio = (logp - before[part]).gather(1, actions[part]).squeeze(1).exp()
                    entropy = -(logp.exp() * logp).sum(1).mean()
                    loss = -torch.min(ratio * gains[part], ratio.clamp(0.8, 1.2) * gains[part]).mean() - 0.01 * entropy
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                    probe.note("loss", loss)
                    probe.note("entropy", entropy)
                    probe.note("kl", (before[part] - logp.detach()).gather(1, actions[part]).mean())


@form
def reinforce_on_policy() -> None:
    """GRPO with one update a rollout: its ratio is one by right."""
    policy, draw = mlp(8, 32, 4), stream(25)
    worth = torch.randn(8, 4, generator=stream(26))
    optimizer = torch.optim.AdamW(policy.parameters(), 3e-3)
    with trainprobe.watch(policy, optimizer) as probe:
        for _ in range(STEPS):
            states = torch.randn(16, 8, generator=draw).repeat_interleave(4, 0)
            with probe.step():
                logp = policy(states).log_softmax(1)
                actions = torch.multinomial(logp.detach().exp(), 1, generator=draw)
                rewards = (states @ worth).gather(1, actions).view(-1, 4)
                gains = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-4)).view(-1)
                own = logp.gather(1, actions).squeeze(1)
                loss = -((own - own.detach()).exp() * gains).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("reward", rewards.mean())


@form
def preferences() -> None:
    """DPO with a frozen reference in evaluation mode."""
    policy, draw = Causal(16, 12), stream(27)
    reference = copy.deepcopy(policy).requires_grad_(False).eval()

    def logp(model: nn.Module, ids: Tensor) -> Tensor:
        return model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)[:, 3:].sum(1)

    def loss_of(step: int) -> Tensor:
        prompt = text(16, 4, 16, draw)
        good, bad = (torch.cat([prompt, torch.randint(low, low + 8, (16, 8), generator=draw)], 1) for low in (0, 8))
        with torch.no_grad():
            base = logp(reference, good) - logp(reference, bad)
        return -functional.logsigmoid(0.1 * (logp(policy, good) - logp(policy, bad) - base)).mean()

    plain(policy, torch.optim.AdamW(policy.parameters(), 1e-3), loss_of)


@form
def velocity_of_diffusion() -> None:
    """Diffusion with v-prediction and min-SNR weights."""
    model, draw = mlp(3, 64, 64, 2, act=nn.SiLU), stream(28)

    def loss_of(step: int) -> Tensor:
        turn, t = 6.28 * torch.rand(64, generator=draw), torch.rand(64, 1, generator=draw)
        x, noise = torch.stack([turn.cos(), turn.sin()], 1), torch.randn(64, 2, generator=draw)
        a, s = (1.57 * t).cos(), (1.57 * t).sin()
        weight = (a.square() / (s.square() + 1e-3)).clamp(max=5) / (a.square() / (s.square() + 1e-3) + 1)
        return (weight * (model(torch.cat([a * x + s * noise, t], 1)) - (a * noise - s * x)).square()).mean()

    plain(model, torch.optim.AdamW(model.parameters(), 2e-3), loss_of)


@form
def flow_matching() -> None:
    """Straight paths from noise to points."""
    model, draw = mlp(3, 64, 2, act=nn.SiLU), stream(29)

    def loss_of(step: int) -> Tensor:
        turn, t = 6.28 * torch.rand(64, generator=draw), torch.rand(64, 1, generator=draw)
        x, noise = torch.stack([turn.cos(), turn.sin()], 1), torch.randn(64, 2, generator=draw)
        return functional.mse_loss(model(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)

    plain(model, torch.optim.Adam(model.parameters(), 2e-3), loss_of)


@form
def variational_autoencoder() -> None:
    """A VAE whose divergence is warmed up."""
    draw = stream(30)
    model = nn.ModuleDict({"encoder": mlp(12, 32, 8), "decoder": mlp(4, 32, 12)})

    def loss_of(step: int) -> Tensor:
        x, _ = clusters(64, draw)
        mean, logvar = model["encoder"](x).chunk(2, 1)
        z = mean + (0.5 * logvar).exp() * torch.randn(mean.shape, generator=draw)
        divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).sum(1).mean()
        return functional.mse_loss(model["decoder"](z), x) + 0.02 * min(1.0, step / 40) * divergence

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


class Coupling(nn.Module):
    """An affine coupling layer."""

    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.flipped, self.net = flipped, mlp(1, 32, 2, act=nn.Tanh)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = x.flip(1).chunk(2, 1) if self.flipped else x.chunk(2, 1)
        shift, scale = self.net(a).chunk(2, 1)
        return torch.cat([a, b * scale.tanh().exp() + shift], 1), scale.tanh().squeeze(1)


@form
def normalising_flow() -> None:
    """Four coupling layers, by likelihood."""
    model, draw = nn.ModuleList(Coupling(bool(i % 2)) for i in range(4)), stream(31)

    def loss_of(step: int) -> Tensor:
        turn = 6.28 * torch.rand(64, generator=draw)
        x, volume = torch.stack([turn.cos(), turn.sin()], 1) + 0.1 * torch.randn(64, 2, generator=draw), torch.zeros(64)
        for layer in model:
            x, here = layer(x)
            volume = volume + here
        return (0.5 * x.square().sum(1) - volume).mean()

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def graph_nodes() -> None:
    """A graph network on the whole graph at every step, trained at a third of the nodes."""
    draw = stream(32)
    x, y = clusters(90, draw, classes=3)
    near = (y[:, None] == y) & (torch.rand(90, 90, generator=draw) < 0.1) | torch.eye(90, dtype=torch.bool)
    mean = near.float() / near.float().sum(1, keepdim=True)
    model = nn.ModuleList([nn.Linear(12, 16), nn.Linear(16, 3)])
    known = torch.arange(90) % 3 == 0

    def loss_of(step: int) -> Tensor:
        return functional.cross_entropy((mean @ model[1](torch.relu(mean @ model[0](x))))[known], y[known])

    plain(model, torch.optim.Adam(model.parameters(), 1e-2, weight_decay=5e-4), loss_of)


@form
def speech_with_lengths() -> None:
    """CTC over frames of unequal lengths."""
    draw, sounds = stream(33), torch.randn(6, 8, generator=stream(34))
    model = nn.ModuleDict({"conv": nn.Conv1d(8, 32, 5, padding=2), "head": nn.Linear(32, 6)})

    def loss_of(step: int) -> Tensor:
        letters, lengths = torch.randint(1, 6, (16, 6), generator=draw), torch.randint(2, 7, (16,), generator=draw)
        frames = sounds[letters].repeat_interleave(4, 1) + 0.3 * torch.randn(16, 24, 8, generator=draw)
        heard = model["head"](torch.relu(model["conv"](frames.transpose(1, 2))).transpose(1, 2)).log_softmax(-1)
        return functional.ctc_loss(heard.transpose(0, 1), letters, 4 * lengths, lengths)

    plain(model, torch.optim.Adam(model.parameters(), 5e-3), loss_of)


@form
def focal_detection() -> None:
    """A heat map with the focal loss."""
    model, draw = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 1, 3, padding=1)), stream(35)
    nn.init.constant_(model[2].bias, -2.0)

    def loss_of(step: int) -> Tensor:
        x, _, mask = pictures(16, draw)
        each = functional.binary_cross_entropy_with_logits(model(x).squeeze(1), mask.float(), reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).sum() / mask.sum()

    plain(model, torch.optim.AdamW(model.parameters(), 5e-3), loss_of)


@form
def triplets() -> None:
    """Metric learning with the hardest negatives of a batch."""
    model, draw = mlp(12, 32, 8), stream(36)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        z = functional.normalize(model(x), dim=1)
        apart, same = torch.cdist(z, z), y[:, None] == y
        return torch.relu((apart * same).max(1).values - (apart + 9 * same).min(1).values + 0.3).mean()

    plain(model, torch.optim.Adam(model.parameters(), 2e-3), loss_of)


@form
def two_views() -> None:
    """SimCLR on one rank, with a learned temperature."""
    draw = stream(37)
    model = nn.ModuleDict({"net": mlp(12, 32, 16)})
    model.register_parameter("temperature", nn.Parameter(torch.tensor(2.0)))

    def loss_of(step: int) -> Tensor:
        x, _ = clusters(32, draw)
        a, b = (functional.normalize(model["net"](x + 0.2 * torch.randn(x.shape, generator=draw)), dim=1) for _ in range(2))
        return functional.cross_entropy(model.temperature.exp() * a @ b.T, torch.arange(32))

    plain(model, torch.optim.AdamW(model.parameters(), 2e-3), loss_of)


@form
def smoothed_labels() -> None:
    """Smoothed labels, and mixup of the inputs."""
    model, draw = mlp(12, 32, 5), stream(38)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        part, order = 0.8, torch.randperm(64, generator=draw)
        said = model(part * x + (1 - part) * x[order])
        losses = [functional.cross_entropy(said, kind, label_smoothing=0.1) for kind in (y, y[order])]
        return part * losses[0] + (1 - part) * losses[1]

    plain(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), loss_of)


@form
def dropout_schedule() -> None:
    """Dropout that fades."""
    drop = nn.Dropout(0.5)
    model, draw = nn.Sequential(nn.Linear(12, 64), nn.ReLU(), drop, nn.Linear(64, 5)), stream(39)

    def after(step: int) -> None:
        drop.p = 0.5 * (1 - step / STEPS)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), classes(model, draw), after)


@form
def tied_weights() -> None:
    """The head is the embedding."""
    model, draw = Causal(24, 24), stream(40)
    model.head.weight = model.tokens.weight
    nn.init.normal_(model.tokens.weight, std=0.1)
    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), lambda step: next_token(model, text(16, 25, 24, draw)))


@form
def distillation() -> None:
    """A student learns the softened outputs of a teacher and the labels."""
    teacher, student, draw = mlp(12, 64, 5).requires_grad_(False).eval(), mlp(12, 16, 5), stream(41)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        said, wanted = student(x), teacher(x)
        soft = functional.kl_div((said / 2).log_softmax(1), (wanted / 2).softmax(1), reduction="batchmean")
        return functional.cross_entropy(said, y) + 4 * soft

    plain(student, torch.optim.Adam(student.parameters(), 3e-3), loss_of)


class Recomputed(nn.Module):
    """A stack of blocks that run again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(24, 32), nn.Linear(32, 24)
        self.blocks = nn.ModuleList(Block(32, dropout=0.1) for _ in range(3))

    def forward(self, ids: Tensor) -> Tensor:
        x, mask = self.tokens(ids), torch.ones(ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
        for block in self.blocks:
            x = checkpoint(block, x, mask, use_reentrant=False)
        return self.head(x)


@form
def recomputed_blocks() -> None:
    """Gradient checkpointing with dropout."""
    model, draw = Recomputed(), stream(42)
    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), lambda step: next_token(model, text(16, 17, 24, draw)))


class ScheduleFree(torch.optim.Optimizer):
    """SGD without a schedule: gradients are taken between an average and the fast weights."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr, "k": 0})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            group["k"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["z"], state["x"] = p.clone(), p.clone()
                state["z"].sub_(p.grad, alpha=group["lr"])
                state["x"].lerp_(state["z"], 1 / group["k"])
                p.copy_(0.1 * state["z"] + 0.9 * state["x"])


@form
def schedule_free() -> None:
    """An optimizer of one's own, whose weights are a mixture of two."""
    model, draw = mlp(12, 32, 5), stream(43)
    plain(model, ScheduleFree(model.parameters(), 0.5), classes(model, draw))


@form
def functional_call() -> None:
    """One inner step of adaptation by torch.func, and the gradient through it."""
    model, draw = mlp(12, 32, 5), stream(44)

    def loss_of(step: int) -> Tensor:
        (x, y), (x2, y2) = clusters(32, draw), clusters(32, draw)
        named = dict(model.named_parameters())
        inner = functional.cross_entropy(torch.func.functional_call(model, named, x), y)
        grads = torch.autograd.grad(inner, list(named.values()), create_graph=True)
        moved = {name: p - 0.1 * grad for (name, p), grad in zip(named.items(), grads, strict=True)}
        return functional.cross_entropy(torch.func.functional_call(model, moved, x2), y2)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def weights_of_samples() -> None:
    """Rare classes weigh more, and each sample has a weight."""
    model, draw = mlp(12, 32, 5), stream(45)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        weight = torch.rand(64, generator=draw)
        each = functional.cross_entropy(model(x), y, weight=torch.tensor([1.0, 1.0, 1.0, 2.0, 4.0]), reduction="none")
        return (weight * each).sum() / weight.sum()

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def sparse_embeddings() -> None:
    """Sparse gradients of an embedding."""
    draw = stream(46)
    model = nn.EmbeddingBag(500, 5, sparse=True)

    def loss_of(step: int) -> Tensor:
        ids = torch.randint(0, 500, (64, 4), generator=draw)
        return functional.cross_entropy(model(ids), ids[:, 0] % 5)

    plain(model, torch.optim.SGD(model.parameters(), 20.0), loss_of)


@form
def gradient_penalty() -> None:
    """A critic with the penalty of Wasserstein's adversaries."""
    critic, draw = mlp(2, 32, 1, act=nn.SiLU), stream(47)

    def loss_of(step: int) -> Tensor:
        real, made = torch.randn(64, 2, generator=draw) + 1, torch.randn(64, 2, generator=draw)
        between = (0.5 * (real + made)).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        return critic(made).mean() - critic(real).mean() + 10 * (slope.norm(dim=1) - 1).square().mean()

    plain(critic, torch.optim.Adam(critic.parameters(), 1e-3), loss_of)


@form
def physics_informed() -> None:
    """A function whose second derivative is given."""
    model, draw = mlp(1, 32, 32, 1, act=nn.Tanh), stream(48)

    def loss_of(step: int) -> Tensor:
        x = torch.rand(64, 1, generator=draw).requires_grad_()
        (first,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), x, create_graph=True)
        ends = model(torch.tensor([[0.0], [1.0]]))
        return (second + 9.87 * (3.1416 * x).sin()).square().mean() / 50 + ends.square().mean()

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def routed_experts() -> None:
    """Top-1 experts with a balance loss; a few of 32 tokens may pass one by."""
    draw = stream(49)
    model = nn.ModuleDict({"router": nn.Linear(12, 4), "experts": nn.ModuleList(mlp(12, 16, 5) for _ in range(4))})

    def loss_of(step: int) -> Tensor:
        x, y = clusters(32, draw)
        share = model["router"](x).softmax(1)
        weight, chosen = share.max(1)
        said = torch.zeros(32, 5)
        for i, expert in enumerate(model["experts"]):
            if (rows := (chosen == i).nonzero().squeeze(1)).numel():
                said = said.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        load = functional.one_hot(chosen, 4).float().mean(0)
        return functional.cross_entropy(said, y) + 0.05 * 4 * (load * share.mean(0)).sum()

    plain(model, torch.optim.AdamW(model.parameters(), 5e-3), loss_of)


@form
def few_shots() -> None:
    """Prototypes of episodes: classes are new in each."""
    model, draw = mlp(12, 32, 16), stream(50)

    def loss_of(step: int) -> Tensor:
        centres = torch.randn(4, 1, 12, generator=draw)
        shots = centres + 0.5 * torch.randn(4, 10, 12, generator=draw)
        z = model(shots)
        return functional.cross_entropy(
            -torch.cdist(z[:, 5:].flatten(0, 1), z[:, :5].mean(1)), torch.arange(4).repeat_interleave(5)
        )

    plain(model, torch.optim.Adam(model.parameters(), 2e-3), loss_of)


@form
def quantised_aware() -> None:
    """Weights are rounded in the forward pass, gradients go straight through."""
    model, draw = mlp(12, 32, 5), stream(51)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        rounded = {name: p + ((p * 16).round() / 16 - p).detach() for name, p in model.named_parameters()}
        return functional.cross_entropy(torch.func.functional_call(model, rounded, x), y)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def adversarial_training() -> None:
    """Inputs are moved along the sign of their gradient first."""
    model, draw = mlp(12, 32, 5), stream(52)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        x.requires_grad_()
        (grad,) = torch.autograd.grad(functional.cross_entropy(model(x), y), x)
        return functional.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def energy_based() -> None:
    """Samples by Langevin steps from a buffer, against data."""
    model, draw = mlp(2, 32, 1, act=nn.SiLU), stream(53)
    kept = torch.randn(64, 2, generator=draw)

    def loss_of(step: int) -> Tensor:
        nonlocal kept
        x = kept.clone()
        for _ in range(5):
            x.requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x)
            x = (x - 0.1 * grad + 0.05 * torch.randn(64, 2, generator=draw)).detach()
        kept = x
        real, low = model(torch.randn(64, 2, generator=draw) * 0.3 + 1), model(x)
        return real.mean() - low.mean() + 0.1 * (real.square() + low.square()).mean()

    plain(model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)


@form
def bootstrapped_views() -> None:
    """BYOL: a predictor and a slow target, no negatives."""
    draw = stream(54)
    online = nn.ModuleDict({"net": mlp(12, 32, 16), "predictor": mlp(16, 32, 16)})
    target = copy.deepcopy(online["net"]).requires_grad_(False)

    def loss_of(step: int) -> Tensor:
        x, _ = clusters(64, draw)
        a, b = (x + 0.2 * torch.randn(x.shape, generator=draw) for _ in range(2))
        total = torch.zeros(())
        for one, other in ((a, b), (b, a)):
            said = functional.normalize(online["predictor"](online["net"](one)), dim=1)
            total = total + 2 - 2 * (said * functional.normalize(target(other), dim=1)).sum(1).mean()
        return total

    def after(step: int) -> None:
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), online["net"].parameters(), strict=True):
                slow.lerp_(fast, 0.02)

    plain(online, torch.optim.AdamW(online.parameters(), 2e-3), loss_of, after)


@form
def cycle_of_rates() -> None:
    """One cycle of rate and momentum, stepped by batch."""
    model, draw = mlp(12, 32, 5), stream(55)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=STEPS + 1)
    plain(model, optimizer, classes(model, draw), lambda step: cycle.step())


@form
def evaluated_between() -> None:
    """Epochs with an evaluation and a restored best state."""
    model, draw = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 5)), stream(56)
    best: dict[str, object] = {"loss": 9.0, "state": None}

    def after(step: int) -> None:
        if step % 20 == 19:
            model.eval()
            with torch.no_grad():
                x, y = clusters(128, stream(57))
                loss = float(functional.cross_entropy(model(x), y))
            if loss < best["loss"]:
                best.update(loss=loss, state=copy.deepcopy(model.state_dict()))
            model.train()

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), classes(model, draw), after)


@form
def known_by_heart() -> None:
    """A probe that the model can learn: one batch until its loss is zero."""
    model, (x, y) = mlp(12, 64, 5), clusters(16, stream(58))
    plain(model, torch.optim.Adam(model.parameters(), 1e-2), lambda step: functional.cross_entropy(model(x), y))


@form
def gradients_projected() -> None:
    """Of two tasks, what conflicts is projected away before the update."""
    model, draw = mlp(12, 32, 6), stream(59)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                said = model(x)
                losses = functional.cross_entropy(said[:, :5], y), functional.mse_loss(said[:, 5], x[:, 0])
                one, two = (torch.autograd.grad(loss, list(model.parameters()), retain_graph=True) for loss in losses)
                dot, norm = sum((a * b).sum() for a, b in zip(one, two, strict=True)), sum(b.square().sum() for b in two)
                for p, a, b in zip(model.parameters(), one, two, strict=True):
                    p.grad = a + b - (dot / norm).clamp(max=0) * b
                optimizer.step()
                probe.note("loss", losses[0] + losses[1])


@form
def gradients_with_noise() -> None:
    """Gradients are clipped by sample and noised, as for private training."""
    model, draw = mlp(12, 16, 5), stream(60)
    optimizer = torch.optim.SGD(model.parameters(), 0.2)

    def each(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(torch.func.functional_call(model, params, x[None]), y[None])

    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                grads = torch.func.vmap(torch.func.grad(each), (None, 0, 0))(dict(model.named_parameters()), x, y)
                norms = torch.stack([grad.flatten(1).norm(dim=1) for grad in grads.values()]).norm(dim=0)
                scale = (1.0 / norms).clamp(max=1.0)
                for name, p in model.named_parameters():
                    summed = torch.einsum("i,i...->...", scale, grads[name])
                    p.grad = (summed + 0.1 * torch.randn(p.shape, generator=draw)) / 32
                optimizer.step()


@form
def seen_in_a_circle() -> None:
    """Four batches in a circle, as a small data set in its order."""
    model, draw = mlp(12, 32, 5), stream(61)
    batches = itertools.cycle([clusters(32, draw) for _ in range(4)])

    def loss_of(step: int) -> Tensor:
        x, y = next(batches)
        return functional.cross_entropy(model(x), y)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def double_precision() -> None:
    """Everything in float64."""
    model, draw = mlp(12, 32, 5).double(), stream(62)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        return functional.cross_entropy(model(x.double()), y)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def half_weights_with_masters() -> None:
    """bfloat16 weights, float32 masters by hand."""
    model, draw = mlp(12, 32, 5).bfloat16(), stream(63)
    masters = [p.detach().float().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.Adam(masters, 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x.bfloat16()).float(), y)
                model.zero_grad()
                loss.backward()
                for master, p in zip(masters, model.parameters(), strict=True):
                    master.grad = p.grad.float()
                optimizer.step()
                with torch.no_grad():
                    for master, p in zip(masters, model.parameters(), strict=True):
                        p.copy_(master)
                probe.note("loss", loss)


@form
def random_depth() -> None:
    """Blocks are left out at random."""
    draw = stream(64)
    model = nn.ModuleDict(
        {"enter": nn.Linear(12, 32), "leave": nn.Linear(32, 5), "blocks": nn.ModuleList(mlp(32, 32, 32) for _ in range(4))}
    )

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        x = model["enter"](x)
        for block in model["blocks"]:
            if torch.rand((), generator=draw) < 0.7:
                x = x + block(x)
        return functional.cross_entropy(model["leave"](x), y)

    plain(model, torch.optim.AdamW(model.parameters(), 2e-3), loss_of)


@form
def quantised_codes() -> None:
    """A VQ-VAE whose codebook moves by averages, without a gradient."""
    draw = stream(65)
    model = nn.ModuleDict({"encoder": mlp(12, 32, 8), "decoder": mlp(8, 32, 12)})
    model.register_buffer("codes", torch.randn(16, 8, generator=draw))

    def loss_of(step: int) -> Tensor:
        x, _ = clusters(64, draw)
        z = model["encoder"](x)
        with torch.no_grad():
            nearest = torch.cdist(z, model.codes).argmin(1)
            for code in nearest.unique():
                model.codes[code].lerp_(z[nearest == code].mean(0), 0.1)
        q = model.codes[nearest]
        return functional.mse_loss(model["decoder"](z + (q - z).detach()), x) + 0.25 * functional.mse_loss(z, q)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)
