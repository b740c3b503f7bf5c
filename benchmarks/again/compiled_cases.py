"""Programs for `benchmarks.again.compiled`: a step, how its compilation is spoilt, and where that is."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from trainprobe.demo.gpt import GPT, Shape, next_token_loss

aten = torch.ops.aten
Step = tuple[Callable[[Any, Any], Any], nn.Module, Any]


@dataclass(frozen=True)
class Case:
    """step: returns loss, model and batch. spoilt: a block in which compilation is wrong. module: the truth, "" where healthy.

    tensor: what is wrong of it: output, gradient or buffer. needs: package without which the case cannot be made.
    """

    step: Callable[[], Step]
    spoilt: Callable[[], AbstractContextManager[Any]] = nullcontext
    module: str = ""
    tensor: str = ""
    needs: str = "torch"


# ---- programs ------------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of one head, written by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what each position gathers, [rows, time, width]."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.softmax(q @ k.transpose(1, 2) * 0.125, -1) @ v)


class Block(nn.Module):
    """A layer of a small model; some of it can be another module."""

    def __init__(self, width: int, act: nn.Module | None = None) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(width, eps=1e-3), Attention(width)
        self.norm2, self.up, self.act = nn.LayerNorm(width), nn.Linear(width, 2 * width), act or nn.GELU()
        self.down, self.drop = nn.Linear(2 * width, width), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the residual stream, [rows, time, width]."""
        x = x + self.attn(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


class Net(nn.Module):
    """Two layers of different widths, so that a fault can be planted in one of them alone."""

    def __init__(self, act: nn.Module | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(16), Block(24, act)])
        self.widen, self.head = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [rows, time, 5]."""
        return self.head(self.layers[1](self.widen(self.layers[0](x))))


def _ce(model: Any, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())


def net(act: Callable[[], nn.Module] | None = None, dtype: torch.dtype = torch.float32) -> Step:
    """Return a step of `Net`."""
    torch.manual_seed(0)
    model = Net(act() if act is not None else None).to(dtype)
    return _ce, model, (torch.randn(6, 8, 16).to(dtype), torch.randint(5, (6, 8)))


class Conv(nn.Module):
    """Convolutions with batch norm or group norm."""

    def __init__(self, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.stem, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), norm(8)
        self.body, self.norm2 = nn.Conv2d(8, 12, 3, stride=2), norm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [rows, 5]."""
        x = F.relu(self.norm1(self.stem(x)))
        return self.head(F.max_pool2d(F.relu(self.norm2(self.body(x))), 2).mean((2, 3)))


def conv(norm: Callable[[int], nn.Module] = nn.BatchNorm2d, dtype: torch.dtype = torch.float32) -> Step:
    """Return a step of `Conv`."""
    torch.manual_seed(0)
    return _ce, Conv(norm).to(dtype), (torch.randn(6, 3, 12, 12).to(dtype), torch.randint(5, (6,)))


def gpt(cast: bool = False) -> Step:
    """Return a step of the demo's GPT, under autocast to bfloat16 where asked for."""
    torch.manual_seed(0)
    model = GPT(Shape(layers=2, width=32, heads=2, context=16, attention="explicit"))

    def loss(model: Any, batch: Any) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            return next_token_loss(model(batch[0]), batch[1])

    return loss, model, (torch.randint(64, (4, 16)), torch.randint(64, (4, 16)))


class Routed(nn.Module):
    """A mixture of experts whose loop over experts breaks the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.head = nn.Linear(16, 3), nn.Linear(16, 5)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.SiLU(), nn.Linear(32, 16)) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [rows, time, 5]."""
        flat = x.flatten(0, 1)
        weight, expert = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for i, inner in enumerate(self.experts):
            rows = (expert == i).nonzero().flatten()
            if rows.numel():
                out = out.index_add(0, rows, weight[rows, None] * inner(flat[rows]))
        return self.head(out).view(*x.shape[:2], 5)


class Recurrent(nn.Module):
    """An LSTM, which Dynamo leaves out of its graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(16, 24, batch_first=True), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits, [rows, time, 5]."""
        return self.head(self.rnn(x)[0])


def of(kind: type[nn.Module]) -> Step:
    """Return a step of a model that is given [6, 8, 16]."""
    torch.manual_seed(0)
    return _ce, kind(), (torch.randn(6, 8, 16), torch.randint(5, (6, 8)))


_SMALL = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}


