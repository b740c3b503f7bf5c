"""CPU shim for megatron.core >= 0.16 (TEST HARNESS ONLY).

Each patch has a name; ``install(only=..., skip=...)`` or the environment variable
``MEG_SHIM_SKIP=name,name`` switch single patches off (used for the ablation run that proves
which patch is needed where).

Rule of the shim: it never changes numerics.  It only (a) answers "what is the current
device?" with ``cpu``, (b) turns explicit ``device="cuda"`` in tensor factories into ``cpu``,
(c) turns streams/events/synchronize into no-ops and (d) lets Megatron's "CUDA" RNG tracker use
the CPU generator.  ``torch.cuda.is_available()`` keeps answering False.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import os
import sys

import torch

_CPU = torch.device("cpu")
_REGISTRY = {}
INSTALLED = []
HITS = collections.Counter()  # (patch, file:line in megatron) -> count, with MEG_SHIM_TRACE=1
_TRACE = os.environ.get("MEG_SHIM_TRACE") == "1"


def _hit(patch):
    if not _TRACE:
        return
    f = sys._getframe(1)
    while f is not None:
        name = f.f_code.co_filename
        if f"{os.sep}megatron{os.sep}" in name:
            HITS[(patch, f"{name.split(os.sep + 'megatron' + os.sep)[-1]}:{f.f_lineno}")] += 1
            return
        f = f.f_back


def _patch(name):
    def deco(fn):
        _REGISTRY[name] = fn
        return fn

    return deco


def _is_cuda(dev):
    if dev is None or isinstance(dev, int):
        return isinstance(dev, int) and not isinstance(dev, bool)
    if isinstance(dev, str):
        return dev.startswith("cuda")
    return getattr(dev, "type", None) == "cuda"


@_patch("current_device")
def _current_device():
    # ~60 call sites: `device=torch.cuda.current_device()`
    torch.cuda.current_device = lambda: (_hit("current_device"), _CPU)[1]


@_patch("factories")
def _factories():
    # `torch.zeros(..., device="cuda")` and friends
    for fn_name in (
        "tensor",
        "zeros",
        "ones",
        "empty",
        "full",
        "arange",
        "rand",
        "randn",
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "randint",
        "as_tensor",
    ):
        orig = getattr(torch, fn_name)

        @functools.wraps(orig)
        def wrapped(*args, __orig=orig, **kw):
            if _is_cuda(kw.get("device")):
                _hit("factories")
                kw["device"] = _CPU
            kw.pop("pin_memory", None)  # also of a tensor that is made on the CPU and moved
            return __orig(*args, **kw)

        setattr(torch, fn_name, wrapped)


@_patch("tensor_moves")
def _tensor_moves():
    # tensor.cuda(), module.cuda(), tensor.to("cuda")
    torch.Tensor.cuda = lambda self, *a, **k: (_hit("tensor_moves"), self)[1]
    torch.nn.Module.cuda = lambda self, *a, **k: self
    orig_to = torch.Tensor.to

    @functools.wraps(orig_to)
    def to(self, *args, **kw):
        if args and not isinstance(args[0], (torch.dtype, torch.Tensor)) and _is_cuda(args[0]):
            _hit("tensor_moves")
            args = (_CPU, *args[1:])
        if _is_cuda(kw.get("device")):
            _hit("tensor_moves")
            kw["device"] = _CPU
        return orig_to(self, *args, **kw)

    torch.Tensor.to = to


@_patch("tensor_type")
def _tensor_type():
    # optimizers compare `param.type()` with the literal 'torch.cuda.FloatTensor' etc.
    orig = torch.Tensor.type

    @functools.wraps(orig)
    def type_(self, *args, **kw):
        out = orig(self, *args, **kw)
        if not args and not kw and isinstance(out, str) and out.startswith("torch.") and not out.startswith("torch.cuda."):
            _hit("tensor_type")
            out = "torch.cuda." + out[len("torch.") :]
        return out

    torch.Tensor.type = type_


class _Event:
    def __init__(self, *a, **k):
        _hit("streams")

    def record(self, *a, **k):
        pass

    def wait(self, *a, **k):
        pass

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, other):
        return 0.0


class _Stream(_Event):
    def wait_stream(self, *a):
        pass

    def wait_event(self, *a):
        pass

    def record_event(self, event=None):
        return event or _Event()

    def __enter__(self):
        return self

    def __exit__(self, *a):
        return False


@_patch("streams")
def _streams():
    one = _Stream()
    torch.cuda.synchronize = lambda *a, **k: _hit("streams")
    torch.cuda.Stream = _Stream
    torch.cuda.Event = _Event
    torch.cuda.current_stream = lambda *a, **k: (_hit("streams"), one)[1]
    torch.cuda.default_stream = lambda *a, **k: (_hit("streams"), one)[1]
    torch.cuda.stream = lambda s=None: (_hit("streams"), contextlib.nullcontext())[1]
    torch.Tensor.record_stream = lambda self, s: None


@_patch("rng")
def _rng():
    # Megatron's tracker saves/forks/sets "cuda" states: bind it to the CPU generator.
    torch.cuda.get_rng_state = lambda *a, **k: (_hit("rng"), torch.get_rng_state())[1]
    torch.cuda.set_rng_state = lambda st, *a, **k: torch.set_rng_state(st)
    torch.cuda.random.get_rng_state = torch.cuda.get_rng_state
    # (not manual_seed_all: torch.manual_seed() itself calls it)
    torch.cuda.manual_seed = lambda seed: (_hit("rng"), torch.random.default_generator.manual_seed(int(seed)))[1]
    import megatron.core.tensor_parallel.random as mrandom

    def _set(new_state, device=-1, graph_safe=False):
        _hit("rng")
        torch.set_rng_state(new_state)

    mrandom._get_cuda_rng_state = lambda *a, **k: (_hit("rng"), torch.get_rng_state())[1]
    mrandom._set_cuda_rng_state = _set


@_patch("rng_quiet")
def _rng_quiet():
    # fork() warns 'CPU RNG state changed within GPU RNG context' (it is the same generator now)
    import logging

    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)


@_patch("misc")
def _misc():
    for mod, fn in (
        (torch.cuda, "set_device"),
        (torch.cuda, "empty_cache"),
        (torch.cuda.nvtx, "range_push"),
        (torch.cuda.nvtx, "range_pop"),
    ):
        setattr(mod, fn, lambda *a, **k: _hit("misc"))


@_patch("gloo_avg")
def _gloo_avg():
    # gloo has no ReduceOp.AVG; used by average_in_collective and average_gradients_across_tp_domain
    import torch.distributed as dist

    orig = dist.all_reduce

    @functools.wraps(orig)
    def all_reduce(tensor, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if op == dist.ReduceOp.AVG:
            _hit("gloo_avg")
            tensor /= dist.get_world_size(group)
            op = dist.ReduceOp.SUM
        return orig(tensor, op=op, group=group, async_op=async_op)

    dist.all_reduce = all_reduce


@_patch("moe_no_te")
def _moe_no_te():
    # 0.16.1 bug: moe_utils uses `te_general_gemm` although its import failed with TE absent
    import megatron.core.transformer.moe.moe_utils as mu

    if not hasattr(mu, "te_general_gemm"):
        mu.te_general_gemm = None


@_patch("recompute_no_te")
def _recompute_no_te():
    # 0.16.1 bug: CheckpointWithoutOutput() default fp8=False is taken as "fp8 on" (`is not None`)
    # and then needs TE's FP8GlobalStateManager (selective recompute of layernorm/moe_act/mla).
    import megatron.core.tensor_parallel.random as mrandom

    if getattr(mrandom, "HAVE_TE", False):
        return
    init = mrandom.CheckpointWithoutOutput.__init__

    def __init__(self, *args, **kw):
        init(self, *args, **kw)
        self.fp8 = False

    mrandom.CheckpointWithoutOutput.__init__ = __init__


@_patch("distopt_torch_adam")
def _distopt_torch_adam():
    # With plain torch AdamW (no Apex/TE), DistributedOptimizer.state_dict() asserts exactly one
    # `step` value, so a *fresh* optimizer cannot build its sharded_state_dict -> cannot load a
    # torch_dist checkpoint.  Give the empty state a zero step first.
    import megatron.core.optimizer.distrib_optimizer as do

    if do.HAVE_APEX_OR_TE:
        return
    orig = do.DistributedOptimizer.state_dict

    def state_dict(self):
        if len(self.optimizer.state) == 0:
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    self.optimizer.state[p] = {
                        "step": torch.tensor(0.0),
                        "exp_avg": torch.zeros_like(p),
                        "exp_avg_sq": torch.zeros_like(p),
                    }
        return orig(self)

    do.DistributedOptimizer.state_dict = state_dict

    # ... `fully_reshardable` payload has no `step` (it travels in param_groups) ...
    set_orig = do.DistributedOptimizer._set_main_param_and_optimizer_states

    def _set(self, model_param, tensors):
        if "step" not in tensors:
            gi, go = self.model_param_group_index_map[model_param]
            st = self.optimizer.state[self.optimizer.param_groups[gi]["params"][go]]
            if "step" in st:
                tensors = {**tensors, "step": st["step"]}
        return set_orig(self, model_param, tensors)

    do.DistributedOptimizer._set_main_param_and_optimizer_states = _set

    # ... and load_state_dict() hands ONE shared `step` tensor to every param: un-share it.
    load_orig = do.DistributedOptimizer.load_state_dict

    def load_state_dict(self, sd):
        out = load_orig(self, sd)
        for st in self.optimizer.state.values():
            if torch.is_tensor(st.get("step")):
                st["step"] = st["step"].clone()
        return out

    do.DistributedOptimizer.load_state_dict = load_state_dict


@_patch("moe_splits")
def _moe_splits():
    # `maybe_move_tensor_to_cpu` only converts split sizes to numpy when the tensor is_cuda; on a
    # CPU tensor they stay tensors, which all_to_all_single() refuses.
    import megatron.core.transformer.moe.moe_utils as mu
    import megatron.core.transformer.moe.token_dispatcher as td

    def move(tensor, as_numpy=False, record_stream=False):
        _hit("moe_splits")
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    mu.maybe_move_tensor_to_cpu = td.maybe_move_tensor_to_cpu = move


@_patch("gloo_uneven")
def _gloo_uneven():
    # NCCL accepts uneven all_gather/reduce_scatter lists (EP x expert-TP > 1); gloo does not.
    import torch.distributed as dist

    gather, scatter = dist.all_gather, dist.reduce_scatter

    @functools.wraps(gather)
    def all_gather(tensor_list, tensor, group=None, async_op=False):
        if len({tuple(t.shape) for t in tensor_list}) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        me = dist.get_rank(group)
        tensor_list[me].copy_(tensor)
        for r, t in enumerate(tensor_list):
            dist.broadcast(t, src=dist.get_global_rank(group, r), group=group)
        return None

    @functools.wraps(scatter)
    def reduce_scatter(output, input_list, op=dist.ReduceOp.SUM, group=None, async_op=False):
        if len({tuple(t.shape) for t in input_list}) == 1:
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        me = dist.get_rank(group)
        for r, t in enumerate(input_list):
            t = t.contiguous().clone()
            dist.all_reduce(t, op=op, group=group)
            if r == me:
                output.copy_(t)
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


@_patch("sp_norm")
def _sp_norm():
    # torch norms refuse sequence_parallel only because the weight must be marked for the
    # TP all-reduce of its gradient (what Apex/TE norms do): build it and mark it.
    import megatron.core.transformer.torch_norm as tn

    def new(cls, config, hidden_size, eps=1e-5, persist_layer_norm=False, zero_centered_gamma=False, normalization="LayerNorm"):
        kind = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}[config.normalization]
        norm = kind(normalized_shape=hidden_size, eps=eps)
        for p in norm.parameters():
            p.sequence_parallel = config.sequence_parallel
        return norm

    tn.WrappedTorchNorm.__new__ = new


@_patch("grouped_gemm")
def _grouped_gemm():
    # GroupedMLP needs the CUDA-only `grouped_gemm` wheel; same maths with a python loop.
    import types

    try:
        import megatron.core.transformer.moe.grouped_gemm_util as gg
    except ImportError:  # gone in later versions
        return
    if gg.grouped_gemm is not None:
        return

    def gmm(a, b, batch_sizes, trans_b=False):
        outs, start = [], 0
        for i, n in enumerate(batch_sizes.tolist()):
            w = b[i].t() if trans_b else b[i]
            outs.append(a[start : start + n] @ w)
            start += n
        return torch.cat(outs, 0)

    gg.ops = types.SimpleNamespace(gmm=gmm)
    gg.grouped_gemm = types.SimpleNamespace(ops=gg.ops)


def install(only=None, skip=()):
    env = os.environ.get("MEG_SHIM_SKIP", "")
    skip = set(skip) | {s for s in env.split(",") if s}
    for name, fn in _REGISTRY.items():
        if (only is None or name in only) and name not in skip and "all" not in skip:
            fn()
            INSTALLED.append(name)
    return list(INSTALLED)
