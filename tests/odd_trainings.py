"""Trainings with something odd in them: odd arguments, tensors, modules, optimizers, modes and transforms.

Each is a function of `watch(model, optimizer)`, whose context has `step()` and `note()`, and returns what must be equal with
and without the tool: losses, weights, and what the program's own modes counted.
"""

import collections
import copy
import dataclasses
import io
import pickle
import threading
import warnings

import torch
from torch import nn

CASES = {}


def case(f):
    CASES[f.__name__] = f
    return f


def net():
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def sgd(m):
    return torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)


def x(i):
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(i))


def plain(watch, model, step_of=None, opt=None, n=3):
    opt = opt or sgd(model)
    out = []
    with watch(model, opt) as p:
        for i in range(n):
            with p.step():
                loss = step_of(p, model, opt, i) if step_of else None
                if loss is None:
                    loss = model(x(i)).square().mean()
                p.note("loss", loss)
                opt.zero_grad()
                loss.backward()
                opt.step()
                out.append(loss.detach().clone())
    return out + [q.detach().clone() for q in model.parameters()]


@case
def func_vmap(watch):
    from torch.func import vmap

    def s(p, m, o, i):
        return vmap(m)(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def func_grad(watch):
    from torch.func import functional_call, grad

    def s(p, m, o, i):
        ps = dict(m.named_parameters())
        g = grad(lambda q: functional_call(m, q, (x(i),)).square().mean())({k: v.detach() for k, v in ps.items()})
        return m(x(i)).square().mean() + sum(v.sum() for v in g.values()) * 0

    return plain(watch, net(), s)


@case
def func_per_sample(watch):
    from torch.func import functional_call, grad, vmap

    def s(p, m, o, i):
        ps = {k: v.detach() for k, v in m.named_parameters()}

        def f(q, a):
            return functional_call(m, q, (a[None],)).square().mean()

        g = vmap(grad(f), in_dims=(None, 0))(ps, x(i))
        return m(x(i)).square().mean() + sum(v.sum() for v in g.values()) * 0

    return plain(watch, net(), s)


@case
def func_jvp(watch):
    from torch.func import jacrev, jvp

    def s(p, m, o, i):
        _a, t = jvp(m, (x(i),), (x(i + 9),))
        j = jacrev(m)(x(i))
        return m(x(i)).square().mean() + t.sum() * 0 + j.sum() * 0

    return plain(watch, net(), s)


@case
def fwad(watch):
    import torch.autograd.forward_ad as fw

    def s(p, m, o, i):
        with fw.dual_level():
            out = m(fw.make_dual(x(i), x(i + 9)))
            t = fw.unpack_dual(out).tangent.sum()
        return m(x(i)).square().mean() + t.detach() * 0

    return plain(watch, net(), s)


@case
def lazy_linear(watch):
    m = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(2))
    torch.manual_seed(0)
    return plain(watch, m)


@case
def lazy_batchnorm(watch):
    m = nn.Sequential(nn.Linear(4, 8), nn.LazyBatchNorm1d(), nn.Linear(8, 2))
    return plain(watch, m, opt=torch.optim.SGD(list(m.parameters()), lr=0.1))


class RaisesOnGetattr:
    def __getattr__(self, name):
        raise RuntimeError(f"no {name}")


class AnswersAnything:
    def __getattr__(self, name):
        return AnswersAnything()

    def __call__(self, *a, **k):
        return AnswersAnything()

    def __len__(self):
        return 10**12

    def __iter__(self):
        while True:
            yield AnswersAnything()


class BadEq:
    def __eq__(self, o):
        raise RuntimeError("eq")

    __hash__ = None

    def __bool__(self):
        raise RuntimeError("bool")

    def __repr__(self):
        raise RuntimeError("repr")

    def __len__(self):
        raise RuntimeError("len")


class BadClass:
    @property
    def __class__(self):
        raise RuntimeError("class")


class Takes(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)
        self.inner = Inner()

    def forward(self, t, odd=None, **kw):
        self.inner(odd, thing=odd)
        return self.b(self.a(t).relu())


