"""Name maps: one YAML file for each family of models gives the logical name of each tensor.

A rule matches a whole name. `{L}` and `{E}` are numbers, any other `{word}` is letters, digits and `_`, and `[model.]` is
optional text. `to` is the logical name. It is a list if `by` (a transform, or a list of transforms) gives several tensors;
`{i}` is then the index of the part. The first matching rule wins, and an unmatched name stays as it is. `when` names a config
entry that must be true. `signature` lists patterns that only this family has: the name proper begins where one of them begins.
The text before it belongs to a wrapper, unless it ends as `outside` says: `decoder.` is part of the model. `extends` names a
built-in map whose rules are tried after its own. Adapters (`…lora_A.default.weight` of PEFT) have the name of the adapted
module, and `.base_layer.` and `.modules_to_save.NAME.` are left out. `order` lists the parameters as the model defines them,
layer by layer, for files that do not keep the order and optimizers that know no names. `linear` names a fused weight, whose
outputs are more than its inputs: where its rows are more than its columns, nothing is transposed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib import resources
from typing import Any

from trainprobe.engine.storage.safe_files import parse_yaml
from trainprobe.errors import FormatError, did_you_mean

TRANSFORM_NAMES = (  # what a name map may ask for; ckpt_compare.transforms carries it out on pieces in files
    *("same", "halves", "column_halves", "thirds", "qkv_by_group", "qkv_blocks"),
    *("rotary_pairs", "transpose", "by_index"),
)
ONE_AFTER_THE_OTHER = frozenset(["halves", "column_halves", "thirds", "qkv_blocks"])  # all rows of a part, then of the next
_FIELD = re.compile(r"\\\{(\w+)\\\}")
_WRITTEN = re.compile(r"\{(\w+)\}")
_OTHER_ADAPTERS = (
    "adamss|boft|c3a|delora|fourierft|frod|glora|gralora|hada|hira|hra|ia3|ln_tuning|lokr|miss|oft|poly_lora|psoft|pvera|randlora|"
    "shira|supertuning|tinylora|trainable_tokens|unilora|vblora|vera|waveft"
)  # how the parameters of PEFT's other methods begin
ADAPTER = re.compile(
    rf"(?P<base>.+)\.(?P<part>(?P<lora>lora_(?:A|B|E|magnitude_vector))|(?:{_OTHER_ADAPTERS})_\w+|ranknum)"
    r"(?:\.(?P<which>(?!weight(?: |$))\w+))?(?P<weight>\.weight)?(?P<further> \([^()]+\))?"
)
ADAPTER_PART = re.compile(rf"\.(?P<method>lora|{_OTHER_ADAPTERS})_\w+(?:\.weight)?(?: \([^()]+\))?|\.ranknum(?: \([^()]+\))?")
TRAINED_WHOLE = re.compile(r"\.modules_to_save\.\w+\.")  # PEFT, of a module that is trained beside the adapters
_OWN_NUMBER = re.compile(r"(?:^|\\\.|\(\?:)\d")  # a pattern that asks for one number
_OPTIONAL = re.compile(r"\\\[(.+?)\\\]")


@dataclass(frozen=True, slots=True)
class NameRule:
    """One line of a name map."""

    pattern: re.Pattern[str]
    to: tuple[str, ...]
    by: tuple[str, ...] = ()
    vocabulary: bool = False
    when: str = ""
    drop: bool = False

    def name_of(self, match: re.Match[str], at: Sequence[int] = ()) -> str:
        """Return the logical name of a part. at: which part it is of each transform."""
        to = self.to[at[-1] if len(self.to) > 1 else 0]
        return to.format_map({**match.groupdict(), "i": at[0] if at else 0})


@dataclass(frozen=True, slots=True)
class NameMap:
    """How one family of names becomes logical names. `signature`: patterns that only this family's names match."""

    family: str
    signature: tuple[re.Pattern[str], ...]
    strip: tuple[str, ...]
    rules: tuple[NameRule, ...]
    order: tuple[re.Pattern[str], ...] = ()
    outside: tuple[str, ...] = ()
    linear: re.Pattern[str] | None = None
    kinds: dict[str, tuple[bool, tuple[NameRule, ...]]] = field(
        default_factory=dict[str, tuple[bool, tuple[NameRule, ...]]], compare=False, repr=False
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

    def of(self, shapes: Iterable[tuple[str, Sequence[int]]]) -> NameMap:
        """Return the map for weights of these shapes, without transposing where they are stored [output, input] already.

        shapes: (name without the wrapper's prefix, shape of the whole weight).
        """
        fused = self.linear
        if fused is None or not any(len(s) == 2 and s[0] > s[1] and fused.fullmatch(self.stripped(name)) for name, s in shapes):
            return self
        rules = tuple(replace(rule, by=tuple(by for by in rule.by if by != "transpose")) for rule in self.rules)
        return replace(self, rules=rules, kinds={})

    def kind_of(self, name: str) -> tuple[bool, tuple[NameRule, ...]]:
        """Return whether a name may be an adapter's, and the rules that may match it: a million names are of a few kinds."""
        kind = ".".join(["0" if part.isdecimal() else part for part in name.split(".")])
        found = self.kinds.get(kind)
        if found is None:
            may = [r for r in self.rules if r.pattern.fullmatch(kind) or _OWN_NUMBER.search(r.pattern.pattern)]
            found = self.kinds[kind] = ADAPTER.fullmatch(kind) is not None, tuple(may)
        return found

    def rule_of(self, name: str, config: Mapping[str, Any]) -> tuple[NameRule, re.Match[str]] | None:
        """Return the first rule that matches a name, with the match; None where none does. config: of the model."""
        for rule in self.kind_of(name)[1]:
            match = rule.pattern.fullmatch(name)
            if match is not None and (not rule.when or config.get(rule.when)):
                return rule, match
        return None

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
    data: Any = parse_yaml(text, where)
    if not isinstance(data, dict) or not isinstance(data.get("rules"), list):
        raise FormatError(f"{where} is not a name map: it needs `family`, `signature` and a list of `rules`")
    rules = tuple(rule for number, entry in enumerate(data["rules"], 1) for rule in _rules(entry, f"{where}: rule {number}"))
    signature, order = (tuple(_compile(p, where) for p in _strings(data.get(key))) for key in ("signature", "order"))
    strip, outside = _strings(data.get("strip")), _strings(data.get("outside"))
    linear = next((_compile(pattern, where) for pattern in _strings(data.get("linear"))), None)
    made = NameMap(str(data.get("family", where)), signature, strip, rules, order, outside, linear)
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


def _rules(entry: Any, where: str) -> list[NameRule]:
    """Return the rules of one entry, one for each pattern that `from` lists."""
    if not isinstance(entry, dict) or not _strings(entry.get("from")):
        raise FormatError(f"{where} is {entry!r}: it needs `from`, the pattern of the names that it matches")
    sources, to, by = (_strings(entry.get(key)) for key in ("from", "to", "by"))
    if not to and not entry.get("drop"):
        raise FormatError(f"{where} ({sources[0]}) needs `to`, the logical name, or `drop: true`")
    for name in by:
        if name not in TRANSFORM_NAMES:
            raise FormatError(f"{where} ({sources[0]}) wants transform {name!r}{did_you_mean(name, list(TRANSFORM_NAMES))}")
    made = [
        NameRule(_compile(source, where), to, by, bool(entry.get("vocabulary")), entry.get("when", ""), bool(entry.get("drop")))
        for source in sources
    ]
    for rule in made:
        unknown = [f for name in to for f in _WRITTEN.findall(name) if f not in {"i", *rule.pattern.groupindex}]
        if unknown:
            raise FormatError(f"{where} ({sources[0]}): `to` has {{{unknown[0]}}}, which `from` does not have")
    return made


@lru_cache(maxsize=1)
def built_in() -> tuple[NameMap, ...]:
    """Return the name maps of this folder, in the order of their file names."""
    folder = resources.files(__name__)
    files = sorted((f for f in folder.iterdir() if f.name.endswith(".yaml")), key=lambda f: f.name)
    return tuple(read_map(f.read_text(encoding="utf-8"), f.name) for f in files)
