"""Spelling of names: Greek letters are aliases of their ASCII names, some names are taken."""

from __future__ import annotations

import builtins
import difflib
import keyword
import re
import unicodedata
from collections.abc import Iterable

_GREEK = {
    "alpha": "αΑ",
    "beta": "βΒ",
    "gamma": "γΓ",
    "delta": "δΔ",
    "epsilon": "εΕϵ",
    "zeta": "ζΖ",
    "eta": "ηΗ",
    "theta": "θΘϑ",
    "iota": "ιΙ",
    "kappa": "κΚϰ",
    "lambda": "λΛ",
    "mu": "μΜ\u00b5",
    "nu": "νΝ",
    "xi": "ξΞ",
    "omicron": "οΟ",
    "pi": "πΠϖ",
    "rho": "ρΡϱ",
    "sigma": "σΣς",
    "tau": "τΤ",
    "upsilon": "υΥ",
    "phi": "φΦϕ",
    "chi": "χΧ",
    "psi": "ψΨ",
    "omega": "ωΩ",
}
GREEK_ALIASES = {
    letter: name.capitalize() if letter.isupper() else name for name, letters in _GREEK.items() for letter in letters
}

FUNCTIONS = ("exp", "sigmoid", "softplus", "sqrt", "l2norm", "sum", "Diag")
KEYWORDS = ("op", "token", "param", "constant", "flag", "state", "option", "when", "in", "log", "decay")
PREDECLARED = ("I", "t", "scale")
DIMENSIONS = ("B", "T", "H", "HV", "K", "V")
MAX_NAME = 48

_KEYWORD_ARGUMENTS = {
    *("scale", "initial_state", "output_final_state", "final_state", "cu_seqlens", "cu_seqlens_cpu", "backend"),
    *("cp_context", "cp_group", "group", "chunk_size", "chunk_indices", "chunk_offsets", "layout", "dtype", "device"),
}
_GENERATED = {"torch", "triton", "tl", "math", "kcpgen", "generated", "runtime", "typing", "self", "cls", "ctx"}
_BUILTINS = frozenset(dir(builtins))


def canonical(spelling: str) -> str:
    """The ASCII spelling of a name: `β` is `beta`, `Δ_1` is `Delta_1`."""
    return "".join(GREEK_ALIASES.get(character, character) for character in spelling)


def reserved(name: str) -> str:
    """Why `name` cannot be declared in a spec, as the end of a sentence; "" when it can."""
    if name in PREDECLARED:
        return "it is predeclared in every spec"
    if name in KEYWORDS:
        return "it is a keyword of the language"
    if name in FUNCTIONS:
        return "it is a builtin function"
    if name in DIMENSIONS:
        return "it is a dimension"
    if name in _KEYWORD_ARGUMENTS:
        return "it is a keyword of every generated op"
    if name in _GENERATED:
        return "generated code uses it for itself"
    if keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return "it is a Python keyword"
    if name in _BUILTINS:
        return "it is a Python builtin"
    if name.startswith("_") or "__" in name:
        return "names with a leading or a double underscore belong to generated code"
    return ""


def malformed(name: str) -> str:
    """Why `name` is no identifier of generated code, as the end of a sentence; "" when it is one."""
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
        return "names are ASCII letters, digits and underscores, or Greek letters"
    if len(name) > MAX_NAME:
        return f"it is longer than {MAX_NAME} characters"
    return ""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint naming the closest known name, or "" when none is close."""
    candidates = sorted(known)
    if len(name) > MAX_NAME:
        return ""
    same = [other for other in candidates if other.lower() == name.lower()]
    close = same or difflib.get_close_matches(name, candidates, n=1, cutoff=0.6)
    return f"did you mean `{close[0]}`?" if close else ""


def foreign_letters(name: str) -> str:
    """A note naming the letters of `name` that only look like ASCII ones, or ""."""
    foreign = dict.fromkeys(character for character in name if not character.isascii())
    return ", ".join(f"`{character}` is {unicodedata.name(character, 'unknown')}" for character in list(foreign)[:3])
