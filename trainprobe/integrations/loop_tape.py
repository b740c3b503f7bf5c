"""What a loop calls from its model to its loss, so that it can be called again with another batch.

Outermost calls of modules are recorded, and between them each function of torch that is given what such a call returned. What
does not come from a model, such as tokens and targets, is the batch. Numbers that the loop read from shapes stay as they were.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_map

from trainprobe.engine.capture.optimizers import live_optimizers
from trainprobe.engine.capture.patching.replaced import Replaced
from trainprobe.engine.capture.step_modes import RANDOM
from trainprobe.engine.core.guard import attempt
from trainprobe.engine.core.held_parameters import held_by
from trainprobe.engine.core.live_objects import with_subclasses
from trainprobe.engine.state_guard import put_random_states, random_states
from trainprobe.errors import UsageError
from trainprobe.integrations.loop_rows import of_any_rows, row_numbers, with_gradient
from trainprobe.preflight.batches import TELL
from trainprobe.preflight.opened import Attribute, closed, is_listed, named_tensors, opened, tensors_of
from trainprobe.preflight.training import unwrapped

_MOST = 5000  # calls without a backward, after which those before are forgotten
_DEEPEST = 8  # calls between the rows of the batch and what a model or a loss is given
_SCALES = {
    **dict.fromkeys(["div", "true_divide", "div_", "__truediv__", "__itruediv__"], True),
    **dict.fromkeys(["mul", "mul_", "__mul__", "__rmul__", "__imul__", "float"], False),
}


@dataclass(frozen=True, slots=True)
class Made:
    """A tensor that an earlier call of the tape returned. place: among the tensors of its result."""

    call: int
    place: int


class Given(str):
    """The name of a tensor of the batch."""

    __slots__ = ()


@dataclass(slots=True)
class Call:
    """A call of a module or function. cast: dtype of autocast on its device, None without. wrapper: what called the module."""

    function: Any
    args: Any
    kwargs: Any
    cast: tuple[str, torch.dtype] | None
    wrapper: Any = None

    def needs(self) -> set[int]:
        """Return the numbers of the calls whose results this one is given."""
        return {x.call for x in tree_flatten((self.args, self.kwargs))[0] if isinstance(x, Made)}

    def may_write(self) -> bool:
        """Tell whether this may change what it is given, or the state of a generator."""
        name = getattr(self.function, "__name__", "")
        in_place = f"{name.rstrip('_')}_" == name or name == "__setitem__" or (name.startswith("__i") and name != "__invert__")
        return isinstance(self.function, nn.Module) or in_place or "out" in self.kwargs or name in RANDOM or "drop" in name

    def among(self, places: dict[int, int], names: dict[Given, Given]) -> Call:
        """Return the same on a tape of fewer calls. places: number → number there; names: of tensors of the batch."""

        def there(x: Any) -> Any:
            return Made(places[x.call], x.place) if isinstance(x, Made) else names.get(x, x) if isinstance(x, Given) else x

        args, kwargs = tree_map(there, (self.args, self.kwargs))
        return Call(self.function, args, kwargs, self.cast, self.wrapper)


@dataclass(slots=True)
class Micro:
    """One forward pass of the loop, up to the tensor whose backward was called, its value. random: before its first call.

    scale: the number that the loss was multiplied by. scored: whether the loop detached a part of a loss of log-probabilities.
    state: (buffers or parameters of a module, name, what it was before).
    """

    calls: list[Call]
    loss: Made
    batch: dict[str, Any]
    value: Tensor
    random: Any
    state: Sequence[tuple[dict[str, Any], str, Any]] = ()
    scale: float = 1.0
    modules: list[nn.Module] = field(default_factory=list)
    scored: bool = False

    def checked(self) -> Micro:
        """Return this where the loss of the loop is what comes out when it is made again. Raises UsageError."""
        given = (x for c in self.calls if isinstance(c.function, nn.Module) for x in tree_flatten((c.args, c.kwargs))[0])
        if (hiding := next((x for x in given if not isinstance(x, Tensor) and tensors_of(x)), None)) is not None:
            raise UsageError(f"the model is given a {type(hiding).__name__}, which hides its tensors: {TELL}")
        again = self._again()
        if abs(again - float(self.value)) > 1e-2 * abs(again):
            again = self._again(self.state)
        if abs(again - float(self.value)) > 1e-2 * abs(again):
            both = f"it is {float(self.value):.6g} and made again {again:.6g}"
            raise UsageError(f"the loss of this loop cannot be made again, {both}: {TELL}")
        return self

    def _again(self, state: Sequence[tuple[dict[str, Any], str, Any]] = ()) -> float:
        """Return the loss once more. state: what modules held before, as a centre or a queue that the step has moved."""
        random, now = random_states(), [(held, name, held.get(name)) for held, name, _ in state]
        put_random_states(self.random)
        for held, name, value in state:
            held[name] = value
        try:
            with torch.no_grad():
                return float(self.replay(self.batch)) * self.scale
        finally:
            for held, name, value in now:
                held[name] = value
            put_random_states(random)

    def replay(self, batch: dict[str, Any], wrapped: bool = False) -> Tensor:
        """Call everything again with another batch and return the loss. wrapped: by what shares gradients among ranks.

        A gradient that is part of the loss, as a gradient penalty has it, is worked out where no gradient is asked for, too.
        """
        if not torch.is_grad_enabled() and any(call.function is torch.autograd.grad for call in self.calls):
            with torch.enable_grad():
                return self.replay(batch, wrapped).detach()
        results: list[list[Tensor]] = []

        def value(x: Any) -> Any:
            return results[x.call][x.place] if isinstance(x, Made) else batch[x] if isinstance(x, Given) else x

        for call in self.calls[: self.loss.call + 1]:
            args, kwargs = (closed(tree_map(value, part)) for part in (call.args, call.kwargs))
            with torch.autocast(*call.cast) if call.cast is not None else nullcontext():
                out = ((call.wrapper if wrapped else None) or call.function)(*args, **kwargs)
            results.append([*tensors_of(out), *_kept_by(call.function)])
        return results[self.loss.call][self.loss.place]


class Tape(TorchFunctionMode):
    """Records while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self._depth = 0
        self._handles: list[Any] = []
        self.forget()

    def forget(self) -> None:
        """Begin a new micro-batch."""
        self._calls, self._made, self._held = list[Call](), dict[int, Made](), list[Any]()
        self._batch, self._names, self._modules = dict[str, Any](), dict[int, str](), dict[int, nn.Module]()
        self._lost = (0, "")  # number of the last call that was given what cannot be made again, and why
        self._sources = dict[int, tuple[Any, ...]]()  # id of a tensor that no model made → its call and version
        self._random = dict[int, Any]()  # number of a call → states of generators before it, of modules that are called first
        self._first: torch.Size | None = None  # shape of what a model was given first, or again with other rows
        self._opened: Any = None  # the model that was given it
        self._state = dict[int, list[tuple[dict[str, Any], str, Any]]]()  # id of a module → what it held before its first call
        self._attributes = set[str]()  # names of tensors of the batch that are those of an object
        self._args: Any = ()  # what the outermost module that runs was given
        self._scored = False  # whether the log-probability of anything was taken

    def __enter__(self) -> Any:
        self._handles = [
            register_module_forward_pre_hook(self._enters),
            register_module_forward_hook(self._leaves, with_kwargs=True, always_call=True),
        ]
        kinds = [kind for kind in with_subclasses(Distribution) if "log_prob" in vars(kind)]
        self._replaced = [Replaced(kind, "log_prob", self._scores(vars(kind)["log_prob"])) for kind in kinds]
        return super().__enter__()

    def __exit__(self, *exc: Any) -> None:
        for handle in self._handles:
            handle.remove()
        for replaced in self._replaced:
            replaced.back()
        super().__exit__(*exc)

    def _scores(self, original: Any) -> Any:
        def log_prob(distribution: Any, *args: Any, **kwargs: Any) -> Any:
            self._scored = True
            return original(distribution, *args, **kwargs)

        return log_prob

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        func, args = of_any_rows(func, args)
        if self._depth == 0 and torch.is_grad_enabled() and (made := tensors_of(out)):
            if self._knows(args, kwargs):
                self._record(func, args, kwargs or {}, out)
            elif (given := {id(tensor) for tensor in tensors_of((args, kwargs or {}))}) and given.isdisjoint(map(id, made)):
                self._sources.update({id(t): (func, args, kwargs or {}, out, t._version) for t in made})
        return out

    @property
    def modules(self) -> list[nn.Module]:
        """The outermost modules with weights that were called."""
        return list(self._modules.values())

    def micro(self, loss: Tensor) -> Micro:
        """Return what led to a loss. Raises UsageError where that was not seen."""
        made = self._made.get(id(loss))
        kept, (place, lost) = [] if made is None else self._kept(made.call), self._lost
        if made is None or (lost and place >= kept[0]):
            why = lost or "no call of a model was seen that it comes from"
            raise UsageError(f"the loss of this loop cannot be made again, {why}: {TELL}")
        random = self._random[max(place for place in self._random if place <= kept[0])]
        calls, names = [self._calls[number] for number in kept], self._renamed(kept)
        places = {number: place for place, number in enumerate(kept)}
        calls = [call.among(places, names) for call in calls]
        batch: dict[str, Any] = {
            Attribute(name) if before in self._attributes else name: self._batch[before] for before, name in names.items()
        }
        called = {id(call.function) for call in calls}
        modules = [module for module in self.modules if id(module) in called]
        state = [*chain(*self._state.values())]
        found = Micro(calls, Made(places[made.call], made.place), batch, loss.detach().clone(), random, state, modules=modules)
        found.scored = self._scored and any(getattr(call.function, "__name__", "") == "detach" for call in calls)
        while (scaled := _scaled(calls[found.loss.call], found.batch)) is not None:
            found.loss, number, loss_scale = scaled
            found.scale *= number
            found.value /= loss_scale
        return found

    def _kept(self, last: int) -> list[int]:
        """Return the numbers of the calls that are made again for the result of one, ascending.

        Those before the first that it depends on acted or sampled, and trained nothing. Of the others those are left out that
        it does not depend on, but for what may write or draw: modules and functions in place.
        """
        needed = self._needed({last})
        sound = set[int]()  # what depends on nothing before the first of them
        for number in range(min(needed), last):
            if all(before in sound for before in self._calls[number].needs()):
                sound.add(number)
        return sorted(self._needed({last, *(number for number in sound if self._calls[number].may_write())}))

    def _needed(self, numbers: set[int]) -> set[int]:
        """Return the numbers of these calls and of all on which they depend."""
        found, waiting = set[int](), set(numbers)
        while waiting:
            found.add(number := waiting.pop())
            waiting |= self._calls[number].needs() - found
        return found

    def _renamed(self, kept: list[int]) -> dict[Given, Given]:
        """Return name → name without what other calls were given, of the tensors that these calls are given."""
        found: dict[Given, Given] = {}
        for call in (self._calls[number] for number in kept):
            for name in (x for x in tree_flatten((call.args, call.kwargs))[0] if isinstance(x, Given) and x not in found):
                plain = name if (start := name.rpartition("_")[0]) not in self._batch else start
                taken = [other for other in found.values() if other == plain or other.startswith(f"{plain}_")]
                found[name] = Given(f"{plain}_{len(taken)}" if taken else plain)
        return found

    def _enters(self, module: nn.Module, args: Any) -> None:
        if self._depth == 0 and len(self._calls) + len(self._sources) > _MOST:
            self.forget()
        if self._depth == 0 and not self._knows(args, None):
            self._random[len(self._calls)] = random_states()
        if self._depth == 0 and id(module) not in self._state:
            self._state[id(module)] = _untrained(module)
        if self._depth == 0:
            self._args = opened(args)  # before the model changes them
        self._depth += 1

    def _leaves(self, module: nn.Module, _: Any, *rest: Any) -> None:
        self._depth -= 1
        if self._depth or not torch.is_grad_enabled() or len(rest) < 2:  # one where the module raised an error
            return
        (kwargs, output), args = rest, self._args
        kwargs = opened(kwargs)
        wrapper, module = module, unwrapped(module)
        trained = any(p.requires_grad for p in module.parameters())
        if trained:
            self._modules.setdefault(id(module), module)
            if given := tensors_of((args, kwargs)):
                shape = self._rows_of(given[0])
                again = module is self._opened and self._first is not None and shape[:1] != self._first[:1]
                if self._first is None or again:
                    self._first, self._opened = shape, module
        if trained or self._knows(args, kwargs):
            self._record(module, args, kwargs, output, None if wrapper is module else wrapper)

    def _rows_of(self, x: Tensor) -> torch.Size:
        """Return the shape of a model's first tensor; of batches (not rows) one behind the other, that of the first."""
        source = self._sources.get(id(x))
        parts = tensors_of(source[1:3]) if source is not None and source[0] is torch.cat else [x]
        return parts[0].shape if len({part.shape for part in parts}) == 1 and parts[0].shape[:1] != (1,) else x.shape

    def _knows(self, args: Any, kwargs: Any) -> bool:
        return any(id(t) in self._made for t in tensors_of((args, kwargs or {})))

    def _record(
        self,
        function: Any,
        args: Any,
        kwargs: Any,
        output: Any,
        wrapper: Any = None,
        unnamed: str = "input",
        names: dict[int, str] | None = None,
    ) -> None:
        with torch._C.DisableTorchFunction():
            names = _names(function, args, kwargs) if names is None else names
            learns = isinstance(function, nn.Module) and any(True for _ in function.parameters())
            by_row = isinstance(function, nn.Module) or getattr(function, "__name__", "") == "ctc_loss"
            told, named = tree_map(
                lambda x: self._told(x, names, unnamed, learns),
                (tuple(args), dict(kwargs)),
                is_leaf=is_listed if by_row else None,
            )
            for place, tensor in enumerate(tensors_of(output)):
                self._made[id(tensor)] = Made(len(self._calls), place)
                self._held.append(tensor)
            for place, tensor in enumerate(_kept_by(function), len(tensors_of(output))):
                if tensor.requires_grad and id(tensor) not in self._made:
                    self._made[id(tensor)] = Made(len(self._calls), place)
                    self._held.append(tensor)
            kind = next((t.device.type for t in tensors_of(output)), "cpu")
            cast = (kind, torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else None
            self._calls.append(Call(function, told, named, cast, wrapper))

    def _told(self, x: Any, names: dict[int, str], unnamed: str, learns: bool) -> Any:
        """Return what stands on the tape for an argument. unnamed: name of one that has none. learns: a model is given it."""
        if is_listed(x) and self._first is not None and len(x) == self._first[0]:
            return self._given(x, names.get(id(x), unnamed))
        if not isinstance(x, Tensor):
            return x
        if id(x) in self._made:
            return self._made[id(x)]
        if isinstance(x, nn.Parameter) or (x.is_leaf and x.requires_grad and not self._is_input(x)):
            return x
        if x.is_leaf and x.requires_grad:  # its gradient is asked for, as by a penalty
            self._record(with_gradient, (leaf := x.detach(),), {}, x, names={id(leaf): names.get(id(x), unnamed)})
            return self._made[id(x)]
        if not learns and id(x) not in self._names and (rows := self._numbered(x)) is not None:
            self._record(row_numbers, (rows,), {}, x)
            return self._made[id(x)]
        if self._is_from_rows(x):
            self._record(*self._sources[id(x)][:4], unnamed=names.get(id(x), unnamed), names={})
            return self._made[id(x)]
        if x.requires_grad:
            self._lost = len(self._calls), f"as {names.get(id(x), 'a tensor')} comes from a function that was not seen"
            return x
        return self._given(x, names.get(id(x), unnamed))

    def _given(self, x: Any, name: str) -> Given:
        """Return the name of a tensor or list of the batch, which has none yet or has one."""
        if id(x) not in self._names:
            taken = next(n for n in chain([name], (f"{name}_{i}" for i in count(1))) if n not in self._batch)
            self._names[id(x)] = taken
            self._attributes |= {taken} if isinstance(name, Attribute) else set()
            self._batch[taken] = x.detach().clone() if isinstance(x, Tensor) else x
            self._held.append(x)
        return Given(self._names[id(x)])

    def _numbered(self, x: Tensor) -> Tensor | None:
        """Return a tensor of the batch whose rows a tensor numbers from 0, as to pick a value of each row; else None."""
        if x.dim() != 1 or len(x) < 2 or x.dtype != torch.int64 or not torch.equal(x, torch.arange(len(x), device=x.device)):
            return None
        return next((t for t in self._held if isinstance(t, Tensor) and t.shape[:1] == x.shape and id(t) in self._names), None)

    def _is_input(self, x: Tensor) -> bool:
        """Tell whether a leaf that requires a gradient has rows, and is no weight of an optimizer."""
        rows = self._first[:1] if self._first else x.shape[:1]
        return bool(rows) and x.shape[:1] == rows and all(id(x) not in held_by(o) for o in live_optimizers())

    def _is_from_rows(self, x: Tensor, deepest: int = _DEEPEST) -> bool:
        """Tell whether a tensor was made of one with the rows of the batch and has lost them; then it is made again.

        So labels are taken before the loop flattens them, and a number of targets is counted again.
        """
        source, first = self._sources.get(id(x)), self._first
        if source is None or not first or not deepest or source[4] != x._version:  # written since
            return False
        given = tensors_of(source[1:3])
        if all(id(t) in self._names for t in given) and getattr(source[0], "__name__", "") not in RANDOM:
            return True
        if x.shape[:1] == first[:1]:
            return any(t.shape == first and not t.is_floating_point() for t in given) and x.shape != first
        return any(t.shape[:1] == first[:1] or self._is_from_rows(t, deepest - 1) for t in given)


def _untrained(module: nn.Module) -> list[tuple[dict[str, Any], str, Any]]:
    """Return copies of what the passes of a module may write: (where it is held, name, copy).

    These are its buffers, and untrained weights where they are no more than the trained ones, as those of a momentum encoder.
    """
    inside, trained = list(module.modules()), sum(p.numel() for p in module.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in module.parameters() if not p.requires_grad) <= trained
    kept = list[tuple[dict[str, Any], str, Any]]()
    for held in (vars(m).get(kind, {}) for m in inside for kind in ("_buffers", "_parameters")):
        for name, x in ((name, x) for name, x in held.items() if x is not None and not x.requires_grad):
            if isinstance(x, nn.Parameter) and frozen:
                kept.append((held, name, nn.Parameter(x.detach().clone(), requires_grad=False)))
            elif not isinstance(x, nn.Parameter):
                kept.append((held, name, x.detach().clone()))
    return kept


def _scaled(call: Call, batch: dict[str, Any]) -> tuple[Made, float, float] | None:
    """Return what a call multiplies, by what number, and by what loss scale, which the optimizer divides by; else None."""
    name, made = getattr(call.function, "__name__", ""), [x for x in call.args if isinstance(x, Made)]
    if name not in _SCALES or len(made) != 1:
        return None
    number = next((x for x in call.args if not isinstance(x, Made)), 1.0)
    if isinstance(number, Given) and not _SCALES[name] and batch[number].numel() == 1:
        return made[0], 1.0, float(batch.pop(number))
    if not isinstance(number, int | float) or not number or (_SCALES[name] and made[0] is not call.args[0]):
        return None
    return made[0], 1 / number if _SCALES[name] else float(number), 1.0


def _kept_by(function: Any) -> list[Tensor]:
    """Return the tensors that a module keeps as attributes: a loss is read there that it does not return."""
    modules = function.modules() if isinstance(function, nn.Module) else ()
    return [x for module in modules for x in vars(module).values() if isinstance(x, Tensor)]


def _names(function: Callable[..., Any], args: Any, kwargs: Any) -> dict[int, str]:
    """Return id of each tensor that is given → the name of its argument; with its place where any number may be given."""
    function = getattr(function, "_orig_mod", function)  # a compiled module takes anything
    called, found = getattr(function, "forward", function), dict[int, str]()
    bound = attempt(lambda: inspect.signature(called).bind(*args, **kwargs), otherwise=lambda _: None)
    kinds = {} if bound is None else {name: one.kind for name, one in bound.signature.parameters.items()}
    inner = getattr(function, "module", None)
    if inspect.Parameter.VAR_POSITIONAL in kinds.values() and isinstance(inner, nn.Module):  # which knows their names
        return _names(inner, args, kwargs)
    given = {} if bound is None else bound.arguments
    for name, value in ((name, value) for name, value in given.items() if name != "self"):  # of a method of tensors
        any_number = kinds[name] is inspect.Parameter.VAR_POSITIONAL
        several = enumerate(value) if any_number else value.items() if isinstance(value, dict) else ()
        for key, item in several or [(name, value)]:
            for own, tensor in named_tensors(item, f"{name}{key}" if any_number else str(key)):
                found.setdefault(id(tensor), own)
            found.setdefault(id(item), str(key))
    return found