class Inner(nn.Module):
    def forward(self, odd=None, thing=None):
        return odd


def odd_argument(make):
    def f(watch):
        def s(p, m, o, i):
            return m(x(i), make(), more=make()).square().mean()

        return plain(watch, Takes(), s)

    return f


class HostileDict(dict):
    def items(self):
        raise RuntimeError("items")

    def __iter__(self):
        raise RuntimeError("iter")


class HostileList(list):
    def __iter__(self):
        raise RuntimeError("iter")

    def __len__(self):
        raise RuntimeError("len")


class HostileTuple(tuple):
    def __iter__(self):
        raise RuntimeError("iter")


class HostileMapping(collections.abc.Mapping):
    def __getitem__(self, k):
        raise KeyError(k)

    def __iter__(self):
        yield BadEq()

    def __len__(self):
        return 1


class HostileStr(str):
    def __str__(self):
        raise RuntimeError("str")

    def __len__(self):
        raise RuntimeError("len")


class HostileInt(int):
    def __index__(self):
        raise RuntimeError("index")

    def __float__(self):
        raise RuntimeError("float")


@dataclasses.dataclass
class Data:
    t: torch.Tensor
    n: int = 3


@dataclasses.dataclass
class Unset:
    t: torch.Tensor = dataclasses.field(init=False)


NT = collections.namedtuple("NT", "a b")


def cyclic():
    a = []
    a.append(a)
    d = {"a": a}
    d["d"] = d
    return d


def deep():
    a = x(0)
    for _ in range(5000):
        a = [a]
    return a


def wide():
    return [x(0)] * 3000


def gen():
    yield x(0)


class RaisingTensor(torch.Tensor):
    @classmethod
    def __torch_function__(cls, f, types, args=(), kwargs=None):
        raise RuntimeError("torch function")


class RaisingShape(torch.Tensor):
    @property
    def shape(self):
        raise RuntimeError("shape")

    @property
    def dtype(self):
        raise RuntimeError("dtype")


class RaisingDispatch(torch.Tensor):
    @staticmethod
    def __new__(cls, e):
        return torch.Tensor._make_wrapper_subclass(cls, e.shape, dtype=e.dtype)

    @classmethod
    def __torch_dispatch__(cls, f, types, args=(), kwargs=None):
        raise RuntimeError("dispatch")


