"""Which of the shared device functions a kernel imports."""

from __future__ import annotations

import re
from collections.abc import Iterable

DEVICE_FUNCTIONS = (
    "after", "before", "decays", "dot", "dot_both", "dot_fp32", "dot_two", "dot_whole", "earlier_block", "exp",
    "from_on", "in_parts", "in_place", "in_two", "later_block", "level_edge", "level_span", "level_span_T",
    "load_column", "load_tile", "load_vectors", "log2_decay", "of_block", "replaced", "rounded_apart",
    "same_level", "same_level_T", "sigmoid", "sigmoid_slope", "softplus", "store_column", "store_tile",
    "sum_scalars", "sum_tokens", "unit_lower_inverse", "up_to", "within_reach",
)  # fmt: skip


def device_functions(lines: Iterable[str]) -> list[str]:
    """The functions of `kcpgen.runtime.ops` that these lines of a kernel call."""
    called = {name for line in lines for name in re.findall(r"(?<![\w.])(\w+)\(", line)}
    return [name for name in DEVICE_FUNCTIONS if name in called]
