"""More healthy loops, of forms that `healthy.py` lacks: whatever is told of them is a false alarm, too."""

from __future__ import annotations

import copy
import math
from collections import deque

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import trainprobe
from benchmarks.sight.case import STEPS
from benchmarks.sight.healthy import HEALTHY, classes, form, next_token, plain
from benchmarks.sight.parts import Causal, Transformer, causal, clusters, convolutions, mlp, pictures, stream, text

__all__ = ["HEALTHY"]  # those of both files

# ---- adversaries and generators --------------------------------------------------------------------------------------


@form
def clipped_critic() -> None:
    """A Wasserstein critic that takes three steps for one of the generator, its weights clamped."""
    draw, maker, critic = stream(200), mlp(4, 32, 2), mlp(2, 32, 1)
    slow, fast = torch.optim.RMSprop(maker.parameters(), 5e-4), torch.optim.RMSprop(critic.parameters(), 5e-4)
    model = nn.ModuleDict({"maker": maker, "critic": critic})
    with trainprobe.watch(model, [slow, fast]) as probe:
        for step in range(STEPS):
            real = torch.randn(64, 2, generator=draw) * torch.tensor([1.0, 0.3])
            with probe.step():
                made = maker(torch.randn(64, 4, generator=draw))
                fast.zero_grad()
                loss = critic(made.detach()).mean() - critic(real).mean()
                loss.backward()
                fast.step()
                with torch.no_grad():
                    for p in critic.parameters():
                        p.clamp_(-0.05, 0.05)
                if step % 3 == 2:
                    slow.zero_grad()
                    (-critic(made).mean()).backward()
                    slow.step()
                probe.note("critic_loss", loss)


@form
def hinge_with_spectral_norm() -> None:
    """Spectrally normalised discriminator, hinge losses, two optimizers with other betas."""
    draw, maker = stream(201), mlp(4, 32, 2)
    judge = nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(2, 32)), nn.LeakyReLU(0.2), parametrizations.spectral_norm(nn.Linear(32, 1))
    )
    g = torch.optim.Adam(maker.parameters(), 1e-3, (0.0, 0.9))
    d = torch.optim.Adam(judge.parameters(), 4e-3, (0.0, 0.9))
    with trainprobe.watch([maker, judge], [g, d]) as probe:
        for _ in range(STEPS):
            real, noise = 0.5 * torch.randn(64, 2, generator=draw) + 1, torch.randn(64, 4, generator=draw)
            with probe.step():
                d.zero_grad(set_to_none=True)
                d_loss = torch.relu(1 - judge(real)).mean() + torch.relu(1 + judge(maker(noise).detach())).mean()
                d_loss.backward()
                d.step()
                g.zero_grad(set_to_none=True)
                g_loss = -judge(maker(noise)).mean()
                g_loss.backward()
                g.step()
                probe.note("d_loss", d_loss)
                probe.note("g_loss", g_loss)


@form
def noise_with_guidance() -> None:
    """Predicts noise, with conditions dropped now and then, and an average of the weights kept as a dict."""
    draw, net = stream(202), mlp(2 + 1 + 6, 48, 2)
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3)
    average = {name: p.detach().clone() for name, p in net.named_parameters()}
    noise_left = torch.linspace(1, 0.02, 100).cumprod(0)
    with trainprobe.watch(net, optimizer) as probe:
        for _ in range(STEPS):
            kind = torch.randint(0, 5, (128,), generator=draw)
            x = torch.stack([kind.float().cos(), kind.float().sin()], 1) + 0.1 * torch.randn(128, 2, generator=draw)
            t, noise = torch.randint(0, 100, (128,), generator=draw), torch.randn(128, 2, generator=draw)
            kind = torch.where(torch.rand(128, generator=draw) < 0.1, 5, kind)
            a = noise_left[t][:, None]
            with probe.step():
                given = [a.sqrt() * x + (1 - a).sqrt() * noise, t[:, None] / 100, functional.one_hot(kind, 6).float()]
                loss = functional.mse_loss(net(torch.cat(given, 1)), noise)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                with torch.no_grad():
                    for name, p in net.named_parameters():
                        average[name].lerp_(p, 0.02)
                probe.note("loss", loss)


@form
def student_of_fewer_steps() -> None:
    """A denoiser learns to do in one step what its frozen teacher does in two."""
    draw, teacher = stream(203), mlp(3, 32, 2)
    student = copy.deepcopy(teacher)
    teacher.requires_grad_(False).eval()

    def move(net: nn.Module, x: Tensor, at: float, size: float) -> Tensor:
        return x + size * net(torch.cat([x, torch.full((len(x), 1), at)], 1))

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 2, generator=draw)
        with torch.no_grad():
            target = move(teacher, move(teacher, x, 0.0, 0.5), 0.5, 0.5)
        return functional.mse_loss(move(student, x, 0.0, 1.0), target)

    plain(student, torch.optim.Adam(student.parameters(), 2e-3), loss_of)


@form
def masked_patches() -> None:
    """A masked autoencoder: three of four patches are left out and painted."""
    draw, width = stream(204), 32
    model = nn.ModuleDict({"into": nn.Linear(48, width), "body": mlp(width, 64, width), "out": nn.Linear(width, 48)})
    model.register_parameter("blank", nn.Parameter(0.02 * torch.randn(width)))

    def loss_of(step: int) -> Tensor:
        x, _, _ = pictures(16, draw)
        patches = functional.unfold(x, 4, stride=4).transpose(1, 2)
        hidden = torch.rand(patches.shape[:2], generator=draw) < 0.7
        seen = torch.where(hidden[..., None], model.get_parameter("blank"), model["into"](patches))
        said = model["out"](model["body"](seen + seen.mean(1, keepdim=True)))
        return ((said - patches).square().mean(-1) * hidden).sum() / hidden.sum()

    plain(model, torch.optim.AdamW(model.parameters(), 2e-3), loss_of)


# ---- representations -------------------------------------------------------------------------------------------------