for name, make in {
    "raises_on_getattr": RaisesOnGetattr,
    "answers_anything": AnswersAnything,
    "bad_eq": BadEq,
    "bad_class": BadClass,
    "hostile_dict": lambda: HostileDict(a=x(0)),
    "hostile_list": lambda: HostileList([x(0)]),
    "hostile_tuple": lambda: HostileTuple([x(0)]),
    "hostile_mapping": HostileMapping,
    "hostile_str": lambda: HostileStr("abc"),
    "hostile_int": lambda: HostileInt(5),
    "dataclass": lambda: Data(x(0)),
    "unset_dataclass": Unset,
    "namedtuple": lambda: NT(x(0), [x(1)]),
    "cyclic": cyclic,
    "deep": deep,
    "wide": wide,
    "generator": gen,
    "raising_tensor": lambda: x(0).as_subclass(RaisingTensor),
    "raising_shape": lambda: x(0).as_subclass(RaisingShape),
    "raising_dispatch": lambda: RaisingDispatch(x(0)),
    "huge_int": lambda: 10**5000,
    "nan": lambda: float("nan"),
    "bytes": lambda: b"\xff" * 100,
    "surrogate": lambda: "\ud800abc",
    "surrogate_key": lambda: {"\ud800": x(0)},
    "nul_key": lambda: {"a\0/../b": x(0)},
    "int_keys": lambda: {1: x(0), (1, 2): x(1), None: x(2)},
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)], layout=torch.jagged),
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "csc": lambda: torch.eye(3).to_sparse_csc(),
    "mkldnn": lambda: torch.eye(3).to_mkldnn() if torch.backends.mkldnn.is_available() else None,
    "quantized": lambda: torch.quantize_per_tensor(x(0), 0.1, 0, torch.qint8),
    "quantized_channel": lambda: torch.quantize_per_channel(x(0), torch.ones(3), torch.zeros(3), 0, torch.qint8),
    "complex": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "complex32": lambda: torch.randn(3, dtype=torch.complex64).to(torch.complex32),
    "neg": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "zero_size": lambda: torch.empty(0, 4),
    "zero_dim": lambda: torch.tensor(3.0),
    "uint64": lambda: torch.tensor([2**64 - 1], dtype=torch.uint64),
    "uint16": lambda: torch.tensor([3], dtype=torch.uint16),
    "bits8": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.bits8),
    "uint4": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.uint4) if hasattr(torch, "uint4") else None,
    "fp4": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "e8m0": lambda: torch.zeros(3, dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "fp8": lambda: x(0).to(torch.float8_e4m3fn),
    "meta": lambda: torch.empty(10**9, 10**9, device="meta") if False else torch.empty(10**6, 10**6, device="meta"),
    "expanded": lambda: torch.ones(1).expand(2**22),
    "freed": lambda: (lambda t: (t.untyped_storage().resize_(0), t)[1])(torch.ones(100)),
    "negative_storage": lambda: torch.ones(100).as_strided((3,), (0,), 99),
    "overlap": lambda: torch.ones(100).as_strided((5, 5), (1, 1)),
    "numpy_readonly": lambda: torch.from_numpy(readonly()),
    "type": lambda: torch.Tensor,
    "module": lambda: nn.Linear(1, 1),
    "fn": lambda: torch.nn.functional.relu,
    "device": lambda: torch.device("cpu"),
    "generator_object": lambda: torch.Generator(),
    "size": lambda: torch.Size([1, 2]),
    "symint": lambda: None,
    "set_of_tensors": lambda: {1, 2},
    "params_dict": lambda: nn.ParameterDict({"a": nn.Parameter(x(0))}),
    "packed": lambda: nn.utils.rnn.pack_sequence([torch.randn(3, 2), torch.randn(2, 2)]),
    "many_dims": lambda: torch.ones([1] * 64),
    "masked": lambda: torch.masked.masked_tensor(x(0), x(0) > 0),
}.items():
    CASES["arg_" + name] = odd_argument(make)


def readonly():
    import numpy as np

    a = np.ones(4, np.float32)
    a.setflags(write=False)
    return a


@case
def fp8_parameter(watch):
    m = net()
    m.register_parameter("scale8", nn.Parameter(torch.zeros(4).to(torch.float8_e4m3fn), requires_grad=False))
    return plain(watch, m, opt=sgd(m[0]))


@case
def int_and_odd_parameters(watch):
    m = net()
    m.register_parameter("i", nn.Parameter(torch.zeros(4, dtype=torch.int8), requires_grad=False))
    m.register_parameter("e", nn.Parameter(torch.zeros(0)))
    m.register_buffer("q", torch.quantize_per_tensor(x(0), 0.1, 0, torch.qint8))
    m.register_buffer("csr", torch.eye(3).to_sparse_csr())
    m.register_buffer("none", None)
    m.register_parameter("nonep", None)
    m.register_buffer("meta", torch.empty(3, device="meta"))
    m.register_buffer("fp4", torch.zeros(3, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    return plain(watch, m, opt=sgd(m[0]))


@case
def meta_parameter(watch):
    m = net()
    m.register_parameter("m", nn.Parameter(torch.empty(3, 3, device="meta")))
    return plain(watch, m, opt=sgd(m[0]))


@case
def meta_module(watch):
    m = net()
    with torch.device("meta"):
        big = nn.Linear(10, 10)

    def s(p, m, o, i):
        big(torch.empty(3, 10, device="meta"))
        return m[2](m[1](m[0](x(i)))).square().mean()

    m.add_module("unused", big)
    return plain(watch, m, s, opt=sgd(m[0]))


@case
def meta_all(watch):
    with torch.device("meta"):
        m = net()

    def s(p, m, o, i):
        return m(x(i).to("meta")).square().mean()

    return plain(watch, m, s)


@case
def sparse_parameter_gradient(watch):
    m = nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True, mode="sum"), nn.Linear(4, 2))

    def s(p, m, o, i):
        return m(torch.tensor([[1, 2], [3, 4 + i]])).square().mean()

    return plain(watch, m, s, opt=torch.optim.SGD(m.parameters(), lr=0.1))


