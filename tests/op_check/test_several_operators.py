"""A function that a device runs as several operators has the gradients of the last of them recorded, not its own."""

import torch

from trainprobe.op_check.cases import Case
from trainprobe.op_check.check import check


def test_gradients_of_an_operator_inside_the_function_are_not_held_against_it():
    torch.manual_seed(0)
    q, k, v = (torch.randn(4, 2, 8, 6, requires_grad=True) for _ in range(3))
    weights = (q @ k.transpose(-1, -2) / 6**0.5).softmax(-1).reshape(8, 8, 8)
    out = torch.bmm(weights, v.reshape(8, 8, 6))
    upstream = torch.randn(8, 8, 6)
    inside = torch.autograd.grad(out, [weights, v], upstream, retain_graph=True)
    case = Case(
        "Functional.scaled_dot_product_attention",
        (q.detach(), k.detach(), v.detach()),
        gradients=(upstream.view(4, 2, 8, 6),),
        results=(inside[0], inside[1].reshape(8, 8, 6)),
        requires_grad=(True, True, True),
    )
    checked = check(case, backward=True)
    assert checked.worst.outcome == "not checked"
    assert "several operators" in checked.worst.reason
    whole = torch.autograd.grad(out, [q, k, v], upstream)
    case.results = whole
    assert check(case, backward=True).worst.outcome in ("exact", "rounding")
    case.results = (whole[0] * 1.01, *whole[1:])
    assert check(case, backward=True).worst.outcome == "bug"