@form
def cross_correlation_of_views() -> None:
    """Barlow Twins: the correlations of two views are to be the identity."""
    draw, net = stream(205), nn.Sequential(nn.Linear(12, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 8))

    def loss_of(step: int) -> Tensor:
        x, _ = clusters(128, draw)
        a, b = (net(x + 0.2 * torch.randn(x.shape, generator=draw)) for _ in range(2))
        a, b = ((z - z.mean(0)) / (z.std(0) + 1e-4) for z in (a, b))
        c = a.T @ b / len(x)
        return (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()

    plain(net, torch.optim.SGD(net.parameters(), 0.02, momentum=0.9), loss_of)


@form
def variance_and_covariance() -> None:
    """VICReg, with each part of the loss on record."""
    draw, net = stream(206), mlp(12, 48, 16)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    with trainprobe.watch(net, optimizer) as probe:
        for _ in range(STEPS):
            x, _ = clusters(96, draw)
            with probe.step():
                a, b = net(x), net(x + 0.3 * torch.randn(x.shape, generator=draw))
                alike = functional.mse_loss(a, b)
                spread = sum(torch.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() for z in (a, b))
                mixed = sum((z.T.cov() - torch.diag(z.var(0))).square().sum() / 16 for z in (a, b))
                loss = 25 * alike + 25 * spread + mixed
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for name, part in (("invariance", alike), ("variance", spread), ("covariance", mixed)):
                    probe.note(name, part)


@form
def prototypes_swapped() -> None:
    """SwAV: codes of one view by Sinkhorn without gradients, guessed from the other; prototypes on the sphere."""
    draw, net, codes = stream(207), mlp(12, 48, 16), nn.Linear(16, 10, bias=False)
    model = nn.ModuleDict({"net": net, "codes": codes})

    def balanced(scores: Tensor) -> Tensor:
        q = (scores / 0.1).exp().T
        for _ in range(3):
            q = q / q.sum(1, keepdim=True) / 10
            q = q / q.sum(0, keepdim=True) / q.shape[1]
        return (q * q.shape[1]).T

    def loss_of(step: int) -> Tensor:
        with torch.no_grad():
            codes.weight.copy_(functional.normalize(codes.weight, dim=1))
        x, _ = clusters(64, draw)
        a, b = (codes(functional.normalize(net(x + 0.2 * torch.randn(x.shape, generator=draw)), dim=1)) for _ in range(2))
        with torch.no_grad():
            qa, qb = balanced(a), balanced(b)
        return -((qa * (b / 0.1).log_softmax(1)).sum(1) + (qb * (a / 0.1).log_softmax(1)).sum(1)).mean() / 2

    plain(model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)


@form
def future_from_context() -> None:
    """Contrastive predictive coding: the state tells the frame two places ahead from those of other rows."""
    draw = stream(208)
    model = nn.ModuleDict({"enter": nn.Linear(6, 16), "state": nn.GRU(16, 24, batch_first=True), "guess": nn.Linear(24, 16)})
    turn = torch.linalg.qr(torch.randn(6, 6, generator=draw))[0]

    def loss_of(step: int) -> Tensor:
        x = [torch.randn(32, 6, generator=draw)]
        for _ in range(11):
            x.append(x[-1] @ turn + 0.1 * torch.randn(32, 6, generator=draw))
        z = model["enter"](torch.stack(x, 1))
        guess = model["guess"](model["state"](z)[0][:, 4])
        return functional.cross_entropy(guess @ z[:, 6].T, torch.arange(32))

    plain(model, torch.optim.Adam(model.parameters(), 2e-3), loss_of)


@form
def margin_on_the_sphere() -> None:
    """ArcFace: an angular margin on the right class."""
    draw, net, centres = stream(209), mlp(12, 48, 16), nn.Parameter(torch.randn(5, 16))
    model = nn.ModuleDict({"net": net})
    model.register_parameter("centres", centres)

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        cos = functional.normalize(net(x), dim=1) @ functional.normalize(centres, dim=1).T
        angle = cos.clamp(-1 + 1e-6, 1 - 1e-6).acos()
        right = functional.one_hot(y, 5).bool()
        return functional.cross_entropy(8 * torch.where(right, (angle + 0.2).cos(), cos), y)

    plain(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, weight_decay=5e-4), loss_of)


@form
def words_and_negatives() -> None:
    """Word vectors from sampled negatives, in two embeddings."""
    draw = stream(210)
    model = nn.ModuleDict({"centre": nn.Embedding(60, 12), "around": nn.Embedding(60, 12)})

    def loss_of(step: int) -> Tensor:
        centre = torch.randint(0, 60, (128,), generator=draw)
        around = (centre + torch.randint(1, 4, (128,), generator=draw)) % 60
        others = torch.randint(0, 60, (128, 5), generator=draw)
        c = model["centre"](centre)
        good = functional.logsigmoid((c * model["around"](around)).sum(1))
        bad = functional.logsigmoid(-(model["around"](others) @ c[:, :, None]).squeeze(2)).sum(1)
        return -(good + bad).mean()

    plain(model, torch.optim.Adagrad(model.parameters(), 0.3), loss_of)


@form
def ranked_items() -> None:
    """Bayesian personalised ranking of items by users, one factor table at a time."""
    draw = stream(211)
    model = nn.ModuleDict({"user": nn.Embedding(40, 8), "item": nn.Embedding(50, 8)})
    likes = torch.randn(40, 50, generator=draw)
    u, v = torch.optim.Adam(model["user"].parameters(), 0.02), torch.optim.Adam(model["item"].parameters(), 0.02)
    with trainprobe.watch(model, [u, v]) as probe:
        for step in range(STEPS):
            user, a, b = (torch.randint(0, n, (256,), generator=draw) for n in (40, 50, 50))
            better = likes[user, a] > likes[user, b]
            a, b = torch.where(better, a, b), torch.where(better, b, a)
            with probe.step():
                gap = (model["user"](user) * (model["item"](a) - model["item"](b))).sum(1)
                loss = -functional.logsigmoid(gap).mean()
                model.zero_grad()
                loss.backward()
                (u if step % 2 else v).step()
                probe.note("loss", loss)


# ---- pictures and sounds ---------------------------------------------------------------------------------------------


@form
def mixed_pairs() -> None:
    """Mixup: pictures are blended, and so are the losses of their labels."""
    draw, model = stream(212), convolutions()

    def loss_of(step: int) -> Tensor:
        x, y, _ = pictures(32, draw)
        order, share = torch.randperm(32, generator=draw), float(torch.rand((), generator=draw))
        out = model(share * x + (1 - share) * x[order])
        return share * functional.cross_entropy(out, y) + (1 - share) * functional.cross_entropy(out, y[order])

    plain(model, torch.optim.SGD(model.parameters(), 0.05, momentum=0.9, nesterov=True), loss_of)


@form
def pasted_patches() -> None:
    """CutMix with soft labels."""
    draw, model = stream(213), convolutions()

    def loss_of(step: int) -> Tensor:
        x, y, _ = pictures(32, draw)
        order = torch.randperm(32, generator=draw)
        size = int(torch.randint(2, 8, (), generator=draw))
        x = x.clone()
        x[:, :, :size, :size] = x[order, :, :size, :size]
        soft = functional.one_hot(y, 4).float()
        share = size * size / 144
        return functional.cross_entropy(model(x), (1 - share) * soft + share * soft[order])

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


