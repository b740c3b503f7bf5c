"""Name maps: one YAML file a family says how its tensor names become the one name that a tensor has everywhere.

A rule matches a whole name; `{L}` and `{E}` stand for numbers, any other `{word}` for letters, digits and `_`, and `[model.]`
for text that may be missing. `to` is the logical name, or a list of them when `by` (a transform, or a list of transforms)
gives several tensors; `{i}` is then the number of the part. The first rule that matches wins, and a name that no rule knows
is kept as it is. `when` names a config entry that must be true. `signature` lists patterns that only this family has: where
one begins in a name, the name proper begins, and what stands before it belongs to a wrapper, unless that ends as `outside`
says: `decoder.` is a part of the model. `extends` names a built-in map whose rules are asked after its own. Adapters
(`…lora_A.default.weight` of PEFT) go by the name of what they adapt, and `.base_layer.` and `.modules_to_save.NAME.` are left
out. `order` lists the parameters as the model defines them, layer by layer, for files that do not keep the order and optimizers
that know no names.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from trainprobe.ckpt_compare.pieces import Checkpoint, LogicalTensor, gather
from trainprobe.ckpt_compare.transforms import NEEDS, TRANSFORMS
from trainprobe.errors import FormatError, did_you_mean

_FIELD = re.compile(r"\\\{(\w+)\\\}")
_WRITTEN = re.compile(r"\{(\w+)\}")
_OTHER_ADAPTERS = (
    "adamss|boft|c3a|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|ln_tuning|lokr|miss|oft|poly_lora|psoft|pvera|randlora|"
    "shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|waveft"
)  # how the parameters of PEFT's other methods begin
_ADAPTER = re.compile(
    rf"(?P<base>.+)\.(?P<part>(?P<lora>lora_(?:A|B|E|magnitude_vector))|(?:{_OTHER_ADAPTERS})_\w+|ranknum)"
    r"(?:\.(?P<which>(?!weight(?: |$))\w+))?(?P<weight>\.weight)?(?P<further> \([^()]+\))?"
)
ADAPTER_PART = re.compile(rf"\.(?P<method>lora|{_OTHER_ADAPTERS})_\w+(?:\.weight)?(?: \([^()]+\))?|\.ranknum(?: \([^()]+\))?")
_TRAINED_WHOLE = re.compile(r"\.modules_to_save\.\w+\.")  # PEFT, of a module that is trained beside the adapters
_OWN_NUMBER = re.compile(r"(?:^|\\\.|\(\?:)\d")  # a pattern that asks for one number
_OPTIONAL = re.compile(r"\\\[(.+?)\\\]")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a name map."""

    pattern: re.Pattern[str]
    to: tuple[str, ...]
    by: tuple[str, ...] = ()
    vocabulary: bool = False
    when: str = ""
    drop: bool = False


@dataclass(frozen=True, slots=True)
class NameMap:
    """How one family of names becomes logical names. `signature`: patterns that only this family's names match."""

    family: str
    signature: tuple[re.Pattern[str], ...]
    strip: tuple[str, ...]
    rules: tuple[Rule, ...]
    order: tuple[re.Pattern[str], ...] = ()
    outside: tuple[str, ...] = ()
    kinds: dict[str, tuple[bool, tuple[Rule, ...]]] = field(
        default_factory=dict[str, tuple[bool, tuple[Rule, ...]]], compare=False, repr=False
    )

    def stripped(self, name: str) -> str:
        """Return the name without the prefixes that wrappers add."""
        changed = True
        while changed:
            changed = False
            for prefix in self.strip:
                if name.startswith(prefix):
                    name, changed = name[len(prefix) :], True
        return name

    def kind_of(self, name: str) -> tuple[bool, tuple[Rule, ...]]:
        """Return whether a name may be an adapter's, and the rules that may match it: a million names are of a few kinds."""
        kind = ".".join(["0" if part.isdecimal() else part for part in name.split(".")])
        found = self.kinds.get(kind)
        if found is None:
            may = [r for r in self.rules if r.pattern.fullmatch(kind) or _OWN_NUMBER.search(r.pattern.pattern)]
            found = self.kinds[kind] = _ADAPTER.fullmatch(kind) is not None, tuple(may)
        return found

    def wrapper(self, names: Iterable[str]) -> str | None:
        """Return what wrappers put before this family's names (often nothing), or None when these are not its names."""
        found = (n[: m.start()] for n in names for p in self.signature if (m := p.search(n)) is not None)
        return next((prefix for prefix in found if not prefix.endswith(self.outside)), None)