def transformer(kind: str, config: str, **settings: Any) -> Step:
    """Return a step of an architecture of transformers with random weights."""
    transformers = importlib.import_module("transformers")
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config)(**(_SMALL | settings)))
    model.train()
    words = torch.randint(3, 60, (3, 12))
    return (lambda model, batch: model(**batch).loss), model, {"input_ids": words, "labels": words}


# ---- faults --------------------------------------------------------------------------------------------------------------


@contextmanager
def _held(table: Any, key: Any, make: Callable[[Any], Any]) -> Generator[None]:
    """Give an entry of a table, or an attribute, another value within the block."""
    held, put = (table, dict.__setitem__) if isinstance(table, dict) else (vars(table), setattr)
    old = held[key]
    put(table, key, make(old))
    try:
        yield
    finally:
        put(table, key, old)


def _decompositions() -> Any:
    return importlib.import_module("torch._inductor.decomposition").decompositions


def norm_without_eps() -> AbstractContextManager[Any]:
    """A decomposition of layer norm that loses eps, for width 24."""

    def make(right: Any) -> Any:
        return lambda x, shape, weight, bias, eps: right(x, shape, weight, bias, eps if shape != [24] else 0.0)

    return _held(_decompositions(), aten.native_layer_norm.default, make)


def norm_backward_uncentred() -> AbstractContextManager[Any]:
    """A decomposition of the backward of layer norm that scales the gradient of its input, for width 16."""

    def make(right: Any) -> Any:
        def wrong(grad: Any, x: Any, shape: Any, *rest: Any) -> Any:
            first, *others = right(grad, x, shape, *rest)
            return (first * 1.01 if list(shape) == [16] and first is not None else first, *others)

        return wrong

    return _held(_decompositions(), aten.native_layer_norm_backward.default, make)


def running_variance_biased() -> AbstractContextManager[Any]:
    """A decomposition of batch norm whose running variance has another divisor, for 12 channels."""

    def make(right: Any) -> Any:
        def wrong(*args: Any) -> Any:
            out = list(right(*args))
            if args[0].shape[1] == 12:
                out[4] = out[4] * 0.99
            return tuple(out)

        return wrong

    return _held(_decompositions(), aten._native_batch_norm_legit_functional.default, make)


def _config(name: str, value: Any) -> AbstractContextManager[Any]:
    return importlib.import_module("torch._inductor.config").patch({name: value})


def scale_dropped() -> AbstractContextManager[Any]:
    """A pass over the graph that takes the first product with 0.125 in the layer of width 24 for nothing."""

    def drop(graph: Any) -> None:
        for node in list(graph.nodes):
            if node.target is aten.mul.Tensor and node.args[1] == 0.125 and "layers.1" in str(node.meta.get("nn_module_stack")):
                node.replace_all_uses_with(node.args[0])
                graph.erase_node(node)
                return

    return _config("joint_custom_pre_pass", drop)


def gelu_by_tanh() -> AbstractContextManager[Any]:
    """A pass over the graph of torch's functions that takes the approximation of GELU for GELU."""

    def swap(graph: Any) -> None:
        for node in graph.nodes:
            if node.target is F.gelu and "layers.1" in str(node.meta.get("nn_module_stack")):
                node.kwargs = {"approximate": "tanh"}

    return _config("pre_grad_custom_pass", swap)


@contextmanager
def wrong_code() -> Generator[None]:
    """Generated code of a sine that is a little off, vectorized or not."""
    cpp = importlib.import_module("torch._inductor.codegen.cpp")
    with (
        _held(cpp.CppOverrides, "sin", lambda _: staticmethod(lambda x: f"std::sin({x} * 1.001f)")),
        _held(cpp.CppVecOverrides, "sin", lambda _: staticmethod(lambda x: f"({x} * decltype({x})(1.001)).sin()")),
    ):
        yield


def wrong_lowering() -> AbstractContextManager[Any]:
    """A lowering of the sign that gives 1 for what is not 0: wrong in the gradient of an absolute value alone."""
    table = importlib.import_module("torch._inductor.lowering").lowerings
    return _held(table, aten.sign.default, lambda right: lambda x: table[aten.abs.default](right(x)))


class Sine(nn.Module):
    """A sine as activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return its sine."""
        return x.sin()


class Absolute(nn.Module):
    """An absolute value as activation."""

    def forward(self, x: Tensor) -> Tensor:
        """Return its absolute value."""
        return x.abs()


class Asks(nn.Module):
    """Does something else where it is compiled, as kernels with a second path do."""

    def forward(self, x: Tensor) -> Tensor:
        """Return an activation."""
        return F.relu(x) if torch.compiler.is_compiling() else F.leaky_relu(x)


