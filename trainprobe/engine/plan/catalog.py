"""What each torch callable is called in a dump, and which callables carry no tensor values worth a record.

Names are `Prefix.api` as people's existing tools write them: Functional (torch.nn.functional), Tensor (methods and
operators), Torch (torch.*, torch.linalg and the like), Aten (torch.ops.aten), NPU, and the namespace itself for other
registered custom ops. Nothing here imports torch: functions are recognised by their names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

# Questions about a tensor, conversions to Python, and bookkeeping: they make no new tensor value.
_SILENT = frozenset(
    """
    size dim ndimension numel nelement stride storage_offset is_contiguous data_ptr storage untyped_storage
    _typed_storage element_size get_device type is_floating_point is_complex is_signed is_inference is_conj is_neg
    is_same_size is_set_to is_shared is_pinned is_distributed is_nonzero is_tensor is_storage is_coalesced sparse_dim
    dense_dim requires_grad_ retain_grad register_hook register_post_accumulate_grad_hook backward has_names __hash__
    __repr__ __len__ __bool__ __float__ __int__ __index__ __complex__ __contains__ __format__ __reduce__ __reduce_ex__
    __setstate__ __deepcopy__ __dir__ __iter__ __dlpack__ __dlpack_device__ __array__ __cuda_array_interface__ item
    tolist numpy share_memory_ pin_memory __torch_dispatch__ can_cast result_type promote_types get_default_dtype
    set_default_dtype is_grad_enabled is_autocast_enabled broadcast_shapes _is_view _has_compatible_shallow_copy_type
    _backward_hooks __get__ __set__ __delete__ names rename refine_names align_to is_inference_mode_enabled _assert
    _assert_async _cast_Byte ndim get_device_properties seed manual_seed initial_seed get_rng_state set_rng_state
    compiled_with_cxx11_abi record_stream _dimI _dimV _nnz dim_order _is_all_true _is_any_true
    _use_cudnn_rnn_flatten_weight has_torch_function _foreach_copy_ is_vulkan_available register_multi_grad_hook
    _make_subclass _make_wrapper_subclass as_subclass _clear_non_serializable_cached_data _set_grad_enabled
    _record_function_exit _record_function_enter _record_function_enter_new _current_autograd_node set_grad_enabled
    is_autocast_cache_enabled _sync _lazy_clone _to_dense parse_schema from_file module_load set_output_hint
    """.split()  # noqa: SIM905  (words read better than a column of quotes)
)
# Their outputs are memory that has not been written yet: a statistic of it would be a random number.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "empty_permuted", "resize_"})
# They overwrite what they are called on: what that held before does not matter.
OVERWRITING = frozenset(
    """
    __setitem__ copy_ fill_ zero_ normal_ uniform_ bernoulli_ random_ exponential_ geometric_ cauchy_ log_normal_
    """.split()  # noqa: SIM905
)
# Positions of arguments that are written in part, and that a collective fills later; the results there are the same memory.
_FILLED_LATER = {"all_gather_copy_in": (1,)}
# Positions of arguments that are written without a trace in their version counters, by functions that are no methods in place;
# torch.batch_norm has its running statistics at 3 and 4, torch.nn.functional.batch_norm at 1 and 2.
_WRITTEN = {
    "batch_norm": (1, 2, 3, 4),
    "instance_norm": (1, 2, 3, 4),
    "native_batch_norm": (3, 4),
    "batch_norm_gather_stats": (3, 4),
    "batch_norm_gather_stats_with_counts": (3, 4),
    "_amp_foreach_non_finite_check_and_unscale_": (0, 1),
    "_amp_update_scale_": (0, 1),
    **dict.fromkeys(["_fused_adam_", "_fused_adamw_"], (0, 2, 3, 4)),
    "_fused_sgd_": (0, 2),
    "_fused_adagrad_": (0, 2),
}
# They draw random numbers, the last two where a probability is not 0.
_RANDOM = frozenset(
    """
    rand rand_like randn randn_like randint randint_like randperm normal normal_ uniform_ bernoulli bernoulli_ multinomial
    random_ exponential_ geometric_ cauchy_ log_normal_ poisson binomial rrelu rrelu_ gumbel_softmax dropout dropout_ dropout1d
    dropout2d dropout3d native_dropout alpha_dropout alpha_dropout_ feature_dropout feature_dropout_ feature_alpha_dropout
    feature_alpha_dropout_ fractional_max_pool2d fractional_max_pool3d scaled_dot_product_attention
    multi_head_attention_forward
    """.split()  # noqa: SIM905
)
# Views and copies without arithmetic, which `ops_scope: focus` leaves out, as the incumbent does by default.
_MOVEMENT = frozenset(
    """
    view view_as reshape reshape_as flatten unflatten squeeze squeeze_ unsqueeze unsqueeze_ expand expand_as permute
    transpose transpose_ t t_ movedim swapaxes swapdims narrow select slice chunk split unbind split_with_sizes
    tensor_split contiguous clone detach detach_ to type_as cpu cuda npu float half bfloat16 double int long bool cat
    concat stack hstack vstack clamp clamp_ clip repeat tile flip roll __getitem__ __setitem__ alias_copy
    requires_grad_ ones zeros full arange empty ones_like zeros_like full_like new_zeros new_ones new_full tensor
    as_tensor scalar_tensor triu tril unfold as_strided diagonal copy_ zero_ fill_ masked_fill masked_fill_ where
    index_select gather
    """.split()  # noqa: SIM905  (words read better than a column of quotes)
)
# The ops that reduce, normalise or multiply long vectors, where precision is won and lost: `ops_scope: core`.
_CORE = frozenset(
    """
    linear bilinear matmul mm bmm mv addmm baddbmm addbmm addmv einsum dot vdot inner outer tensordot chain_matmul
    linalg_norm norm conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d
    scaled_dot_product_attention multi_head_attention_forward softmax log_softmax logsumexp cross_entropy nll_loss
    mse_loss l1_loss smooth_l1_loss kl_div binary_cross_entropy binary_cross_entropy_with_logits layer_norm rms_norm
    group_norm batch_norm instance_norm embedding embedding_bag sum mean var std cumsum cumprod prod exp log pow rsqrt
    sqrt gelu silu sigmoid tanh softplus index_add index_add_ scatter_add scatter_add_ all_reduce reduce_scatter_tensor
    npu_fusion_attention npu_rms_norm npu_grouped_matmul npu_swiglu npu_rotary_mul
    """.split()  # noqa: SIM905  (words read better than a column of quotes)
)
_COLLECTIVES = ("_c10d_functional", "_c10d_functional_autograd", "c10d")  # namespaces of torch.ops


@dataclass(frozen=True, slots=True)
class OpName:
    """How a callable is recorded. written: bits of the positions of arguments that it may write in place, without a trace.

    random: it may draw random numbers. overwritten: bits of the positions of arguments whose values before do not matter.
    filled_later: of those among them, and of the results, that a later call fills.
    """

    name: str
    unwritten: bool
    written: int
    movement: bool
    random: bool = False
    overwritten: int = 0
    filled_later: int = 0

    def in_scope(self, scope: str) -> bool:
        """Tell whether a plan's `ops_scope` ("all", "focus" or "core") records this op."""
        if scope == "all":
            return True
        return not self.movement and (scope == "focus" or self.name.partition(".")[2] in _CORE)