def _compile(pattern: str, where: str) -> re.Pattern[str]:
    seen: set[str] = set()

    def group(match: re.Match[str]) -> str:
        name = match[1]
        if name in seen:
            return f"(?P={name})"
        seen.add(name)
        return f"(?P<{name}>\\d+)" if name.isupper() else f"(?P<{name}>\\w+)"

    try:
        return re.compile(_OPTIONAL.sub(r"(?:\1)?", _FIELD.sub(group, re.escape(pattern))))
    except re.error as error:
        raise FormatError(f"{where}: {pattern!r} is no pattern: {error}") from None


def _strings(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, (list, tuple)) else () if value is None else (str(value),)


def read_map(text: str, where: str) -> NameMap:
    """Parse a name map; raise FormatError that names the faulty rule."""
    try:
        data: Any = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise FormatError(f"{where} is no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise FormatError(f"{where} is not a name map: it needs `family`, `signature` and a list of `rules`")
    rules = tuple(rule for number, entry in enumerate(data["rules"], 1) for rule in _rules(entry, f"{where}: rule {number}"))
    signature, order = (tuple(_compile(p, where) for p in _strings(data.get(key))) for key in ("signature", "order"))
    strip, outside = _strings(data.get("strip")), _strings(data.get("outside"))
    made = NameMap(str(data.get("family", where)), signature, strip, rules, order, outside)
    return made if data.get("extends") is None else _extended(made, str(data["extends"]), where)


def _extended(made: NameMap, base: str, where: str) -> NameMap:
    """Return a map whose own rules are asked before those of a built-in one."""
    files = {f.name.removesuffix(".yaml"): f for f in resources.files(__name__).iterdir() if f.name.endswith(".yaml")}
    if base not in files:
        raise FormatError(f"{where} extends {base!r}{did_you_mean(base, list(files))}; there are {', '.join(sorted(files))}")
    other = read_map(files[base].read_text(encoding="utf-8"), base)
    return replace(
        made, strip=(*made.strip, *other.strip), rules=(*made.rules, *other.rules), order=made.order or other.order,
        outside=(*made.outside, *other.outside),
    )  # fmt: skip


def _rules(entry: Any, where: str) -> list[Rule]:
    """Return the rules of one entry, one for each pattern that `from` lists."""
    if not isinstance(entry, dict) or not _strings(entry.get("from")):
        raise FormatError(f"{where} is {entry!r}: it needs `from`, the pattern of the names that it matches")
    sources, to, by = (_strings(entry.get(key)) for key in ("from", "to", "by"))
    if not to and not entry.get("drop"):
        raise FormatError(f"{where} ({sources[0]}) needs `to`, the logical name, or `drop: true`")
    for name in by:
        if name not in TRANSFORMS:
            raise FormatError(f"{where} ({sources[0]}) wants transform {name!r}{did_you_mean(name, list(TRANSFORMS))}")
    made = [
        Rule(_compile(source, where), to, by, bool(entry.get("vocabulary")), entry.get("when", ""), bool(entry.get("drop")))
        for source in sources
    ]
    for rule in made:
        unknown = [f for name in to for f in _WRITTEN.findall(name) if f not in {"i", *rule.pattern.groupindex}]
        if unknown:
            raise FormatError(f"{where} ({sources[0]}): `to` has {{{unknown[0]}}}, which `from` does not have")
    return made


def _read(path: str) -> NameMap:
    try:
        return read_map(Path(path).read_text(encoding="utf-8"), path)
    except OSError as error:
        raise FormatError(f"--names {path}: {error.strerror or error}; name a YAML file (docs/ckpt_compare.md)") from None
    except UnicodeDecodeError as error:
        raise FormatError(f"--names {path} is no text in UTF-8: {error.reason} at byte {error.start}") from None


@lru_cache(maxsize=1)
def built_in() -> tuple[NameMap, ...]:
    """Return the name maps of this folder, in the order of their file names."""
    folder = resources.files(__name__)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return tuple(read_map(f.read_text(encoding="utf-8"), f.name) for f in files)


def find_map(checkpoint: Checkpoint, extra: Sequence[str] = ()) -> tuple[NameMap, str] | None:
    """Return the map for a checkpoint's names and the wrapper's prefix.

    A user's maps are asked first. None when no map fits.
    """
    maps = [_read(p) for p in extra] + list(built_in())
    names = sorted({t.name for t in checkpoint.tensors.values()})
    return next(((m, prefix) for m in maps if (prefix := m.wrapper(names)) is not None), None)


def in_model_order(names: Sequence[str]) -> list[str] | None:
    """Return parameter names in the order in which the model defines them, or None when no map knows all of them."""
    for family in built_in():
        prefix = family.wrapper(names)
        places = None if prefix is None else [_place(family, n.removeprefix(prefix)) for n in names]
        if places is not None and None not in places:
            return [name for _, name in sorted(zip(places, names, strict=True))]
    return None


def _place(family: NameMap, name: str) -> tuple[int, int, int] | None:
    """Return a sort key: before, in or after the layers, then the layer, then the place within it."""
    layered = [i for i, p in enumerate(family.order) if "(?P<L>" in p.pattern]
    for i, pattern in enumerate(family.order):
        match = pattern.fullmatch(name)
        if match is not None:
            layer = match.groupdict().get("L")
            return (1, int(layer), i) if layer is not None else (0 if i < layered[0] else 2, 0, i)
    return None


def to_logical(checkpoint: Checkpoint, config: Mapping[str, Any], extra: Sequence[str] = ()) -> Checkpoint:
    """Return the checkpoint with its tensors under logical names, split into their logical parts.

    config: the model's heads, groups, head_dim, gated, where known. A rule that needs a number nobody knows leaves its tensor
    fused, and a note says so.
    """
    found = find_map(checkpoint, extra)
    if found is None:
        return _without_adapter_names(checkpoint)
    names, prefix = found
    notes: list[str] = []
    tensors = gather(part for t in checkpoint.tensors.values() for part in apply(names, t, config, notes, prefix))
    return replace(
        checkpoint,
        tensors=tensors,
        family=checkpoint.family or names.family,
        notes=(*checkpoint.notes, *dict.fromkeys(notes)),
    )


def _without_adapter_names(checkpoint: Checkpoint) -> Checkpoint:
    """Name the adapters of a model that no map knows, and what they adapt, as those of any other."""
    if not any(
        ".base_layer." in t.name or _TRAINED_WHOLE.search(t.name) or _ADAPTER.fullmatch(t.name)
        for t in checkpoint.tensors.values()
    ):
        return checkpoint
    plain = NameMap("", (), (), ())
    return replace(checkpoint, tensors=gather(part for t in checkpoint.tensors.values() for part in apply(plain, t, {}, [])))


def apply(
    names: NameMap, tensor: LogicalTensor, config: Mapping[str, Any], notes: list[str], prefix: str = ""
) -> list[LogicalTensor]:
    """Return the logical tensors that one stored tensor holds."""
    name = names.stripped(tensor.name.removeprefix(prefix)).replace(".base_layer.", ".")
    name = _TRAINED_WHOLE.sub(".", name)
    is_adapter, rules = names.kind_of(name)
    if is_adapter and (adapter := _ADAPTER.fullmatch(name)) is not None:
        weight = ".weight" if adapter["lora"] else adapter["weight"] or ""  # of LoRA both ways to write it
        return [tensor.renamed(f"{_adapted(names, adapter['base'])}.{adapter['part']}{weight}{_which(adapter)}")]
    for rule in rules:
        match = rule.pattern.fullmatch(name)
        if match is None or (rule.when and not config.get(rule.when)):
            continue
        if rule.drop:
            return []
        lacking = [need for by in rule.by for need in NEEDS.get(by, ()) if not config.get(need)]
        if lacking:
            notes.append(f"{', '.join(lacking)} unknown: tensors such as {name} are compared as they are stored")
            return [tensor.renamed(name)]
        return _renamed(tensor, rule, match, config)
    return [tensor.renamed(name)]


def _which(adapter: re.Match[str]) -> str:
    """Return ` (NAME)` of an adapter beside the first, which PEFT calls `default`."""
    return adapter["further"] or (f" ({adapter['which']})" if adapter["which"] not in (None, "default") else "")


def _adapted(names: NameMap, base: str) -> str:
    """Return the logical name of the module that an adapter (LoRA) adapts; its own where that is split into several."""
    for rule in names.rules:
        match = rule.pattern.fullmatch(f"{base}.weight")
        if match is not None and len(rule.to) == 1 and not rule.when:
            return rule.to[0].format_map({**match.groupdict(), "i": 0}).removesuffix(".weight")
    return base


def _renamed(tensor: LogicalTensor, rule: Rule, match: re.Match[str], config: Mapping[str, Any]) -> list[LogicalTensor]:
    fields = match.groupdict()
    found: list[tuple[LogicalTensor, list[int]]] = [(tensor, [])]
    for by in rule.by:
        found = [(part, [*at, i]) for t, at in found for i, part in enumerate(TRANSFORMS[by](t, config))]
    out: list[LogicalTensor] = []
    for part, at in found:
        to = rule.to[at[-1] if len(rule.to) > 1 else 0]
        name, native = sys.intern(to.format_map({**fields, "i": at[0] if at else 0})), tensor.native or tensor.name
        out.append(LogicalTensor(name, part.shape, part.held, part.slot, native, rule.vocabulary))
    return out
