"""Writes programs of cells at random: values that several cells use, residuals, tuples, arguments handed through or not used.

MindSpore compiles a cell from its source, so a program is text that is written to a file and imported.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

WIDTH = 8
_HEAD = f"""import numpy as np
from mindspore import Parameter, Tensor, nn, ops

W = {WIDTH}


class Held(nn.Cell):
    def __init__(self):
        super().__init__()
        self.relu = nn.Identity()
"""
_LAYERS = (
    *("nn.Dense(W, W)", "nn.Dense(W, W, activation='relu')", "nn.LayerNorm([W])", "nn.GELU()", "nn.Tanh()", "nn.Flatten()"),
    *("nn.SequentialCell(nn.Dense(W, W), nn.BatchNorm1d(W))", "nn.Dropout(p=0.3)", "nn.Dropout(p=0.0)", "nn.Identity()"),
)
_EXPRESSIONS = (
    *("{a} + {b}", "{a} * {b}", "{a} * 1.0", "{a} - {b}", "ops.tanh({a})", "{a}.reshape((-1, W))", "ops.matmul({a}, self.w)"),
    *("self.scale * {a}", "{a} if self.flag else {b}"),
)
# statements that a reader of the source may get wrong: {n}: number of the value, {a} and {b}: values
_ODD: tuple[tuple[str, ...], ...] = (
    ("v{n} = {a}", "if self.flag:", "    return ops.tanh({b}) + {a}", "v{n} = ops.tanh(v{n})"),
    ("if {a}.sum() > 0:", "    v{n} = ops.matmul({a}, self.w)", "else:", "    v{n} = ops.tanh({b})"),
    ("v{n} = {a}", "for layer in self.many:", "    v{n} = layer(v{n}) + {a}"),
    ("v{n} = {a}", "for i in range(2):", "    v{n} = self.many[0](v{n})"),
    ("v{n} = {a}", "v{n} += {b}"),
    ("v{n} = ops.tanh({a})", "ops.assign(self.count, self.count + 1)"),
    ("v{n}, t{n} = {a}, {b}", "v{n}, t{n} = t{n}, v{n}"),
    ("p{n} = ({a}, {b})", "v{n} = p{n}[0] * p{n}[1]"),
    ("l{n} = []", "for layer in self.many:", "    l{n}.append(layer({a}))", "v{n} = l{n}[0] + l{n}[1]"),
    ("def inner{n}(y):", "    return y * {a}", "v{n} = inner{n}({b})"),
    ("v{n} = self.held[0].relu({a}) + {b}",),
    ("v{n} = {{'k': {a}, 'l': {b}}}['k']",),
    ("v{n} = ops.depend({a}, {b})",),
    ("v{n} = {a}[0:] + {b}",),
    ("v{n} = self.part({a})",),
)


def _cell(draw: random.Random, name: str, made: dict[str, tuple[int, int]], odd: bool = False) -> str:
    """Return the source of a cell, and note in `made` how many tensors it takes and returns. odd: with statements of _ODD."""
    takes, members, lines = draw.choice((1, 1, 2)), [], []
    values = [f"x{i}" for i in range(takes)]
    for n in range(draw.randint(2, 4)):
        pick = draw.random()
        if pick < 0.6:
            kind = draw.choice([*made, *_LAYERS]) if made else draw.choice(_LAYERS)
            given, back = made.get(kind, (1, 1))
            members.append(f"self.m{n} = {kind}{'()' if kind in made else ''}")
            call = f"self.m{n}({', '.join(draw.choice(values) for _ in range(given))})"
            lines.append(f"v{n}{f', u{n}' if back == 2 else ''} = {call}")
            values += [f"u{n}"] if back == 2 else []
        elif odd and pick < 0.9:
            a, b = draw.choice(values), draw.choice(values)
            lines += [line.format(n=n, a=a, b=b) for line in draw.choice(_ODD)]
        elif pick < 0.9:
            lines.append(f"v{n} = " + draw.choice(_EXPRESSIONS).format(a=draw.choice(values), b=draw.choice(values)))
        else:
            lines += [f"v{n} = {draw.choice(values)}", "if self.flag:", f"    v{n} = v{n} + {draw.choice(values)}"]
        values.append(f"v{n}")
    returns = 2 if draw.random() < 0.15 and not any("    return ops" in line for line in lines) else 1
    out = [values[-1], draw.choice(values)][:returns]
    if returns == 1 and draw.random() < 0.4:
        out = [f"{out[0]} + {draw.choice(values)}"]
    made[name] = takes, returns
    given = ", ".join(f"x{i}" for i in range(takes))
    setup = ["super().__init__()", f"self.flag, self.scale = {draw.random() < 0.5}, {draw.choice((1.0, 0.5))}", *members]
    setup.append("self.w = nn.Dense(W, W).weight")
    part = ""
    if odd:
        setup += ["self.many = nn.CellList([nn.Dense(W, W), nn.Tanh()])", "self.held = nn.CellList([Held()])"]
        setup.append("self.count = Parameter(Tensor(np.zeros(1, np.float32)), name='count', requires_grad=False)")
        part = "    def part(self, y):\n        return self.many[0](y) * y\n\n"
    body = "".join(f"        {line}\n" for line in [*lines, f"return {', '.join(out)}"])
    init = "".join(f"        {line}\n" for line in setup)
    return f"\n\nclass {name}(nn.Cell):\n    def __init__(self):\n{init}\n{part}    def construct(self, {given}):\n{body}"


def source(seed: int, odd: bool = False) -> str:
    """Return the source of a program: its cell `Net` takes a tensor of shape (rows, WIDTH) and returns a loss."""
    draw, made = random.Random(seed), dict[str, tuple[int, int]]()
    text = _HEAD + "".join(_cell(draw, f"Cell{n}", made, odd) for n in range(3))
    calls, uses = [], []
    for n, (name, (given, back)) in enumerate([*made.items(), *draw.sample([*made.items()], 1)]):
        out = f"y{n}{f', z{n}' if back == 2 else ''}"
        values = ["h", "h", "k", *uses]
        calls.append((f"self.c{n} = {name}()", f"{out} = self.c{n}({', '.join(draw.choice(values) for _ in range(given))})"))
        uses += [f"y{n}", *([f"z{n}"] if back == 2 else [])]
    draw.shuffle(uses)
    init = "".join(f"        {line}\n" for line, _ in calls)
    body = "".join(f"        {line}\n" for _, line in calls)
    return f"""{text}

class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.start, self.other = nn.Dense(W, W), nn.Dense(W, W)
{init}
    def construct(self, x):
        h = self.start(x)
        k = self.other(h)
{body}        y = {" + ".join([*uses, "h", "ops.tanh(k)"])}
        return (y * y).mean()
"""


def net(seed: int, folder: Path, odd: bool = False) -> Any:
    """Write a program into a folder, and return its cell."""
    path = folder / f"program{seed}.py"
    path.write_text(source(seed, odd))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # MindSpore imports it by its name
    spec.loader.exec_module(module)
    return module.Net()
