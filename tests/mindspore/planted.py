"""Bugs that were shipped in real trainings, planted in one of MindSpore beside its healthy twin, and what the probe says.

    python -m tests.mindspore.planted        # writes the table of docs/bug_bench.md anew

A bug is planted at step 3 of 5 where it is not there from the beginning. The training is a loop in PyNative mode, watched
by monitor and audit with their defaults at every step; the twin is the same training without the bug.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from trainprobe.engine.core.records import Finding
from trainprobe.watching import watch

DOC = Path(__file__).parents[2] / "docs/bug_bench.md"
BEGIN, END = "<!-- made by `python -m tests.mindspore.planted` -->", "<!-- end of that table -->"
STEPS, PLANTED = 5, 3
WORDS, WIDTH = 7, 4


class Tied(nn.Cell):
    """A tiny language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.norm = nn.LayerNorm([WIDTH])
        self.up = nn.Dense(WIDTH, WIDTH)
        self.drop = nn.Dropout(p=0.1)
        self.head = nn.Dense(WIDTH, WORDS, has_bias=False)
        self.head.weight = self.embed.embedding_table
        self.detached = False

    def construct(self, x: Any) -> Any:
        hidden = self.norm(self.embed(x))
        inner = ops.tanh(self.up(hidden))
        return self.head(hidden + self.drop(ops.stop_gradient(inner) if self.detached else inner))


def adam(net: Any) -> Any:
    return nn.AdamWeightDecay(net.trainable_params(), 1e-2)


def nothing(step: int, net: Any, optimizer: Any) -> None:
    """Plant nothing."""


def as_they_are(step: int, gradients: Any) -> Any:
    return gradients


@dataclass(frozen=True, slots=True)
class Training:
    """A loop.

    between: called before a step is watched. given: what the optimizer is handed. updates: how often it is called. told: the
    reported norm over the true one.
    """

    optimizer: Callable[[Any], Any] = adam
    between: Callable[[int, Any, Any], None] = nothing
    given: Callable[[int, Any], Any] = as_they_are
    updates: Callable[[int], int] = lambda step: 1
    told: float = 1.0
    audit: dict[str, Any] | None = None
    rules: dict[str, Any] | None = None

    def run(self, output: Path) -> list[Finding]:
        ms.set_context(mode=ms.PYNATIVE_MODE)
        ms.set_seed(5)
        np.random.seed(5)
        net = Tied()
        net.set_train()
        optimizer = self.optimizer(net)
        entropy = nn.CrossEntropyLoss()

        def forward(x: Any) -> Any:
            return entropy(net(x).reshape((-1, WORDS)), ((x + 1) % WORDS).reshape((-1,)))

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)
        plan = {
            "output": str(output),
            "level": "off",
            "monitor": {"optimizer_state": True, **({"rules": self.rules} if self.rules else {})},
            "console": False,
            "sinks": ["memory"],
        }
        with watch(net, optimizer, **plan, audit={"every": 1, **(self.audit or {})}, on_error="raise") as probe:
            for step in range(STEPS):
                self.between(step, net, optimizer)
                with probe.step():
                    loss, found = gradient(ms.Tensor(np.random.default_rng(step).integers(0, WORDS, (4, 5)).astype(np.int32)))
                    found = self.given(step, found)
                    norm = float(np.sqrt(sum(float((g.asnumpy().astype(np.float64) ** 2).sum()) for g in found)))
                    for _ in range(self.updates(step)):
                        optimizer(found)
                    probe.note("loss", float(loss.asnumpy()))
                    probe.note("grad_norm", norm * self.told)
        return [finding for finding in probe.findings if finding.severity != "info"]


@dataclass(frozen=True, slots=True)
class Bug:
    """step: when it first does harm. missed: why the probe does not find it, empty where it does."""

    what: str
    training: Training
    step: int = PLANTED
    twin: Training = Training()
    missed: str = ""


def at_planted(does: Callable[[Any, Any], None]) -> Callable[[int, Any, Any], None]:
    def between(step: int, net: Any, optimizer: Any) -> None:
        if step == PLANTED:
            does(net, optimizer)

    return between


def stale(net: Any) -> Any:
    """Make the optimizer, and then give the model other parameters, as a conversion does."""
    optimizer = adam(net)
    net.up.weight = ms.Parameter(net.up.weight.asnumpy().copy(), name=net.up.weight.name)
    return optimizer


def all_but_the_first(net: Any) -> Any:
    return nn.AdamWeightDecay([*net.trainable_params()][1:], 1e-2)


def lost_moments(net: Any, optimizer: Any) -> None:
    for moment in (*optimizer.moments1, *optimizer.moments2):
        ops.assign(moment, ops.zeros_like(moment))


def broken_tie(net: Any, optimizer: Any) -> None:
    net.head.weight = ms.Parameter(net.embed.embedding_table.asnumpy().copy(), name="head.weight")