def op_name(func: Callable[..., Any]) -> OpName | None:
    """Return the dump name of a callable that a torch-function mode was handed, or None when it is not to be recorded.

    Collectives are not: `engine/capture/collectives.py` records them, and knows when their results have been written.
    """
    api = getattr(func, "__name__", "") or ""
    prefix = "Torch"
    kind = type(func).__name__
    if kind in ("method-wrapper", "getset_descriptor"):
        return None
    if kind in ("OpOverloadPacket", "OpOverload"):
        namespace, _, api = str(func).partition(".")
        if namespace in _COLLECTIVES:
            return None
        prefix = {"aten": "Aten", "npu": "NPU", "prims": "Prims"}.get(namespace, namespace)
    else:
        if getattr(func, "__module__", None) in ("torch.distributed.distributed_c10d", "torch.autograd"):
            return None  # torch.autograd.grad runs a backward pass, whose operators are recorded
        prefix = _python_prefix(func)
        if prefix == "Torch" and api.startswith("__"):
            prefix = "Tensor"
    bare = api.split(".")[0]
    if not api or bare in _SILENT:
        return None
    in_place = (bare.endswith("_") and not bare.endswith("__")) or bare in ("__setitem__", "set_") or bare.startswith("__i")
    mutated, later = _bits(_mutated(func)), _bits(_FILLED_LATER.get(bare, ()))
    written = _bits(_WRITTEN.get(bare, (0,) if in_place else ())) or mutated
    overwritten = mutated | later | (bare in OVERWRITING)
    return OpName(f"{prefix}.{api}", bare in _UNWRITTEN, written, bare in _MOVEMENT, bare in _RANDOM, overwritten, later)


def _bits(positions: Iterable[int]) -> int:
    return sum(1 << i for i in positions)


def _mutated(func: Any) -> tuple[int, ...]:
    """Return the positions of arguments that a registered op which is not torch's says it writes."""
    if str(func).startswith("aten."):
        return ()
    names = getattr(func, "overloads", list[str])()
    schema = getattr(getattr(func, names[0]) if names else func, "_schema", None)
    arguments = [argument for argument in getattr(schema, "arguments", ()) if not argument.kwarg_only]
    return tuple(i for i, argument in enumerate(arguments) if getattr(argument.alias_info, "is_write", False))


def _python_prefix(func: Callable[..., Any]) -> str:
    module = getattr(func, "__module__", None) or ""
    owner = getattr(getattr(func, "__self__", None), "__name__", "") or ""
    qualified = getattr(func, "__qualname__", "") or ""
    if "nn.functional" in module or module == "torch._C._nn" or owner.endswith("_C._nn"):
        return "Functional"
    if module == "torch._tensor" or qualified.startswith(("TensorBase.", "Tensor.", "_TensorBase.")):
        return "Tensor"
    if module == "torch._VF" or "_VariableFunctions" in qualified or module.startswith("torch"):
        return "Torch"
    return module.split(".")[0] or "Torch"