@torch.library.custom_op("trainprobe_bench::centre_", mutates_args=())
def centre_(x: Tensor) -> Tensor:
    """Subtract the mean in place, and do not tell so."""
    with torch.no_grad():
        x.sub_(x.mean())
    return x.new_zeros(1)


@centre_.register_fake
def _(x: Tensor) -> Tensor:
    return x.new_zeros(1)


class Writes(nn.Module):
    """Calls an operator that writes its input and declares nothing: a compiler may leave it out."""

    def forward(self, x: Tensor) -> Tensor:
        """Return an activation."""
        y = x * 1.0
        centre_(y.detach())
        return y.tanh()


class Hinged(nn.Module):
    """A model with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hinge = nn.Linear(4, 4, bias=False), nn.HingeEmbeddingLoss(margin=1.7)

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss of distances that are all to be large."""
        return self.hinge(self.embed(x), -torch.ones_like(x))


def hinged() -> Step:
    """Return a step of pytorch#185517: a margin that is no number of bfloat16."""
    torch.manual_seed(0)
    model = Hinged().bfloat16()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(4))
    return (lambda model, batch: model(batch)), model, torch.full((4, 4), 1.703125, dtype=torch.bfloat16)


def thresholded() -> Step:
    """Return a step with a threshold that is no number of bfloat16, on values that meet it."""
    loss, model, batch = net(lambda: nn.Threshold(1.7, 0.0), torch.bfloat16)
    with torch.no_grad():
        model.get_parameter("layers.1.up.weight")[:10] = 0.0
        model.get_parameter("layers.1.up.bias")[:10] = 1.703125
    return loss, model, batch


PLANTED: dict[str, Case] = {
    "decomposition: layer norm without eps": Case(net, norm_without_eps, "layers.1.norm1", "output"),
    "decomposition: backward of layer norm": Case(net, norm_backward_uncentred, "layers.0.norm2", "gradient"),
    "decomposition: running variance": Case(conv, running_variance_biased, "norm2", "buffer"),
    "pass: a scale is dropped": Case(net, scale_dropped, "layers.1.attn", "output"),
    "pass: GELU by tanh": Case(net, gelu_by_tanh, "layers.1.act", "output"),
    "code: a sine": Case(lambda: net(Sine), wrong_code, "layers.1.act", "output"),
    "lowering: sign, in the backward alone": Case(lambda: net(Absolute), wrong_lowering, "layers.1.act", "gradient"),
    "module: another path under a compiler": Case(lambda: net(Asks), module="layers.1.act", tensor="output"),
    "operator: a write that is not declared": Case(lambda: net(Writes), module="layers.1.act", tensor="output"),
    "real: hinge loss in bfloat16 (pytorch#185517)": Case(hinged, module="hinge", tensor="gradient"),
    "real: threshold in bfloat16": Case(thresholded, module="layers.1.act", tensor="gradient"),
}

HEALTHY: dict[str, Case] = {
    "attention, layer norm, dropout": Case(net),
    "convolutions, batch norm": Case(conv),
    "convolutions, group norm": Case(lambda: conv(lambda c: nn.GroupNorm(4, c))),
    "GPT": Case(gpt),
    "GPT, autocast to bfloat16": Case(lambda: gpt(True)),
    "weights in bfloat16": Case(lambda: net(dtype=torch.bfloat16)),
    "convolutions in bfloat16": Case(lambda: conv(dtype=torch.bfloat16)),
    "mixture of experts, graph breaks": Case(lambda: of(Routed)),
    "LSTM": Case(lambda: of(Recurrent)),
    "Llama": Case(lambda: transformer("LlamaForCausalLM", "LlamaConfig"), needs="transformers"),
    "Qwen2": Case(lambda: transformer("Qwen2ForCausalLM", "Qwen2Config", num_key_value_heads=1), needs="transformers"),
    "BERT": Case(lambda: transformer("BertForMaskedLM", "BertConfig"), needs="transformers"),
    "GPT-2": Case(
        lambda: transformer("GPT2LMHeadModel", "GPT2Config", n_embd=32, n_layer=2, n_head=2, n_positions=32),
        needs="transformers",
    ),
    "Gemma": Case(
        lambda: transformer("GemmaForCausalLM", "GemmaConfig", head_dim=16, num_key_value_heads=2), needs="transformers"
    ),
    "OPT": Case(
        lambda: transformer("OPTForCausalLM", "OPTConfig", ffn_dim=48, word_embed_proj_dim=32, max_position_embeddings=32),
        needs="transformers",
    ),
}
