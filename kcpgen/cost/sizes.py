"""The sizes a cost is asked for, as written on the command line."""

from __future__ import annotations

import re
from dataclasses import dataclass

WRITTEN = re.compile(r"(\d+)x(\d+)x(\d+)(?:/(\d+))?x(\d+)x(\d+)")
LARGEST_WIDTH = 256


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """B rows of T tokens; H heads that read and write, HV value heads; key and value widths."""

    B: int
    T: int
    H: int
    HV: int
    K: int
    V: int

    @property
    def token_heads(self) -> int:
        return self.B * self.T * self.HV


def parse_sizes(text: str) -> Sizes:
    """BxTxHxKxV, H/HV for grouped heads. Raises ValueError that says what is allowed."""
    found = WRITTEN.fullmatch(text)
    if not found:
        raise ValueError(
            f"{text!r} is not BxTxHxKxV, e.g. 1x8192x32x128x128 or, for grouped heads, 1x8192x16/32x128x128"
        )
    B, T, H, HV, K, V = (int(part) if part else 0 for part in found.groups())
    sizes = Sizes(B=B, T=T, H=H, HV=HV if found[4] else H, K=K, V=V)
    if 0 in vars(sizes).values():
        raise ValueError(f"{text!r}: every size must be at least 1")
    if sizes.HV % sizes.H:
        raise ValueError(f"{text!r}: {sizes.HV} value heads cannot share {sizes.H} heads evenly")
    if max(K, V) > LARGEST_WIDTH:
        raise ValueError(f"{text!r}: K and V are at most {LARGEST_WIDTH}")
    return sizes
