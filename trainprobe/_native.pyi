"""What the compiled part is made of, as far as Python code names it by its type; the rest of it is used through `Any`.

Values and calls are not tracked by the garbage collector: a step makes thousands of them.
"""

from collections.abc import Mapping
from typing import Any

from trainprobe.engine.core.records import Kind, Phase

class Value:
    """A distinct tensor value that was looked at once; its numbers stand in row `row` of the step's partials."""

    row: int  # index into StepData.partials, -1 when nothing could be reduced (then `note` says why)
    type: str  # full class name as existing tools write it
    dtype: str  # "torch.float32", "Float32" (mindspore)
    shape: tuple[int, ...]  # -1 for the ragged dimension of a jagged tensor
    device: str
    requires_grad: bool | None
    note: str | None
    tensor: str | None
    extra: Mapping[str, Any] | None  # DTensor placements and mesh, and the like

    def __init__(
        self,
        row: int,
        dtype: str,
        shape: tuple[int, ...],
        *,
        type: str = "torch.Tensor",
        device: str = "cpu",
        requires_grad: bool | None = None,
        note: str | None = None,
        tensor: str | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None: ...
    def with_note(self, note: str) -> Value:
        """Return the same value with a note of its own; other places that refer to it keep theirs."""

class Call:
    """One forward or backward of a module or op, or one group of parameter values.

    Kind "parameter": the gradients that reached a module's own parameters, `params` {short name: Value}. Kind
    "state": what belongs to one parameter around the optimizer step, `name` its full name, `params` {"value" | "grad"
    | "exp_avg" | …: Value}.

    The trees `args`, `kwargs`, `out`, `params` hold `Value`s, plain scalars (int, float, bool, str, None), `Opaque`
    leaves, and nested lists and dicts of them. A backward call has its gradients of outputs in `args` and its
    gradients of inputs in `out`.
    """

    kind: Kind
    name: str
    call: int
    phase: Phase
    cls: str
    micro: int | None
    parent: Call | str | None  # enclosing call, or "optimizer" / "clip_grad"
    stack: int  # index into StepData.stacks
    args: Any
    kwargs: Any
    out: Any
    params: Any
    node: str | None  # autograd node whose gradients these are, for a backward op

    def __init__(
        self,
        kind: Kind,
        name: str,
        call: int,
        phase: Phase,
        *,
        cls: str = "",
        micro: int | None = None,
        parent: Call | str | None = None,
        stack: int = -1,
    ) -> None: ...

class ModuleInfo:
    """A module of the model as it is recorded: logical name, class, own parameters, and what is wanted of it."""

    @property
    def name(self) -> str: ...
    @property
    def cls(self) -> str: ...
    @property
    def parameters(self) -> tuple[tuple[str, Any], ...]: ...
    @property
    def flags(self) -> int: ...
    @property
    def selected(self) -> bool: ...
    def __init__(self, name: str, cls: str, parameters: tuple[tuple[str, Any], ...], flags: int, selected: bool) -> None: ...