def flipped_bit(net: Any, optimizer: Any) -> None:
    array = net.up.weight.asnumpy().copy()
    array.view(np.uint32)[1, 2] ^= 1 << 25
    ops.assign(net.up.weight, ms.Tensor(array))


def schedule(step: int) -> float:
    return [0.012, 0.011, 0.01, 0.009, 0.008, 0.007, 0.006, 0.005][step]


def scheduled(net: Any) -> Any:
    return nn.Momentum(net.trainable_params(), [schedule(i) for i in range(8)], 0.9)


def once_more(net: Any, optimizer: Any) -> None:
    ops.assign(optimizer.global_step, optimizer.global_step + 1)


def poisoned(step: int, gradients: Any) -> Any:
    changed = [g.asnumpy().copy() for g in gradients]
    if step == PLANTED:
        changed[2][0] = np.nan
    return tuple(map(ms.Tensor, changed))


def swapped(net: Any, optimizer: Any) -> None:
    a, b = (next(m for m in optimizer.moments1 if m.name.endswith(name)) for name in ("norm.gamma", "norm.beta"))
    first, second = a.asnumpy().copy(), b.asnumpy().copy()
    ops.assign(a, ms.Tensor(second))
    ops.assign(b, ms.Tensor(first))


def detach(net: Any, optimizer: Any) -> None:
    net.detached = True


def evaluate(net: Any, optimizer: Any) -> None:
    net.set_train(False)


def freeze(net: Any, optimizer: Any) -> None:
    net.up.weight.requires_grad = False


def faster(net: Any, optimizer: Any) -> None:
    ops.assign(optimizer.learning_rate, ms.Tensor(0.1, ms.float32))


DECLARED = Training(scheduled, audit={"schedule": schedule})
# two steps are what a training of five has; by default it is twenty, and the bug is then found at step 22
PATIENT = Training(rules={"dead": {"patience": 2}})
FIXED = Training(audit={"schedule": lambda step: 1e-2})
BUGS = (
    Bug("the optimizer keeps a parameter that the model has replaced", Training(stale), 0),
    Bug("a parameter is left out of the optimizer", Training(all_but_the_first), 0),
    Bug("moments are lost, steps are counted on", Training(between=at_planted(lost_moments))),
    Bug("moments of two parameters are swapped", Training(between=at_planted(swapped))),
    Bug("a tie is broken: the head is a copy of the embedding", Training(between=at_planted(broken_tie))),
    Bug("a bit of a weight flips between two steps", Training(between=at_planted(flipped_bit))),
    Bug("the declared schedule is stepped twice", replace(DECLARED, between=at_planted(once_more)), twin=DECLARED),
    Bug("the learning rate is ten times what is declared", replace(FIXED, between=at_planted(faster)), twin=FIXED),
    Bug("the reported norm is of half of the gradients", Training(told=0.5**0.5), 0),
    Bug("a gradient is not finite and the loss is", Training(given=poisoned)),
    Bug("a weight is frozen in the run", Training(between=at_planted(freeze))),
    Bug("the model goes on in evaluation mode", Training(between=at_planted(evaluate))),
    Bug(
        "the optimizer is called twice a step",
        Training(updates=lambda step: 1 + (step >= PLANTED)),
        missed="some algorithms do that on purpose, and the counts of calls agree",
    ),
    Bug(
        "an update is left out",
        Training(updates=lambda step: int(step != PLANTED)),
        missed="loss scaling and accumulation leave updates out too, and a loop does not say why",
    ),
    Bug("a branch is detached (`dead` with a patience of 2 steps)", replace(PATIENT, between=at_planted(detach)), twin=PATIENT),
)


def judged(training: Training) -> list[Finding]:
    with tempfile.TemporaryDirectory() as folder:
        return training.run(Path(folder) / "out")


def table() -> str:
    """Return the table as Markdown, of bugs and twins that are trained now. Raises AssertionError for a false alarm."""
    lines = ["| bug | planted at | found at | by | names |", "|---|---|---|---|---|"]
    for twin in {(bug.twin.audit is not None, bug.twin.optimizer, str(bug.twin.rules)): bug.twin for bug in BUGS}.values():
        assert judged(twin) == [], "a healthy twin is accused"
    for bug in BUGS:
        found = judged(bug.training)
        if bug.missed:
            assert found == [], f"{bug.what} is found now: take it out of the missed ones"
            lines.append(f"| {bug.what} | {bug.step} | missed: {bug.missed} | | |")
            continue
        first = found[0]
        rules = ", ".join(f"`{rule}`" for rule in dict.fromkeys(finding.rule for finding in found))
        lines.append(f"| {bug.what} | {bug.step} | {first.step} | {rules} | `{first.site.name if first.site else ''}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    before, _, rest = DOC.read_text(encoding="utf-8").partition(f"{BEGIN}\n")
    after = rest.partition(END)[2]
    DOC.write_text(f"{before}{BEGIN}\n{table()}{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