@form
def growing_pictures() -> None:
    """Progressive resizing: small pictures first."""
    draw, model = stream(214), convolutions()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=STEPS)

    def loss_of(step: int) -> Tensor:
        x, y, _ = pictures(24, draw)
        return functional.cross_entropy(model(functional.interpolate(x, size=6 + 2 * (step // 20))), y)

    plain(model, optimizer, loss_of, lambda step: schedule.step())


@form
def weak_and_strong() -> None:
    """FixMatch: confident guesses on weakly changed pictures are labels of strongly changed ones."""
    draw, model = stream(215), convolutions()
    optimizer = torch.optim.SGD(model.parameters(), 0.03, momentum=0.9)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y, _ = pictures(16, draw)
            more, _, _ = pictures(32, draw)
            with probe.step():
                weak, strong = more.flip(3), more + 0.5 * torch.randn(more.shape, generator=draw)
                named, loose, hard = model(torch.cat([x, weak, strong])).split([16, 32, 32])
                sure, guess = loose.detach().softmax(1).max(1)
                unsupervised = (functional.cross_entropy(hard, guess, reduction="none") * (sure > 0.8)).mean()
                loss = functional.cross_entropy(named, y) + unsupervised
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("sure", (sure > 0.8).float().mean())


@form
def taught_by_each_other() -> None:
    """Co-teaching: each of two networks learns from the samples that the other finds easy."""
    draw, a, b = stream(216), mlp(12, 48, 5), mlp(12, 48, 5)
    optimizer = torch.optim.Adam([*a.parameters(), *b.parameters()], 2e-3)
    with trainprobe.watch(nn.ModuleList([a, b]), optimizer) as probe:
        for step in range(STEPS):
            x, y = clusters(96, draw)
            wrong = torch.rand(96, generator=draw) < 0.2
            y = torch.where(wrong, torch.randint(0, 5, (96,), generator=draw), y)
            kept = 96 - min(20, step)
            with probe.step():
                la, lb = (functional.cross_entropy(net(x), y, reduction="none") for net in (a, b))
                easy_a, easy_b = la.detach().argsort()[:kept], lb.detach().argsort()[:kept]
                loss = la[easy_b].mean() + lb[easy_a].mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)


@form
def dice_and_classes() -> None:
    """Segmentation by cross entropy and overlap, with a border that does not count."""
    draw = stream(217)
    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.SiLU(), nn.Conv2d(16, 5, 3, padding=1))

    def loss_of(step: int) -> Tensor:
        x, y, mask = pictures(16, draw)
        target = torch.where(mask, y[:, None, None] + 1, 0)
        target[:, :, [0, -1]] = 255
        logits = model(x)
        counted = (target != 255)[:, None]
        share = logits.softmax(1) * counted
        wanted = functional.one_hot(target.clamp(max=4), 5).movedim(-1, 1) * counted
        overlap = 2 * (share * wanted).sum((0, 2, 3)) / (share + wanted).sum((0, 2, 3)).clamp(min=1)
        return functional.cross_entropy(logits, target, ignore_index=255) + 1 - overlap.mean()

    plain(model, torch.optim.AdamW(model.parameters(), 5e-3), loss_of)


@form
def anchors_and_hard_negatives() -> None:
    """Boxes at anchors that overlap a square; three negatives for each positive, the hardest."""
    draw = stream(218)
    body = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 32, 4, 2, 1), nn.ReLU())
    model = nn.ModuleDict({"body": body, "kind": nn.Conv2d(32, 5, 1), "box": nn.Conv2d(32, 2, 1)})
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    centres = torch.stack(torch.meshgrid(torch.arange(6) * 2 + 1, torch.arange(6) * 2 + 1, indexing="ij"), -1).view(36, 2)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y, mask = pictures(16, draw)
            at = torch.stack([mask.any(2).float().argmax(1), mask.any(1).float().argmax(1)], 1) + 2
            offset = (at[:, None] - centres).float()
            near = offset.abs().amax(2) <= 1
            with probe.step():
                seen = model["body"](x)
                kinds, boxes = model["kind"](seen).flatten(2).mT, model["box"](seen).flatten(2).mT
                target = torch.where(near, y[:, None] + 1, 0)
                losses = functional.cross_entropy(kinds.flatten(0, 1), target.flatten(), reduction="none").view(16, 36)
                rank = losses.detach().masked_fill(near, -1).argsort(1, descending=True).argsort(1)
                counted = near | (rank < 3 * near.sum(1, keepdim=True))
                kind_loss = (losses * counted).sum() / near.sum().clamp(min=1)
                box_loss = functional.smooth_l1_loss(boxes[near], offset[near])
                loss = kind_loss + box_loss
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("kind_loss", kind_loss.item())
                probe.note("box_loss", box_loss.item())


@form
def larger_pictures() -> None:
    """Super-resolution with a frozen network that compares features."""
    draw, frozen = stream(219), convolutions()[0].eval().requires_grad_(False)
    model = nn.Sequential(nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 12, 3, padding=1), nn.PixelShuffle(2))

    def loss_of(step: int) -> Tensor:
        x, _, _ = pictures(16, draw)
        said = model(functional.avg_pool2d(x, 2))
        return functional.l1_loss(said, x) + 0.1 * functional.mse_loss(frozen(said), frozen(x))

    plain(model, torch.optim.Adam(model.parameters(), 2e-3), loss_of)


@form
def letters_two_ways() -> None:
    """Speech by CTC and by attention together, with lengths."""
    draw = stream(220)
    model = nn.ModuleDict(
        {
            "hear": nn.GRU(8, 24, batch_first=True, bidirectional=True),
            "letters": nn.Linear(48, 8),
            "said": nn.Embedding(8, 24),
            "speak": nn.GRU(24, 48, batch_first=True),
            "out": nn.Linear(96, 8),
        }
    )
    sounds = torch.randn(8, 8, generator=draw)

    def loss_of(step: int) -> Tensor:
        lengths = torch.randint(2, 6, (16,), generator=draw)
        letters = torch.randint(2, 8, (16, 5), generator=draw)
        at = torch.arange(5)
        letters = letters.masked_fill(at >= lengths[:, None], 1)
        frames = sounds[letters].repeat_interleave(3, 1) + 0.2 * torch.randn(16, 15, 8, generator=draw)
        frames = frames * (torch.arange(15) < 3 * lengths[:, None])[:, :, None]
        heard, _ = model["hear"](frames)
        ctc = functional.ctc_loss(model["letters"](heard).log_softmax(-1).transpose(0, 1), letters, 3 * lengths, lengths)
        state, _ = model["speak"](model["said"](torch.cat([torch.ones(16, 1, dtype=torch.long), letters[:, :-1]], 1)))
        scores = (state @ heard.mT).masked_fill(torch.arange(15) >= 3 * lengths[:, None, None], -1e4)
        logits = model["out"](torch.cat([state, scores.softmax(-1) @ heard], -1))
        spoken = functional.cross_entropy(logits.flatten(0, 1), letters.flatten(), ignore_index=1)
        return 0.3 * ctc + 0.7 * spoken

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


