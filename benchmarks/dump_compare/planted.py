"""Planted differences: one change a pair, and the calls that may be named first.

`first` is a regular expression for the entry that must be named; `at` the step. A change inside a module may be named by the
module, or by an op within it, and what is left out of the program is named by the first call that is given what follows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from benchmarks.dump_compare.runs import Way


@dataclass(frozen=True)
class Plant:
    """subject, change: see subjects and runs. first: matches the place, after "optimizer/" where the optimizer calls it.

    a: how both sides are run. b: in what B differs beside the change, by rounding alone.
    """

    subject: str
    change: str
    first: str
    step: int = 0
    a: Way = field(default_factory=Way)
    b: dict[str, Any] = field(default_factory=dict[str, Any])

    def named(self, entry: str, step: int) -> bool:
        """Return whether a place is the right one."""
        return step == self.step and re.search(self.first, entry) is not None

    def pointed_at(self, sentence: str, step: int) -> bool:
        """Return whether a first line says that it arises before what is named: within a module, or in the optimizer."""
        where = sentence.partition("; ")[2]
        if "in the step of the optimizer" in where:
            return self.first == _OPTIMIZER and step == self.step + 1
        return self.named(where, step)


_OPTIMIZER = r"^optimizer/|^Parameter\."  # an operator of it, or what it is given or makes of a parameter
_MOMENTUM = Way(algorithm="SGD", optimizer={"momentum": 0.9})
PLANTS = [
    # forward
    Plant("gpt", "gelu", r"layers\.1\.act\.|gelu\.1\.forward"),
    Plant("gpt", "attention scale", r"layers\.1\.attention\.Att|scaled_dot_product_attention\.1\.forward"),
    Plant("gpt", "no mask", r"layers\.1\.attention\.Att|scaled_dot_product_attention\.1\.forward"),
    Plant("gpt", "rope off by one", r"layers\.1\.attention\.Att|scaled_dot_product_attention\.1\.forward|roll"),
    Plant("gpt", "norm eps", r"layers\.1\.norm2\.|layer_norm\.3\.forward"),
    Plant("gpt", "dropout", r"layers\.1\.drop\.|dropout\.1\.forward"),
    Plant("gpt", "one weight", r"layers\.1\.attention\.v\.|linear\.8\.forward"),
    Plant("gpt", "rounded weight", r"layers\.1\.up\.|linear\.10\.forward"),
    Plant("gpt", "positions off by one", r"Module\.place\.|embedding\.1\.forward|Tensor\.add\.0\.forward|arange"),
    Plant("gpt", "label smoothing", r"cross_entropy\.0\.forward|Module\.root\."),
    Plant("gpt", "one token", r"Module\.root\.Gpt\.forward\.0|Module\.embed\.|__getitem__|embedding\.0\.forward"),
    Plant("gpt", "labels not shifted", r"Module\.root\.Gpt\.forward\.0|__getitem__|cross_entropy"),
    Plant("conv", "padding", r"blocks\.1\.conv\.|conv2d\.2\.forward|pad"),
    Plant("conv", "activation", r"blocks\.1\.act\.|silu|relu"),
    Plant("conv", "residual scale", r"blocks\.1\.ConvBlock\.forward|Tensor\.mul\.[01]\.forward"),
    Plant("conv", "norm in evaluation", r"blocks\.1\.norm\.|batch_norm\.2\.forward"),
    Plant("conv", "pooling", r"pool"),
    Plant(
        "conv", "channels reversed", r"Module\.root\.ConvNet\.forward\.0|Module\.stem|conv2d\.0\.forward|Tensor\.to\.0\.forward"
    ),
    Plant("lstm", "forget bias", r"Module\.cell\.LSTMCell\.forward\.0|lstm_cell\.0\.forward"),
    Plant("lstm", "gate order", r"Module\.lstm\.LSTM\.forward\.0|lstm\.0\.forward"),
    Plant("lstm", "initial state", r"Module\.cell\.LSTMCell\.forward\.0|full_like|new_zeros|lstm_cell\.0\.forward"),
    Plant("lstm", "one step skipped", r"Module\.cell\.LSTMCell\.forward\.5|lstm_cell\.5\.forward|__getitem__\.9\.forward"),
    Plant("moe", "experts swapped", r"layers\.1\.experts\.2\."),
    Plant("moe", "router in bfloat16", r"layers\.1\.Experts|Tensor\.softmax\.1\.forward|bfloat16|Tensor\.to\."),
    Plant("moe", "top 1", r"layers\.1\.Experts|topk\.1\.forward"),
    Plant("moe", "not normalised", r"layers\.1\.Experts|Tensor\.(div|sum|truediv|__getitem__|mul)\."),
    Plant("moe", "capacity", r"layers\.1\.(Experts|experts\.)|__getitem__|where"),
    Plant("moe", "balance coefficient", r"Module\.root\.Mixture\.forward\.0|Tensor\.(r?mul|add)\."),
    # backward
    Plant("gpt", "wrong backward", r"layers\.1\.kernel\.Kernel\.backward\.0"),
    Plant(
        "gpt",
        "detached",
        r"layers\.1\.(up|norm2|kernel)\.|linear\.10\.backward|layer_norm\.3\.backward|Tensor\.add\.\d\.backward",
    ),
    Plant("conv", "wrong backward", r"blocks\.1\.kernel\.Kernel\.backward\.0"),
    Plant("lstm", "state cut", r"LSTMCell\.backward\.1[12]|lstm_cell\.1[12]\.backward"),
    Plant(
        "moe",
        "router detached",
        r"layers\.1\.router\.Linear\.backward|Tensor\.(div|sum|topk|softmax|__getitem__|mul)\.\d+\.backward",
    ),
    # between the micro-batches and in the optimizer
    Plant("gpt", "accumulation not divided", r"Tensor\.div\.0\.forward|Module\.root\.Gpt\.backward\.0"),
    Plant("gpt", "not clipped", _OPTIMIZER),
    Plant("gpt", "learning rate", _OPTIMIZER),
    Plant("lstm", "weight decay", _OPTIMIZER),
    Plant("moe", "beta2", _OPTIMIZER),
    Plant("gpt", "adam eps", _OPTIMIZER),
    Plant("conv", "nesterov", _OPTIMIZER, 0, _MOMENTUM),
    Plant("conv", "momentum", r"blocks\.1\.norm\.|batch_norm\.[25]\.forward"),
    Plant("lstm", "gradients kept", r"parameters_grad|_foreach_norm|^Parameter\.", 1),
]
