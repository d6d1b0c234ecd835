"""Sizes that are measured, and how they are written on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate

WRITTEN = re.compile(r"(?:(\d+)x(\d+)|\[([\d,*\s]+)\])x(\d+)(?:/(\d+))?(?::(\d+)(?:,(\d+))?)?")
WANTED = "BxTxH or [T1,T2,...]xH, with H/HV for grouped heads and :K or :K,V for widths other than 128"


@dataclass(frozen=True, kw_only=True)
class Shape:
    """lengths: token counts of the sequences packed into the one row, () for a plain batch."""

    batch: int
    tokens: int
    heads: int
    value_heads: int
    key_width: int = 128
    value_width: int = 128
    lengths: tuple[int, ...] = ()

    @property
    def label(self) -> str:
        rows = f"[{_written(self.lengths)}]" if self.lengths else f"{self.batch}x{self.tokens}"
        heads = f"{self.heads}" if self.heads == self.value_heads else f"{self.heads}/{self.value_heads}"
        same = self.key_width == self.value_width
        width = f"{self.key_width}" if same else f"{self.key_width},{self.value_width}"
        return f"{rows}x{heads}" + ("" if width == "128" else f":{width}")

    @property
    def offsets(self) -> tuple[int, ...]:
        return (0, *accumulate(self.lengths)) if self.lengths else ()

    @property
    def grouped(self) -> bool:
        return self.heads != self.value_heads

    @property
    def sizes(self) -> dict[str, int]:
        """By the letters of a signature."""
        return {
            "B": self.batch,
            "T": self.tokens,
            "H": self.heads,
            "HV": self.value_heads,
            "K": self.key_width,
            "V": self.value_width,
        }


def parse(text: str) -> Shape:
    """The shape written as `text`. Raises ValueError that says what is allowed."""
    found = WRITTEN.fullmatch(text.replace(" ", ""))
    if not found:
        raise ValueError(f"{text!r} is no shape: write {WANTED}")
    batch, tokens, packed, heads, value_heads, keys, values = found.groups()
    lengths = _lengths(packed) if packed else ()
    shape = Shape(
        batch=int(batch or 1),
        tokens=int(tokens or sum(lengths)),
        heads=int(heads),
        value_heads=int(value_heads or heads),
        key_width=int(keys or 128),
        value_width=int(values or keys or 128),
        lengths=lengths,
    )
    if 0 in shape.sizes.values() or shape.value_heads % shape.heads:
        raise ValueError(f"{text!r} is no shape: sizes are positive and H divides HV")
    return shape


def _lengths(text: str) -> tuple[int, ...]:
    """`1300,547` or `8*1024`."""
    parts = [part.split("*") for part in text.split(",")]
    if any(len(part) > 2 or "" in part for part in parts):
        raise ValueError(f"[{text}] is no list of lengths: write [1300,547] or [8*1024]")
    return tuple(int(part[-1]) for part in parts for _ in range(int(part[0]) if len(part) == 2 else 1))


def _written(lengths: tuple[int, ...]) -> str:
    same = len(set(lengths)) == 1 and len(lengths) > 1
    return f"{len(lengths)}*{lengths[0]}" if same else ",".join(map(str, lengths))


DEFAULT = tuple(
    map(
        parse,
        (
            "1x8192x32",
            "1x8192x96",
            "1x32768x16",
            "4x4096x32",
            "1x131072x8",
            "[8*1024]x64",
            "[1300,547,2048,963,271,3063]x64",
            "1x8192x32:64",
        ),
    )
)
GROUPED = parse("1x8192x16/32")