# ---- optimizers of one's own -----------------------------------------------------------------------------------------


class ShortStates(torch.optim.Optimizer):
    """AdamW whose moments are bfloat16, rounded at random."""

    def __init__(self, params: object, lr: float, eight_bits: bool = False) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99)})
        self.eight_bits, self.draw = eight_bits, stream(99)

    def _kept(self, t: Tensor) -> object:
        if self.eight_bits:
            scale = t.abs().max().clamp(min=1e-12) / 127
            return (t / scale).round().to(torch.int8), scale
        bits = t.view(torch.int32) + torch.randint(0, 1 << 16, t.shape, generator=self.draw, dtype=torch.int32)
        return (bits & -(1 << 16)).view(torch.float32).bfloat16()

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            a, b = group["betas"]
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                n = state["step"] = state.get("step", 0) + 1
                was = [state.get(key) for key in ("momentum", "scale_of_gradient")]
                m, v = (torch.zeros_like(p) if x is None else x[0] * x[1] if isinstance(x, tuple) else x.float() for x in was)
                m, v = m.lerp(p.grad, 1 - a), v.lerp(p.grad.abs(), 1 - b)
                state["momentum"], state["scale_of_gradient"] = self._kept(m), self._kept(v)
                p.sub_(group["lr"] * (m / (1 - a**n)) / (v / (1 - b**n) + 1e-6).clamp(min=1e-4))


@form
def states_of_bfloat16() -> None:
    """An optimizer whose states are bfloat16."""
    model = mlp(12, 48, 5)
    plain(model, ShortStates(model.parameters(), 1e-3), classes(model, stream(221)))


@form
def states_of_eight_bits() -> None:
    """An optimizer whose states are bytes with a scale."""
    model = mlp(12, 48, 5)
    plain(model, ShortStates(model.parameters(), 1e-3, eight_bits=True), classes(model, stream(222)))


