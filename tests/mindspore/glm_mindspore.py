"""The same model in MindSpore (PyNative): `glm_mindspore.py PLAN [WEIGHTS] [PLANTED]`; see `glm_torch.py`."""

from __future__ import annotations

import sys

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

import trainprobe
from tests.mindspore.glm_numbers import HEADS, INNER, LAYERS, LENGTH, STEPS, WIDTH, WORDS, mask, tokens, weights

NAMES = {
    "embedding.weight": "embedding.embedding_table",
    "final_norm.weight": "final_norm.gamma",
    "final_norm.bias": "final_norm.beta",
}


class RMSNorm(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(ops.ones(WIDTH, ms.float32))

    def construct(self, x):
        return x * ops.rsqrt(ops.mean(x * x, -1, True) + 1e-5) * self.weight


class ColumnParallelLinear(nn.Dense):
    pass


class Attention(nn.Cell):
    def __init__(self):
        super().__init__()
        self.query_key_value = ColumnParallelLinear(WIDTH, 3 * WIDTH)
        self.dense = nn.Dense(WIDTH, WIDTH, has_bias=False)

    def construct(self, x, mask):
        batch = x.shape[0]
        q, k, v = (
            part.reshape(batch, LENGTH, HEADS, WIDTH // HEADS).transpose(0, 2, 1, 3)
            for part in ops.chunk(self.query_key_value(x), 3, -1)
        )
        scores = ops.softmax(ops.matmul(q, k.transpose(0, 1, 3, 2)) * (WIDTH // HEADS) ** -0.5 + mask, -1)
        return self.dense(ops.matmul(scores, v).transpose(0, 2, 1, 3).reshape(batch, LENGTH, WIDTH))


class MLP(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense_h_to_4h = ColumnParallelLinear(WIDTH, 2 * INNER, has_bias=False)
        self.dense_4h_to_h = nn.Dense(INNER, WIDTH, has_bias=False)

    def construct(self, x):
        gate, up = ops.chunk(self.dense_h_to_4h(x), 2, -1)
        return self.dense_4h_to_h(ops.silu(gate) * up)


class Layer(nn.Cell):
    def __init__(self):
        super().__init__()
        self.input_norm, self.attention = RMSNorm(), Attention()
        self.post_norm, self.mlp = RMSNorm(), MLP()

    def construct(self, x, mask):
        x = x + self.attention(self.input_norm(x), mask)
        return x + self.mlp(self.post_norm(x))


class GLM(nn.Cell):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.CellList([Layer() for _ in range(LAYERS)])
        self.final_norm = nn.LayerNorm([WIDTH], epsilon=1e-5)
        self.head = nn.Dense(WIDTH, WORDS, has_bias=False)

    def construct(self, x, mask):
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.final_norm(x))


def main(plan, saved="", planted=""):
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.set_seed(0)
    model = GLM()
    ms.load_param_into_net(
        model, {NAMES.get(n, n): Parameter(Tensor(array), name=NAMES.get(n, n)) for n, array in weights().items()}
    )
    if saved:
        ms.save_checkpoint(model, saved)
    if planted:
        found = {p.name: p for p in model.get_parameters()}
        found[planted].register_hook(lambda gradient: gradient * 2)
    model.set_train()
    optimizer = nn.SGD(model.trainable_params(), 0.1, momentum=0.9)
    added = Tensor(mask())

    def forward(x, y):
        return ops.cross_entropy(model(x, added).reshape(-1, WORDS), y.reshape(-1))

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)
    with trainprobe.watch(model, optimizer, plan) as probe:
        for step in range(STEPS):
            with probe.step():
                batch = tokens(step)
                loss, found = gradients(Tensor(batch[:, :-1]), Tensor(batch[:, 1:]))
                optimizer(found)
                probe.note("loss", float(loss.asnumpy()))


if __name__ == "__main__":
    ms.set_device("CPU")
    ms.set_deterministic(True)
    main(*sys.argv[1:])