@case
def nested_parameter(watch):
    m = net()
    m.register_parameter("n", nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])))
    return plain(watch, m, opt=sgd(m[0]))


@case
def double_midrun(watch):
    def s(p, m, o, i):
        if i == 1:
            m.double()
        return m(x(i).to(m[0].weight.dtype)).square().mean()

    m = net()
    return plain(watch, m, s, opt=torch.optim.SGD(m.parameters(), lr=0.1), n=4)


@case
def half_midforward(watch):
    def s(p, m, o, i):
        m(x(i).to(m[0].weight.dtype)).square().mean()
        if i == 1:
            m.to(torch.bfloat16)
        if i == 2:
            m.to(torch.float32)
        return m(x(i).to(m[0].weight.dtype)).square().mean()

    m = net()
    return plain(watch, m, s, opt=torch.optim.SGD(m.parameters(), lr=0.1), n=4)


@case
def notes(watch):
    def s(p, m, o, i):
        loss = m(x(i)).square().mean()
        for v in (
            "high",
            None,
            [1, 2],
            torch.ones(3),
            torch.ones(2, 2, dtype=torch.complex64),
            10**500,
            AnswersAnything(),
            RaisesOnGetattr(),
            HostileInt(3),
            b"3",
            "3.5",
            complex(1, 2),
            torch.empty(0),
            torch.empty(2, device="meta"),
            float("inf"),
            torch.tensor(True),
            torch.eye(3).to_sparse(),
            {"a": 1},
            x(0).as_subclass(RaisingTensor),
            1j,
            True,
        ):
            p.note("odd", v)
            p.note("odd" + str(type(v).__name__), v)
        for n in (None, 3, "a/b", "\ud800", "", "=1+1", ("a",), []):
            p.note(n, 1.0)
        return loss

    return plain(watch, net(), s)