class Orthogonal(torch.optim.Optimizer):
    """Muon: the momentum of a matrix, made orthogonal."""

    def __init__(self, params: object, lr: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": 0.9})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                speed = self.state[p].setdefault("speed", torch.zeros_like(p))
                speed.mul_(group["momentum"]).add_(p.grad)
                x = speed / (speed.norm() + 1e-7)
                for _ in range(5):
                    x = 1.5 * x - 0.5 * x @ x.T @ x
                p.sub_(group["lr"] * x)


@form
def orthogonal_updates() -> None:
    """Muon for the matrices of the blocks, AdamW for the rest."""
    draw, model = stream(223), Causal(24, 16)
    hidden = {name for name, p in model.named_parameters() if p.dim() == 2 and "blocks" in name}
    muon = Orthogonal([p for name, p in model.named_parameters() if name in hidden], 0.01)
    adam = torch.optim.AdamW([p for name, p in model.named_parameters() if name not in hidden], 3e-3)
    with trainprobe.watch(model, [muon, adam]) as probe:
        for _ in range(STEPS):
            ids = text(8, 17, 24, draw)
            with probe.step():
                loss = next_token(model, ids)
                model.zero_grad()
                loss.backward()
                muon.step()
                adam.step()
                probe.note("loss", loss)


@form
def signs_alone() -> None:
    """Gradients are replaced by their signs before SGD."""
    draw, model = stream(224), mlp(12, 48, 5)
    optimizer = torch.optim.SGD(model.parameters(), 2e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                for p in model.parameters():
                    p.grad.sign_()
                optimizer.step()
                probe.note("loss", loss)


@form
def updates_within_the_pass() -> None:
    """Each parameter has an optimizer of its own, which steps as its gradient is there."""
    draw, model = stream(225), mlp(12, 48, 48, 5)
    each = {p: torch.optim.SGD([p], 0.05, momentum=0.9) for p in model.parameters()}

    def apply(p: Tensor) -> None:
        each[p].step()
        each[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(apply)
    with trainprobe.watch(model, list(each.values())) as probe:
        for _ in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                loss.backward()
                probe.note("loss", loss)


@form
def centred_gradients() -> None:
    """Hooks on the weights centre their gradients."""
    model = mlp(12, 48, 5)
    for p in model.parameters():
        if p.dim() > 1:
            p.register_hook(lambda g: g - g.mean(1, keepdim=True))
    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), classes(model, stream(226)))


@form
def variance_reduced() -> None:
    """SVRG: the gradient at an anchor is taken off, and that of a large batch is added."""
    draw, model = stream(227), mlp(12, 32, 5)
    anchor, mean = copy.deepcopy(model), None
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            if step % 20 == 0:
                anchor.load_state_dict(model.state_dict())
                x, y = clusters(512, draw)
                mean = torch.autograd.grad(functional.cross_entropy(anchor(x), y), list(anchor.parameters()))
            x, y = clusters(32, draw)
            with probe.step():
                there = torch.autograd.grad(functional.cross_entropy(anchor(x), y), list(anchor.parameters()))
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                for p, a, b in zip(model.parameters(), there, mean, strict=True):
                    p.grad += b - a
                optimizer.step()
                probe.note("loss", loss)


@form
def best_weights_restored() -> None:
    """The best weights so far are kept, and loaded again when the loss of an evaluation has risen twice."""
    draw, model = stream(228), mlp(12, 48, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    best, kept, worse = math.inf, copy.deepcopy(model.state_dict()), 0
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            x, y = clusters(32, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
            if step % 8 == 7:
                model.eval()
                with torch.no_grad():
                    x, y = clusters(128, draw)
                    now = float(functional.cross_entropy(model(x), y))
                model.train()
                worse = worse + 1 if now > best else 0
                if now < best:
                    best, kept = now, copy.deepcopy(model.state_dict())
                elif worse == 2:
                    model.load_state_dict(kept)


@form
def average_swapped_in() -> None:
    """An average of the weights is swapped in for evaluations, and out again."""
    draw, model = stream(229), mlp(12, 48, 5)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    shadow = [p.detach().clone() for p in model.parameters()]
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            x, y = clusters(64, draw)
            with probe.step():
                loss = functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                for s, p in zip(shadow, model.parameters(), strict=True):
                    s.mul_(0.95).add_(p.detach(), alpha=0.05)
                probe.note("loss", loss)
            if step % 10 == 9:
                held = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for p, s in zip(model.parameters(), shadow, strict=True):
                        p.copy_(s)
                    model.eval()
                    model(clusters(64, draw)[0])
                    model.train()
                    for p, h in zip(model.parameters(), held, strict=True):
                        p.copy_(h)


# ---- meta-learning, implicit layers, several models ------------------------------------------------------------------


@form
def learned_starting_point() -> None:
    """MAML: two steps on a few samples of a wave, differentiated through."""
    draw, model = stream(230), mlp(1, 32, 32, 1, act=nn.Tanh)

    def loss_of(step: int) -> Tensor:
        total = torch.zeros(())
        for _ in range(4):
            phase = 3 * torch.rand((), generator=draw)
            x = 6 * torch.rand(20, 1, generator=draw) - 3
            weights = dict(model.named_parameters())
            for _ in range(2):
                inner = functional.mse_loss(torch.func.functional_call(model, weights, (x[:10],)), (x[:10] + phase).sin())
                grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
                weights = {n: w - 0.02 * g for (n, w), g in zip(weights.items(), grads, strict=True)}
            total = total + functional.mse_loss(torch.func.functional_call(model, weights, (x[10:],)), (x[10:] + phase).sin())
        return total / 4

    plain(model, torch.optim.Adam(model.parameters(), 1e-3), loss_of)


@form
def towards_adapted_weights() -> None:
    """Reptile: a copy learns a task, and the difference is the gradient."""
    draw, model = stream(231), mlp(1, 32, 1, act=nn.Tanh)
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            phase, task = 3 * torch.rand((), generator=draw), copy.deepcopy(model)
            inner = torch.optim.SGD(task.parameters(), 0.02)
            x = 6 * torch.rand(10, 1, generator=draw) - 3
            for _ in range(4):
                inner.zero_grad()
                loss = functional.mse_loss(task(x), (x + phase).sin())
                loss.backward()
                inner.step()
            with probe.step():
                for p, q in zip(model.parameters(), task.parameters(), strict=True):
                    p.grad = p.detach() - q.detach()
                optimizer.step()
                probe.note("loss", float(loss.detach()))


@form
def fixed_points() -> None:
    """A deep equilibrium: the state is iterated without gradients, and once with them."""
    draw = stream(232)
    model = nn.ModuleDict({"inside": nn.Linear(24, 24), "enter": nn.Linear(12, 24), "out": nn.Linear(24, 5)})

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        given = model["enter"](x)
        with torch.no_grad():
            z = torch.zeros_like(given)
            for _ in range(12):
                z = torch.tanh(0.5 * model["inside"](z) + given)
        z = torch.tanh(0.5 * model["inside"](z) + given)
        return functional.cross_entropy(model["out"](z), y)

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def differential_equation() -> None:
    """A field is followed for eight steps of Heun's rule."""
    draw, field = stream(233), mlp(3, 32, 2, act=nn.Tanh)
    turn = torch.tensor([[0.0, 1.0], [-1.0, -0.1]])

    def along(x: Tensor, t: float) -> Tensor:
        return field(torch.cat([x, torch.full((len(x), 1), t)], 1))

    def loss_of(step: int) -> Tensor:
        x = torch.randn(64, 2, generator=draw)
        goal = x @ torch.linalg.matrix_exp(turn)
        for i in range(8):
            a = along(x, i / 8)
            x = x + (a + along(x + a / 8, (i + 1) / 8)) / 16
        return functional.mse_loss(x, goal)

    plain(field, torch.optim.AdamW(field.parameters(), 3e-3), loss_of)


@form
def weights_made_by_a_network() -> None:
    """A hypernetwork makes the weights of a small one from a description of the task."""
    draw, maker = stream(234), mlp(3, 32, 3 * 8 + 8)

    def loss_of(step: int) -> Tensor:
        task = torch.randn(8, 3, generator=draw)
        made = maker(task)
        first, last = made[:, :24].view(8, 3, 8), made[:, 24:, None]
        x = torch.randn(8, 32, 3, generator=draw)
        return functional.mse_loss(torch.tanh(x @ first) @ last, x @ task[:, :, None])

    plain(maker, torch.optim.Adam(maker.parameters(), 2e-3), loss_of)


@form
def an_ensemble() -> None:
    """Four networks of one optimizer, each on a sample of the batch."""
    draw, nets = stream(235), nn.ModuleList(mlp(12, 24, 5) for _ in range(4))

    def loss_of(step: int) -> Tensor:
        x, y = clusters(96, draw)
        picks = [torch.randint(0, 96, (96,), generator=draw) for _ in nets]
        return sum(functional.cross_entropy(net(x[i]), y[i]) for net, i in zip(nets, picks, strict=True)) / len(nets)

    plain(nets, torch.optim.AdamW(nets.parameters(), 3e-3), loss_of)


@form
def several_bells() -> None:
    """A mixture of normal distributions for a number with two answers."""
    draw, net = stream(236), mlp(1, 32, 9, act=nn.Tanh)

    def loss_of(step: int) -> Tensor:
        x = 2 * torch.rand(128, 1, generator=draw) - 1
        y = x * (2 * torch.randint(0, 2, (128, 1), generator=draw) - 1) + 0.05 * torch.randn(128, 1, generator=draw)
        share, mean, size = net(x).chunk(3, 1)
        bells = torch.distributions.Normal(mean, functional.softplus(size) + 1e-2)
        return -(share.log_softmax(1) + bells.log_prob(y)).logsumexp(1).mean()

    plain(net, torch.optim.Adam(net.parameters(), 3e-3), loss_of)


@form
def three_quantiles() -> None:
    """Quantiles by the pinball loss."""
    draw, net = stream(237), mlp(4, 32, 3)
    levels = torch.tensor([0.1, 0.5, 0.9])

    def loss_of(step: int) -> Tensor:
        x = torch.randn(96, 4, generator=draw)
        y = x[:, :1] + (0.2 + x[:, 1:2].abs()) * torch.randn(96, 1, generator=draw)
        off = y - net(x)
        return torch.maximum(levels * off, (levels - 1) * off).mean()

    plain(net, torch.optim.RMSprop(net.parameters(), 2e-3), loss_of)


# ---- reinforcement ---------------------------------------------------------------------------------------------------


@form
def soft_actor_critic() -> None:
    """Two critics with followers, an actor that is sampled with its gradient, and a temperature that is learned."""
    draw, actor = stream(238), mlp(3, 32, 2)
    critics = nn.ModuleList(mlp(4, 32, 1) for _ in range(2))
    slow = copy.deepcopy(critics).requires_grad_(False)
    warmth = nn.Parameter(torch.zeros(()))
    model = nn.ModuleDict({"actor": actor, "critics": critics})
    model.register_parameter("warmth", warmth)
    optimizers = [torch.optim.Adam(part, 2e-3) for part in (actor.parameters(), critics.parameters(), [warmth])]

    def act(state: Tensor) -> tuple[Tensor, Tensor]:
        mean, size = actor(state).chunk(2, 1)
        bell = torch.distributions.Normal(mean, size.clamp(-4, 1).exp())
        raw = bell.rsample()
        return raw.tanh(), (bell.log_prob(raw) - (1 - raw.tanh().square() + 1e-6).log()).sum(1, keepdim=True)

    torch.manual_seed(1)
    with trainprobe.watch(model, optimizers) as probe:
        for _ in range(STEPS):
            state = torch.randn(128, 3, generator=draw)
            done = 2 * torch.rand(128, 1, generator=draw) - 1
            reward = -(done - state[:, :1].tanh()).square()
            after = 0.9 * state + 0.1 * done + 0.1 * torch.randn(128, 3, generator=draw)
            with probe.step():
                with torch.no_grad():
                    move, logp = act(after)
                    least = torch.minimum(*(critic(torch.cat([after, move], 1)) for critic in slow))
                    goal = reward + 0.9 * (least - warmth.exp() * logp)
                critic_loss = sum(functional.mse_loss(critic(torch.cat([state, done], 1)), goal) for critic in critics)
                optimizers[1].zero_grad()
                critic_loss.backward()
                optimizers[1].step()
                move, logp = act(state)
                value = torch.minimum(*(critic(torch.cat([state, move], 1)) for critic in critics))
                actor_loss = (warmth.exp().detach() * logp - value).mean()
                optimizers[0].zero_grad()
                actor_loss.backward()
                optimizers[0].step()
                optimizers[2].zero_grad()
                (-(warmth * (logp.detach() - 1.0)).mean()).backward()
                optimizers[2].step()
                with torch.no_grad():
                    for s, p in zip(slow.parameters(), critics.parameters(), strict=True):
                        s.lerp_(p, 0.02)
                probe.note("critic_loss", critic_loss)
                probe.note("actor_loss", actor_loss)


@form
def advantage_of_several_steps() -> None:
    """A2C: rollouts of eight steps, advantages with an entropy bonus, clipped gradients."""
    draw = stream(239)
    model = nn.ModuleDict({"body": mlp(4, 32, 32), "actor": nn.Linear(32, 3), "critic": nn.Linear(32, 1)})
    optimizer = torch.optim.RMSprop(model.parameters(), 2e-3, eps=1e-5)
    state, pull = torch.randn(16, 4, generator=draw), torch.randn(4, 3, generator=draw)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            with probe.step():
                logps, values, rewards, entropies = [], [], [], []
                for _ in range(8):
                    seen = torch.relu(model["body"](state))
                    logp = model["actor"](seen).log_softmax(1)
                    move = torch.multinomial(logp.detach().exp(), 1, generator=draw)
                    logps.append(logp.gather(1, move).squeeze(1))
                    entropies.append(-(logp.exp() * logp).sum(1))
                    values.append(model["critic"](seen).squeeze(1))
                    rewards.append((state @ pull).gather(1, move).squeeze(1))
                    state = 0.8 * state + 0.3 * torch.randn(16, 4, generator=draw)
                with torch.no_grad():
                    future, returns = model["critic"](torch.relu(model["body"](state))).squeeze(1), []
                    for reward in reversed(rewards):
                        future = reward + 0.9 * future
                        returns.insert(0, future)
                value, goal = torch.stack(values), torch.stack(returns)
                actor = -(torch.stack(logps) * (goal - value).detach()).mean()
                loss = actor + 0.5 * functional.mse_loss(value, goal) - 0.01 * torch.stack(entropies).mean()
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                probe.note("loss", loss)
                probe.note("entropy", torch.stack(entropies).mean())


@form
def deterministic_policy() -> None:
    """DDPG with a memory: the critic every step, the policy every second, both with followers."""
    draw, policy, critic = stream(240), mlp(3, 32, 1), mlp(4, 32, 1)
    policy_target, critic_target = copy.deepcopy(policy), copy.deepcopy(critic)
    p_opt, c_opt = torch.optim.Adam(policy.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 3e-3)
    memory: deque[tuple[Tensor, Tensor, Tensor, Tensor]] = deque(maxlen=400)
    with trainprobe.watch(nn.ModuleDict({"policy": policy, "critic": critic}), [p_opt, c_opt]) as probe:
        for step in range(STEPS):
            state = torch.randn(16, 3, generator=draw)
            with torch.no_grad():
                move = policy(state).tanh() + 0.2 * torch.randn(16, 1, generator=draw)
            after = 0.9 * state + 0.1 * move
            memory.extend(zip(state, move, -(move - state[:, :1]).square(), after, strict=True))
            picks = torch.randint(0, len(memory), (64,), generator=draw).tolist()
            s, a, r, n = (torch.stack(part) for part in zip(*(memory[i] for i in picks), strict=True))
            with probe.step():
                with torch.no_grad():
                    goal = r + 0.9 * critic_target(torch.cat([n, policy_target(n).tanh()], 1))
                loss = functional.smooth_l1_loss(critic(torch.cat([s, a], 1)), goal)
                c_opt.zero_grad()
                loss.backward()
                c_opt.step()
                if step % 2:
                    p_opt.zero_grad()
                    (-critic(torch.cat([s, policy(s).tanh()], 1)).mean()).backward()
                    p_opt.step()
                with torch.no_grad():
                    for net, target in ((policy, policy_target), (critic, critic_target)):
                        for q, p in zip(target.parameters(), net.parameters(), strict=True):
                            q.data.copy_(0.95 * q.data + 0.05 * p.data)
                probe.note("loss", loss)


@form
def chosen_over_rejected() -> None:
    """A reward model on pairs of padded answers, read at the last token."""
    draw, body, head = stream(241), Causal(25, 16), nn.Linear(32, 1, bias=False)
    model = nn.ModuleDict({"body": body, "head": head})
    body.head.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 2e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids, lengths = text(32, 16, 24, draw), torch.randint(6, 17, (32,), generator=draw)
            worth = ids[torch.arange(32), lengths - 1]
            ids = ids.masked_fill(torch.arange(16) >= lengths[:, None], 24)
            with probe.step():
                reward = head(body.features(ids, causal(16)))[torch.arange(32), lengths - 1].squeeze(1)
                sign = (worth[:16] > worth[16:]).float() * 2 - 1
                loss = -functional.logsigmoid(sign * (reward[:16] - reward[16:])).mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("accuracy", (sign * (reward[:16] - reward[16:]) > 0).float().mean())


# ---- language --------------------------------------------------------------------------------------------------------


@form
def prefixes_see_themselves() -> None:
    """A prefix language model: the first tokens see each other, and only the others are guessed."""
    draw, model, time = stream(242), Transformer(24, 16), 16

    def loss_of(step: int) -> Tensor:
        ids, prefix = text(8, time + 1, 24, draw), torch.randint(3, 10, (8,), generator=draw)
        inside = torch.arange(time) < prefix[:, None]
        mask = causal(time) | (inside[:, :, None] & inside[:, None, :])
        labels = ids[:, 1:].masked_fill(torch.arange(time) < prefix[:, None] - 1, -100)
        return functional.cross_entropy(model(ids[:, :-1], mask[:, None]).flatten(0, 1), labels.flatten())

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


class SentenceCode(nn.Module):
    """Reads a text into a code, and writes it again from the code and what was said before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.read, self.write = (
            nn.Embedding(24, 16),
            nn.GRU(16, 32, batch_first=True),
            nn.GRU(16, 32, batch_first=True),
        )
        self.code, self.begin, self.head = nn.Linear(32, 16), nn.Linear(8, 32), nn.Linear(32, 24)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.words(ids)
        mean, size = self.code(self.read(x)[1][0]).chunk(2, 1)
        z = mean + (size / 2).exp() * torch.randn_like(mean)
        return self.head(self.write(x, torch.tanh(self.begin(z))[None])[0]), mean, size


@form
def sentences_from_a_code() -> None:
    """A variational autoencoder of texts; what it writes may depend on the whole text, by the code."""
    draw, model = stream(243), SentenceCode()
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for step in range(STEPS):
            ids = text(16, 13, 24, draw)
            with probe.step():
                logits, mean, size = model(ids[:, :-1])
                guess = functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
                kl = -0.5 * (1 + size - mean.square() - size.exp()).sum(1).mean()
                loss = guess + min(1.0, step / 40) * 0.01 * kl
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                probe.note("loss", loss)
                probe.note("kl", kl)


class Scanned(nn.Module):
    """A selective state space, scanned in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.step, self.gate = nn.Embedding(24, 24), nn.Linear(24, 24), nn.Linear(24, 24)
        self.decay, self.norm, self.head = nn.Parameter(torch.rand(24)), nn.RMSNorm(24), nn.Linear(24, 24, bias=False)
        self.mix = nn.Conv1d(24, 24, 3, groups=24, padding=2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        near = functional.silu(self.mix(x.mT)[..., : ids.shape[1]].mT)
        size = functional.softplus(self.step(near))
        keep, state, out = (-size * self.decay.exp()).exp(), torch.zeros_like(x[:, 0]), []
        for i in range(ids.shape[1]):
            state = keep[:, i] * state + (1 - keep[:, i]) * near[:, i]
            out.append(state)
        return self.head(self.norm(x + torch.stack(out, 1) * self.gate(x).sigmoid()))


@form
def states_that_select() -> None:
    """A language model of a scanned state space."""
    draw, model = stream(244), Scanned()
    plain(model, torch.optim.AdamW(model.parameters(), 5e-3), lambda step: next_token(model, text(8, 17, 24, draw)))


class FarAhead(nn.Module):
    """Guesses the next token and the one behind it, the latter with the next token at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.join = Causal(24, 18), nn.Linear(64, 32)

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        seen = self.body.features(ids, causal(ids.shape[1]))
        later = torch.cat([seen[:, :-1], self.body.tokens(ids[:, 1:])], -1)
        return self.body.head(seen), self.body.head(torch.relu(self.join(later)))


@form
def two_tokens_ahead() -> None:
    """Multi-token prediction with a second head that reads the next token."""
    draw, model = stream(245), FarAhead()

    def loss_of(step: int) -> Tensor:
        ids = text(8, 18, 24, draw)
        first, second = model(ids[:, :-1])
        return functional.cross_entropy(first.flatten(0, 1), ids[:, 1:].flatten()) + 0.3 * functional.cross_entropy(
            second.flatten(0, 1), ids[:, 2:].flatten()
        )

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


class Translating(nn.Module):
    """torch's own Transformer, with masks and padding, and one embedding for both sides."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(24, 16, padding_idx=0), nn.Embedding(10, 16)
        self.net = nn.Transformer(16, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(16, 24)

    def forward(self, source: Tensor, said: Tensor) -> Tensor:
        a, b = (self.words(ids) + self.places.weight[: ids.shape[1]] for ids in (source, said))
        mask = nn.Transformer.generate_square_subsequent_mask(said.shape[1])
        padding = source == 0
        return self.head(
            self.net(a, b, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding, tgt_is_causal=True)
        )


@form
def translated_by_attention() -> None:
    """An encoder and a decoder whose rows are equally long."""
    draw, model = stream(246), Translating()

    def loss_of(step: int) -> Tensor:
        target = text(16, 8, 24, draw)
        source = (target * 5) % 23 + 1
        short = torch.randint(5, 9, (16,), generator=draw)
        hidden = torch.arange(8) >= short[:, None]
        source, target = source.masked_fill(hidden, 0), target.masked_fill(hidden, 0)
        said = torch.cat([torch.ones(16, 1, dtype=torch.long), target[:, :-1]], 1)
        return functional.cross_entropy(model(source, said).flatten(0, 1), target.flatten(), ignore_index=0)

    plain(model, torch.optim.AdamW(model.parameters(), 3e-3), loss_of)


@form
def soft_prompts() -> None:
    """Learned vectors before the text of a frozen language model."""
    draw, base = stream(247), Causal(24, 20)
    pretraining = torch.optim.AdamW(base.parameters(), 3e-3)
    for _ in range(60):
        pretraining.zero_grad()
        next_token(base, text(8, 21, 24, draw)).backward()
        pretraining.step()
    base.requires_grad_(False)
    base.zero_grad()
    model = nn.ModuleDict({"base": base})
    model.register_parameter("prompt", nn.Parameter(0.1 * torch.randn(4, 32)))

    def loss_of(step: int) -> Tensor:
        ids = text(8, 17, 24, draw)
        x = torch.cat([model.get_parameter("prompt").expand(8, 4, 32), base.tokens(ids[:, :-1])], 1) + base.places.weight
        for block in base.blocks:
            x = block(x, causal(20))
        return functional.cross_entropy(base.head(base.norm(x))[:, 4:].flatten(0, 1), ids[:, 1:].flatten())

    plain(model, torch.optim.AdamW([model.get_parameter("prompt")], 1e-2), loss_of)


@form
def bottlenecks_in_a_frozen_body() -> None:
    """Adapters that begin as zeros behind frozen layers, and a head."""
    draw, body = stream(248), mlp(12, 48, 48)
    body.requires_grad_(False)
    model = nn.ModuleDict({"body": body, "down": nn.Linear(48, 8), "up": nn.Linear(8, 48), "head": nn.Linear(48, 5)})
    nn.init.zeros_(model["up"].weight)
    nn.init.zeros_(model["up"].bias)
    trained = [p for p in model.parameters() if p.requires_grad]

    def loss_of(step: int) -> Tensor:
        x, y = clusters(64, draw)
        seen = torch.relu(body(x))
        return functional.cross_entropy(model["head"](seen + model["up"](torch.relu(model["down"](seen)))), y)

    plain(model, torch.optim.AdamW(trained, 3e-3), loss_of)


class OneExpert(nn.Module):
    """Sends each token to its best expert, as long as that has room."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.head = (
            nn.Linear(12, 4),
            nn.ModuleList(mlp(12, 24, 12) for _ in range(4)),
            nn.Linear(12, 5),
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = self.router(x)
        share, chosen = logits.softmax(-1).max(-1)
        out = x
        for i, expert in enumerate(self.experts):
            mine = (chosen == i).nonzero().squeeze(1)[: len(x) // 2]
            out = out.index_add(0, mine, share[mine, None] * expert(x[mine]))
        return self.head(out), logits, chosen


@form
def room_for_few_tokens() -> None:
    """A switch layer with a balance and a loss on the router's logits, in two micro-batches."""
    draw, model = stream(249), OneExpert()
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3)
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            with probe.step():
                optimizer.zero_grad()
                for micro in range(2):
                    probe.moment("micro", micro)
                    x, y = clusters(64, draw)
                    said, logits, chosen = model(x)
                    load = functional.one_hot(chosen, 4).float().mean(0)
                    balance = 4 * (load * logits.softmax(-1).mean(0)).sum()
                    z = logits.logsumexp(-1).square().mean()
                    loss = (functional.cross_entropy(said, y) + 0.01 * balance + 1e-3 * z) / 2
                    loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                probe.note("balance", balance.detach())
                probe.note("z_loss", z.item())


@form
def short_floats_for_language() -> None:
    """A causal model under autocast to bfloat16, clipped, with a warm-up and a cosine, a tied head."""
    draw, model = stream(250), Causal(24, 16)
    model.head.weight = model.tokens.weight
    optimizer = torch.optim.AdamW(model.parameters(), 3e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / 10, 0.5 * (1 + math.cos(math.pi * i / STEPS)))
    )
    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            ids = text(8, 17, 24, draw)
            with probe.step():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = next_token(model, ids)
                optimizer.zero_grad(set_to_none=True)
                loss.backward()
                probe.note("grad_norm", nn.utils.clip_grad_norm_(model.parameters(), 1.0))
                optimizer.step()
                schedule.step()
                probe.note("loss", loss)


@form
def loss_in_pieces() -> None:
    """Logits of a quarter of the tokens at a time, computed again in the backward pass, over three uneven micro-batches."""
    draw, model = stream(251), Causal(24, 16)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)

    def piece(x: Tensor, y: Tensor) -> Tensor:
        return functional.cross_entropy(model.head(x), y, reduction="sum", ignore_index=-100)

    with trainprobe.watch(model, optimizer) as probe:
        for _ in range(STEPS):
            parts = []
            for rows in (4, 4, 2):
                ids = text(rows, 17, 24, draw)
                short = torch.randint(4, 17, (rows,), generator=draw)
                parts.append((ids[:, :-1], ids[:, 1:].masked_fill(torch.arange(16) >= short[:, None], -100)))
            count = sum((labels != -100).sum() for _, labels in parts)
            with probe.step():
                optimizer.zero_grad()
                total = 0.0
                for ids, labels in parts:
                    x = model.features(ids, causal(16)).flatten(0, 1)
                    pieces = zip(x.chunk(4), labels.flatten().chunk(4), strict=True)
                    loss = sum(checkpoint(piece, a, b, use_reentrant=False) for a, b in pieces) / count
                    loss.backward()
                    total += float(loss.detach())
                optimizer.step()
                probe.note("loss", total)


@form
def state_kept_between_batches() -> None:
    """A recurrent model whose state goes on in a buffer from batch to batch."""
    draw = stream(252)
    model = nn.ModuleDict({"words": nn.Embedding(24, 16), "cell": nn.GRUCell(16, 32), "head": nn.Linear(32, 24)})
    model.register_buffer("state", torch.zeros(8, 32), persistent=False)
    ids = text(8, 8 * STEPS + 1, 24, draw)

    def loss_of(step: int) -> Tensor:
        state, total = model.get_buffer("state").clone(), torch.zeros(())
        for i in range(8 * step, 8 * step + 8):
            state = model["cell"](model["words"](ids[:, i]), state)
            total = total + functional.cross_entropy(model["head"](state), ids[:, i + 1])
        model.get_buffer("state").copy_(state.detach())
        return total / 8

    plain(model, torch.optim.Adam(model.parameters(), 3e-3), loss_of)


@form
def weights_in_two_parts() -> None:
    """Weight normalisation of all layers, a regression with outliers."""
    draw = stream(253)
    model = nn.Sequential(
        parametrizations.weight_norm(nn.Linear(6, 32)), nn.ELU(), parametrizations.weight_norm(nn.Linear(32, 1))
    )

    def loss_of(step: int) -> Tensor:
        x = torch.randn(96, 6, generator=draw)
        y = x[:, 0] * x[:, 1] + x[:, 2] + (torch.rand(96, generator=draw) < 0.05) * 5
        return functional.huber_loss(model(x).squeeze(1), y)

    plain(model, torch.optim.Adam(model.parameters(), 5e-3), loss_of)
