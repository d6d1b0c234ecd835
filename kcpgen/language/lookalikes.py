"""Characters that look like one the language uses, and what was meant by them."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable

from kcpgen.language.names import canonical

_LETTERS = str.maketrans(
    {
        **dict(zip("авеіјкорсѕухһԁԛԝгґ", "abeijkopcsyxhdqwrr", strict=True)),
        **dict(zip("АВЕІЈКМНОРСЅТУХԚԜ", "ABEIJKMHOPCSTYXQW", strict=True)),
        **dict(zip("ɑɡıĸŋʋ", "agiknv", strict=True)),
        "ß": "β",
        "ẞ": "β",
    }
)
_GREEK = {
    **{"α": "a", "β": "B", "γ": "y", "η": "n", "ι": "i", "κ": "k", "ν": "v", "ο": "o", "ρ": "p", "τ": "t"},
    **{"υ": "u", "χ": "x", "ω": "w"},
}
_TRANSPOSES = {"⊺", "⊤", "⟙", "┬", "⏉", "т", "Т", "Τ", "τ", "ᵀ", "ᵗ", "⟂", "t", "′"}
_SYMBOLS = {
    **dict.fromkeys("“”„‟«»‹›＂", 'a title stands in double quotes, `"`'),
    **dict.fromkeys("‘’‚‛′", 'a transpose is written `^T`, a title stands in double quotes, `"`'),
    **dict.fromkeys("‐‑‒–—―", "a minus is written `-`"),
    **dict.fromkeys("×∗✕", "a product is written by juxtaposition, `k v^T`, or with `*`"),
    **dict.fromkeys("⊤⊺⟙", "did you mean `^T`?"),
    **dict.fromkeys("÷∕⁄", "did you mean `/`?"),
    **dict.fromkeys("∶ː꞉", "did you mean `:`?"),
    "⊗": "an outer product is written `k v^T`, an elementwise one `.*`",
}


def meant_name(spelling: str, known: Iterable[str]) -> str:
    """A hint naming the declared name that `spelling`, as the lexer made it canonical, looks like; "" for none."""
    names = set(known)
    for letters in (_folded(spelling), _as_latin(spelling), *_as_greek(spelling)):
        if letters != spelling and canonical(letters) in names:
            return f"did you mean `{letters}`?"
    return ""


def meant_letters(spelling: str) -> str:
    """A hint with the letters that generated code can carry and that a name which it cannot looks like, or ""."""
    letters = _folded(spelling)
    return (
        f"did you mean `{letters}`?"
        if letters != spelling and canonical(letters).isascii() and letters.isidentifier()
        else ""
    )


def meant_symbol(character: str, following: str) -> str:
    """A hint on a character that no statement uses, before the token `following`; "" where nothing is like it."""
    if character == "^" and (following in _TRANSPOSES or following in {canonical(letter) for letter in _TRANSPOSES}):
        return "did you mean `^T`?"
    plain = unicodedata.normalize("NFKC", character)
    return _SYMBOLS.get(character, f"did you mean `{plain}`?" if plain != character and plain.isascii() else "")


def foreign(character: str) -> str:
    """A note with the name of a character that is not ASCII, else ""."""
    return "" if character.isascii() else f"`{character}` is {unicodedata.name(character, 'unknown')}"


def _folded(spelling: str) -> str:
    return unicodedata.normalize("NFKC", spelling).translate(_LETTERS)


def _as_latin(spelling: str) -> str:
    """`nu`, which the lexer made of `ν`, as `v`."""
    return next((latin for letter, latin in _GREEK.items() if canonical(letter) == spelling), spelling)


def _as_greek(spelling: str) -> list[str]:
    return [letter for letter, latin in _GREEK.items() if latin == spelling]
