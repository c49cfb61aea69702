"""A config's rules about the modules that are quantized, to check the tensors by."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["float", "int"]
LINEAR = ("Linear",)
"""Classes of modules that rules may name in place of the modules."""


@dataclass(frozen=True)
class Scheme:
    """The stored form of a weight's values. group: inputs that share a scale; None if unspecified,
    or if all do. block: rows and columns that share a scale. asymmetric: with a zero per group.
    zero_offset: what is added to stored zeros. indexed: inputs have groups in an order of their
    own, which the checkpoint must have."""

    kind: Kind
    bits: int
    group: int | None = None
    block: tuple[int, int] | None = None
    asymmetric: bool = False
    zero_offset: int = 0
    indexed: bool = False

    def __str__(self) -> str:
        if self.kind == "float":
            names = {(4, 32): "MXFP4", (8, 32): "MXFP8"}
            default = "NVFP4" if self.bits == 4 else f"FP{self.bits}"
            return names.get((self.bits, self.group or 0), default)
        return f"int{self.bits}" + (f" with groups of {self.group}" if self.group else "")

    def agrees(self, stored: Scheme) -> bool:
        """Whether a stored weight can be what a config calls by this scheme."""
        if (self.kind, self.bits) != (stored.kind, stored.bits):
            return False
        return None in (self.group, stored.group) or self.group == stored.group


FP8 = Scheme(kind="float", bits=8)
NVFP4 = Scheme(kind="float", bits=4, group=16)
MXFP4 = Scheme(kind="float", bits=4, group=32)
MXFP8 = Scheme(kind="float", bits=8, group=32)


@dataclass(frozen=True)
class Rule:
    """The scheme of the modules that `targets` name: by their names, by "re:" and a pattern, by
    the name of a module around them, or by their class."""

    targets: tuple[str, ...]
    scheme: Scheme


@dataclass(frozen=True)
class Rules:
    """ignored: modules that are not quantized: names, "re:" patterns or shell wildcards. loose:
    parts of names count, too, as in older files of ModelOpt. A module has several
    names, by what stands before its layers' names in files."""

    rules: tuple[Rule, ...] = ()
    ignored: tuple[str, ...] = ()
    loose: bool = False

    def scheme_of(self, names: Sequence[str]) -> Scheme | None:
        """Return the scheme of a module; None if no rule names it. A name takes precedence over a
        pattern, and both over a class; then the first rule does."""
        for match in (_is_named, _is_around, _fits_pattern):
            for rule in self.rules:
                if any(match(target, name) for target in rule.targets for name in names):
                    return rule.scheme
        for rule in self.rules:
            if any(target in LINEAR for target in rule.targets):
                return rule.scheme
        return None

    def ignores(self, names: Sequence[str]) -> str | None:
        """Return the entry that says that a module is not quantized; None if there is none."""
        for entry in self.ignored:
            for name in names:
                if _is_named(entry, name) or _fits_pattern(entry, name):
                    return entry
        return None

    def may_ignore(self, names: Sequence[str]) -> bool:
        """Whether an entry by some reading says that a module is not quantized."""
        if self.ignores(names) is not None:
            return True
        around = any(_is_around(entry, name) for entry in self.ignored for name in names)
        parts = any(entry in name for entry in self.ignored for name in names)
        return around or (self.loose and parts)


NO_RULES = Rules()


def _is_named(entry: str, name: str) -> bool:
    return entry == name


def _is_around(entry: str, name: str) -> bool:
    return name.startswith(f"{entry}.")


def _fits_pattern(entry: str, name: str) -> bool:
    if entry.startswith("re:"):
        return re.match(entry.removeprefix("re:"), name) is not None
    return "*" in entry and fnmatch.fnmatchcase(name, entry)