class ReturnsSelf(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(4, 2)

    def forward(self, t):
        self.y = self.lin(t)
        return self


@case
def returns_self(watch):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = ReturnsSelf()

        def forward(self, t):
            return self.r(t).y

    return plain(watch, M())


@case
def own_getattribute(watch):
    class M(nn.Linear):
        def __getattribute__(self, k):
            if k in ("__dict__x", "foo"):
                raise RuntimeError("hidden")
            return super().__getattribute__(k)

    class S(nn.Linear):
        __slots__ = ("a",)

        def __eq__(self, o):
            raise RuntimeError("eq")

        __hash__ = nn.Module.__hash__

        def __bool__(self):
            raise RuntimeError("bool")

        def __repr__(self):
            raise RuntimeError("repr")

    class L(nn.Sequential):
        def __len__(self):
            raise RuntimeError("len")

    class P(nn.Linear):
        @property
        def training_(self):
            raise RuntimeError

        @property
        def evil(self):
            raise RuntimeError("evil")

    return plain(watch, L(M(4, 8), S(8, 8), P(8, 2)))


@case
def shared_numpy(watch):
    import numpy as np

    a = np.random.RandomState(0).randn(8, 4).astype("f4")
    m = net()
    m[0].weight = nn.Parameter(torch.from_numpy(a))
    b = readonly()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m.register_buffer("ro", torch.from_numpy(b))
    return plain(watch, m)


@case
def hooks_that_raise(watch):
    m = net()
    n = [0]

    def hook(*a):
        n[0] += 1
        if n[0] in (2, 5):
            raise ValueError("mine")

    m[0].register_forward_hook(hook)
    m[2].register_full_backward_hook(hook)
    out = []
    opt = sgd(m)
    with watch(m, opt) as p:
        for i in range(6):
            try:
                with p.step():
                    loss = m(x(i)).square().mean()
                    p.note("loss", loss)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    out.append(loss.detach())
            except ValueError as e:
                assert str(e) == "mine"
                out.append(torch.tensor(-1.0))
    return out


@case
def keyboard_interrupt(watch):
    m = net()
    opt = sgd(m)
    out = []
    n = [0]

    class K(nn.Module):
        def forward(self, t):
            n[0] += 1
            if n[0] == 2:
                raise KeyboardInterrupt
            return t

    m.append(K())
    try:
        with watch(m, opt) as p:
            for i in range(6):
                with p.step():
                    loss = m(x(i)).square().mean()
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
                    out.append(loss.detach())
    except KeyboardInterrupt:
        out.append(torch.tensor(7.0))
    return out


@case
def fake_mode(watch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    def s(p, m, o, i):
        with FakeTensorMode(allow_non_fake_inputs=True):
            m(torch.empty(3, 4)).sum()
        return m(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def fake_whole(watch):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        m = net()
        opt = torch.optim.SGD(m.parameters(), lr=0.1)
        with watch(m, opt) as p:
            for _i in range(2):
                with p.step():
                    loss = m(torch.empty(3, 4)).square().mean()
                    p.note("loss", loss)
                    loss.backward()
                    opt.step()
                    opt.zero_grad()
    return []


@case
def jit_trace(watch):
    def s(p, m, o, i):
        t = torch.jit.trace(m, x(i))
        return t(x(i)).square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return plain(watch, net(), s)


@case
def jit_script(watch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        m = net()
        m[0] = torch.jit.script(m[0])
        return plain(watch, m)


@case
def export(watch):
    def s(p, m, o, i):
        if i == 1:
            e = torch.export.export(m, (x(i),))
            return e.module()(x(i)).square().mean() * 0 + m(x(i)).square().mean()
        return None

    return plain(watch, net(), s)


@case
def fx_trace(watch):
    def s(p, m, o, i):
        g = torch.fx.symbolic_trace(m)
        return g(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def make_fx(watch):
    def s(p, m, o, i):
        from torch.fx.experimental.proxy_tensor import make_fx

        g = make_fx(lambda t: m(t).sum())(x(i))
        return m(x(i)).square().mean() + g(x(i)).detach() * 0

    return plain(watch, net(), s)


@case
def inference(watch):
    def s(p, m, o, i):
        with torch.inference_mode():
            a = m(x(i))
            b = a * 2
        return m(x(i)).square().mean() + b.sum().clone().detach() * 0

    return plain(watch, net(), s)


@case
def copies(watch):
    def s(p, m, o, i):
        c = copy.deepcopy(m)
        c(x(i))
        b = io.BytesIO()
        pickle.dump(m, b)
        q = pickle.loads(b.getvalue())
        copy.deepcopy(o)
        pickle.dumps(o.state_dict())
        torch.save(m, io.BytesIO())
        return q(x(i)).sum() * 0 + m(x(i)).square().mean()

    return plain(watch, net(), s)


class DS(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return x(i)[0]


class DSM(DS):
    def __init__(self, m):
        self.m = m

    def __getitem__(self, i):
        with torch.no_grad():
            return self.m(x(i))[0].detach()


@case
def fork_loader(watch):
    m = net()
    opt = sgd(m)
    out = []
    with watch(m, opt) as p:
        with p.step():
            loss = m(x(0)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        with p.step():
            dl = torch.utils.data.DataLoader(DSM(net()), batch_size=4, num_workers=1)
            out += [b.clone() for b in dl]
            loss = m(x(0)).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
        for b in torch.utils.data.DataLoader(DS(), batch_size=4, num_workers=1):
            with p.step():
                loss = m(b).square().mean()
                loss.backward()
                opt.step()
                opt.zero_grad()
                out.append(loss.detach())
    return out


@case
def threads(watch):
    other = net()

    def s(p, m, o, i):
        res = {}

        def f():
            for _ in range(3):
                res["y"] = m(x(i)).detach()
                other(x(i)).sum().backward()

        t = threading.Thread(target=f)
        t.start()
        t.join()
        return m(x(i)).square().mean() + res["y"].sum() * 0

    return plain(watch, net(), s)


class Gen(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 8), nn.Linear(8, 2)

    def forward(self, t):
        h = self.a(t)
        yield h
        yield self.b(h)


@case
def generator_module(watch):
    def s(p, m, o, i):
        g = m(x(i))
        next(g)
        return next(g).square().mean()

    return plain(watch, Gen(), s)


class Async(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 2)

    async def forward(self, t):
        return self.a(t)


@case
def async_module(watch):
    import asyncio

    def s(p, m, o, i):
        return asyncio.run(m(x(i))).square().mean()

    return plain(watch, Async(), s)


class CountDispatch(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = collections.Counter()

    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        self.n[str(f)] += 1
        return f(*args, **(kwargs or {}))


class CountFunction(torch.overrides.TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.n = collections.Counter()

    def __torch_function__(self, f, types, args=(), kwargs=None):
        self.n[getattr(f, "__name__", str(f))] += 1
        return f(*args, **(kwargs or {}))


@case
def dispatch_mode_whole(watch):
    c = CountDispatch()
    with c:
        out = plain(watch, net())
    return [*out, torch.tensor(sum(c.n.values())), c.n]


@case
def dispatch_mode_adam(watch):
    c = CountDispatch()
    m = net()
    m.append(nn.BatchNorm1d(2))
    with c:
        out = plain(watch, m, opt=torch.optim.AdamW(m.parameters()))
    return [*out, torch.tensor(sum(c.n.values())), c.n]


@case
def dispatch_mode_inner(watch):
    c = CountDispatch()

    def s(p, m, o, i):
        with c:
            return m(x(i)).square().mean()

    return [*plain(watch, net(), s), c.n]


@case
def dispatch_mode_backward(watch):
    c = CountDispatch()
    m = net()
    opt = sgd(m)
    with watch(m, opt) as p:
        for i in range(3):
            with p.step():
                loss = m(x(i)).square().mean()
                p.note("loss", loss)
                with c:
                    loss.backward()
                with c:
                    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad()
    return [c.n]


@case
def function_mode_whole(watch):
    c = CountFunction()
    with c:
        out = plain(watch, net())
    return [*out, c.n]


@case
def function_mode_inner(watch):
    c = CountFunction()
    m = net()
    opt = sgd(m)
    with watch(m, opt) as p:
        for i in range(3):
            with p.step():
                with c:
                    loss = m(x(i)).square().mean()
                p.note("loss", loss)
                with c:
                    loss.backward()
                with c:
                    torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
                    opt.step()
                    opt.zero_grad()
    return [c.n]


@case
def flop_counter(watch):
    from torch.utils.flop_counter import FlopCounterMode

    c = FlopCounterMode(display=False)
    with c:
        out = plain(watch, net())
    return [*out, c.get_total_flops()]


@case
def complex_weights(watch):
    m = nn.Sequential(nn.Linear(4, 8, dtype=torch.complex64), nn.Linear(8, 2, dtype=torch.complex64))

    def s(p, m, o, i):
        return m(x(i).to(torch.complex64)).abs().square().mean()

    return plain(watch, m, s)


@case
def complex_adam(watch):
    m = nn.Sequential(nn.Linear(4, 8, dtype=torch.complex64), nn.Linear(8, 2, dtype=torch.complex64))

    def s(p, m, o, i):
        return m(x(i).to(torch.complex64)).abs().square().mean()

    return plain(watch, m, s, opt=torch.optim.AdamW(m.parameters()))


@case
def autocast_off_and_anomaly(watch):
    def s(p, m, o, i):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return m(x(i)).float().square().mean()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.set_detect_anomaly(True):
            return plain(watch, net(), s)


@case
def default_device_meta(watch):
    m = net()

    def s(p, m, o, i):
        return m(x(i)).square().mean()

    torch.set_default_device("meta")
    try:
        return plain(watch, m, lambda p, m, o, i: m(X[i]).square().mean())
    finally:
        torch.set_default_device(None)


X = [x(i) for i in range(5)]


@case
def default_dtype_half(watch):
    m = net()
    torch.set_default_dtype(torch.float16)
    try:
        return plain(watch, m, lambda p, m, o, i: m(X[i]).square().mean())
    finally:
        torch.set_default_dtype(torch.float32)


@case
def deterministic_fill(watch):
    torch.use_deterministic_algorithms(True)
    try:
        return plain(watch, net())
    finally:
        torch.use_deterministic_algorithms(False)


@case
def parametrized(watch):
    m = net()
    torch.nn.utils.parametrizations.weight_norm(m[0])
    torch.nn.utils.parametrizations.spectral_norm(m[2])
    return plain(watch, m)


@case
def optimizer_odd_groups(watch):
    m = net()
    opt = torch.optim.SGD(
        [
            {"params": [m[0].weight, m[0].bias], "lr": torch.tensor(0.1), "odd": AnswersAnything(), "name": RaisesOnGetattr()},
            {"params": list(m[2].parameters()), "odd": "x", "name": 3},
        ],
        lr=0.1,
    )
    opt.state[m[0].weight]["odd"] = AnswersAnything()
    opt.state[m[0].weight]["text"] = "x"
    opt.state["global"] = {"a": RaisesOnGetattr()}
    opt.state[m[2].weight]["sparse"] = torch.eye(3).to_sparse()
    return plain(watch, m, opt=opt)


@case
def optimizer_not_torch(watch):
    m = net()

    class Opt:
        def __init__(self):
            self.param_groups = [{"params": list(m.parameters())}]

        def step(self):
            with torch.no_grad():
                for p in m.parameters():
                    p -= 0.1 * p.grad

        def zero_grad(self):
            for p in m.parameters():
                p.grad = None

    return plain(watch, m, opt=Opt())


@case
def no_optimizer(watch):
    m = net()
    out = []
    with watch(m, None) as p:
        for i in range(3):
            with p.step():
                loss = m(x(i)).square().mean()
                m.zero_grad()
                loss.backward()
                out.append(loss.detach())
                with torch.no_grad():
                    for q in m.parameters():
                        q.sub_(q.grad, alpha=0.1)
    return out


@case
def names_odd(watch):
    m = nn.Module()
    m.lin = nn.Linear(4, 2)
    m._modules["a/b"] = nn.Linear(2, 2)
    m._modules["=cmd()"] = nn.Linear(2, 2)
    m._modules["\ud800"] = nn.Linear(2, 2)
    m._modules["n\nl"] = nn.Linear(2, 2)
    m._modules[".."] = nn.Linear(2, 2)
    m._modules["x" * 400] = nn.Linear(2, 2)

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = m

        def forward(self, t):
            for k in self.m._modules.values():
                t = k(t)
            return t

    return plain(watch, M())


@case
def module_freed_midstep(watch):
    m = net()

    def s(p, m, o, i):
        loss = m(x(i)).square().mean()
        if i == 1:
            m[0] = nn.Linear(4, 8)
        if i == 2:
            del m[1]
        return loss

    return plain(watch, m, s)


@case
def parameter_deleted(watch):
    m = net()

    def s(p, m, o, i):
        if i == 1:
            m[0].bias = None
        if i == 2:
            m[2].weight = nn.Parameter(torch.zeros(2, 8))
        return m(x(i)).square().mean()

    return plain(watch, m, s, opt=torch.optim.SGD(m.parameters(), lr=0.1))


@case
def retain_and_twice(watch):
    def s(p, m, o, i):
        loss = m(x(i)).square().mean()
        loss.backward(retain_graph=True)
        g = torch.autograd.grad(loss, list(m.parameters()), create_graph=True)
        return loss + sum(q.square().sum() for q in g)

    return plain(watch, net(), s)


@case
def tensor_subclass_param(watch):
    class P(torch.Tensor):
        pass

    m = net()
    m[0].weight = nn.Parameter(torch.randn(8, 4).as_subclass(P))
    return plain(watch, m)


@case
def raising_buffer(watch):
    m = net()
    m._buffers["b"] = x(0).as_subclass(RaisingTensor)
    return plain(watch, m)


@case
def raising_buffer_shape(watch):
    m = net()
    m._buffers["b"] = x(0).as_subclass(RaisingShape)
    return plain(watch, m)


@case
def swap_and_data(watch):
    def s(p, m, o, i):
        if i == 1:
            m[0].weight.data = m[0].weight.data.clone().t().contiguous().t()
        if i == 2:
            m[0].weight.grad = torch.zeros_like(m[0].weight)
        return m(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def del_grad_midbackward(watch):
    m = net()
    m[0].weight.register_hook(lambda g: None)
    m[0].weight.register_post_accumulate_grad_hook(lambda q: setattr(q, "grad", None))
    return plain(watch, m)


@case
def saved_tensor_hooks(watch):
    def s(p, m, o, i):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.numpy() if not t.requires_grad else t,
            lambda t: torch.from_numpy(t) if not isinstance(t, torch.Tensor) else t,
        ):
            return m(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def offload_cpu(watch):
    def s(p, m, o, i):
        with torch.autograd.graph.save_on_cpu():
            return m(x(i)).square().mean()

    return plain(watch, net(), s)


@case
def gc_off_recursion(watch):

    class Rec(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.Linear(4, 4)

        def forward(self, t, n=60):
            return self.loss(t) if n == 0 else self(t, n - 1) * 1.0

    return plain(watch, Rec())


@case
def state_dict_raises(watch):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.loss = nn.Linear(4, 2)

        def forward(self, a):
            return self.loss(a)

        def state_dict(self, *a, **k):
            raise RuntimeError("state_dict")

    return plain(watch, M())


@case
def scaler(watch):
    m = net()
    o = sgd(m)
    sc = torch.amp.GradScaler("cpu")
    out = []
    with watch(m, o) as p:
        for i in range(4):
            with p.step():
                loss = m(x(i)).square().mean()
                if i == 2:
                    loss = loss * float("inf")
                o.zero_grad()
                sc.scale(loss).backward()
                sc.unscale_(o)
                sc.step(o)
                sc.update()
                out.append(loss.detach())
    return out


@case
def fd_like_open_twice(watch):
    m = net()
    o = sgd(m)
    out = []
    with watch(m, o) as p:
        for i in range(3):
            p.open(m, o)
            with p.step():
                loss = m(x(i)).square().mean()
                o.zero_grad()
                loss.backward()
                o.step()
                out.append(loss.detach())
        p.open(net(), None)
        p.open([m, net()], [o, o])
        with p.step():
            m(x(0)).sum().backward()
    return out


@case
def lstm_packed(watch):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.r = nn.LSTM(4, 4, batch_first=True)

        def forward(self, t):
            return self.r(nn.utils.rnn.pack_padded_sequence(t[None].expand(2, 3, 4), [3, 2], batch_first=True))[0].data

    return plain(watch, M())


@case
def checkpointing(watch):
    from torch.utils.checkpoint import checkpoint

    def s(p, m, o, i):
        return (
            checkpoint(m, x(i), use_reentrant=False).square().mean()
            + checkpoint(m, x(i).requires_grad_(), use_reentrant=True).square().mean()
        )

    return plain(watch, net(), s)


@case
def compile_eager(watch):
    m = net()
    c = torch.compile(m, backend="eager")
    return plain(watch, m, lambda p, m, o, i: c(x(i)).square().mean())


@case
def custom_op(watch):
    def s(p, m, o, i):
        return torch.ops.odd.mine(m(x(i))).square().mean()

    if not hasattr(torch.ops.odd, "mine"):

        @torch.library.custom_op("odd::mine", mutates_args=())
        def mine(a: torch.Tensor) -> torch.Tensor:
            return a * 1

        mine.register_autograd(lambda ctx, g: g)
    return plain(watch, net(), s)
