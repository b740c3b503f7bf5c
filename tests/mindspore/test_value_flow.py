"""What the source of a cell proves: whether its result is a new value that nothing else uses, and of which arguments."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import pytest
from mindspore import nn, ops

from trainprobe.engine.capture.mindspore.value_flow import FlowReader


class Holder(nn.Cell):
    """Has members with the names of methods of tensors, which hand their argument on."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.dense, self.exp = nn.Identity(), nn.Identity(), nn.Identity()


def doubled(x: Any) -> Any:
    return x * x


class Base(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Dense(2, 2), nn.Dense(2, 2)
        self.held, self.layers = nn.CellList([Holder()]), nn.CellList([nn.Dense(2, 2), nn.Tanh()])
        self.flag = True

    def own(self, x: Any) -> Any:
        return self.a(x)


class Plain(Base):
    def construct(self, x: Any) -> Any:
        return self.b(self.a(x))


class Helped(Base):
    def construct(self, x: Any) -> Any:
        return self.own(doubled(self.b(x)))


class Looped(Base):
    def construct(self, x: Any) -> Any:
        for layer in self.layers:
            x = layer(x)
        return x


class Added(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        y += self.b(x)
        return y


class Early(Base):
    def construct(self, x: Any) -> Any:
        if self.flag:
            return self.a(x)
        return self.b(x)


class Handed(Base):
    def construct(self, x: Any) -> Any:
        if self.flag:
            return x
        return self.b(x)


class Alias(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        z = y
        return z, y


class UsedTwice(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        ops.print_(self.b(y))
        return y


class InAContainer(Base):
    def construct(self, x: Any) -> Any:
        pair = (self.a(x), x)
        return pair[0]


class MemberLikeAMethod(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        return self.held[0].relu(y) + y


class MemberLikeAnOperator(Base):
    def construct(self, x: Any) -> Any:
        return self.held[0].dense(x)


class MemberOfEither(Base):
    def construct(self, x: Any) -> Any:
        one = self.held[-1]
        if self.flag:
            one = self.held[0]
        return one.exp(x)


class BranchesThatUse(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        if self.flag:
            ops.print_(self.b(y))
        return y


class EitherBranch(Base):
    def construct(self, x: Any) -> Any:
        y = self.a(x)
        if self.flag:
            z = self.b(y)
        else:
            z = self.a(y)
            z = z * z + y
        return z


class Closure(Base):
    def construct(self, x: Any) -> Any:
        def inner(y: Any) -> Any:
            return y * x

        return inner(self.a(x))


class Same(Base):
    def construct(self, x: Any) -> Any:
        return ops.identity(x)


class Turned(Base):
    def construct(self, x: Any) -> Any:
        return self.a(x).t()


class Unused(Base):
    def construct(self, x: Any, y: Any) -> Any:
        return self.a(x)


class Hooked(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.register_forward_hook(lambda cell, given, out: None)


class Compiled(Base):
    @ms.jit
    def construct(self, x: Any) -> Any:
        return self.a(x)


# of `x * x` it is not known whether it depends on x: it may be a constant 0
PROVEN = {Plain: {0}, Helped: set(), Looped: {0}, Added: {0}, Early: {0}, Turned: {0}, Unused: {0}, EitherBranch: {0}}
UNPROVEN = (
    Handed,
    MemberOfEither,
    BranchesThatUse,
    Alias,
    UsedTwice,
    InAContainer,
    MemberLikeAMethod,
    MemberLikeAnOperator,
    Closure,
    Same,
    Hooked,
    Compiled,
)


@pytest.mark.parametrize("kind", PROVEN)
def test_a_result_that_is_proven_to_be_new_is_recorded_with_the_arguments_that_it_needs(kind: Any) -> None:
    flow = FlowReader().cell(kind())
    assert (flow.new, {*flow.used}) == (True, PROVEN[kind])


@pytest.mark.parametrize("kind", UNPROVEN)
def test_what_is_not_proven_is_not_assumed(kind: Any) -> None:
    assert not FlowReader().cell(kind()).new
