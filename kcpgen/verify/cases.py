"""What is compared: shapes, lengths, dtypes, options and the corners where chunked kernels are known to break."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from kcpgen.verify.op import Op

GATES = ("zero", "mixed", "heads", "reset", "spikes")
SIZES = (60, 64, 100, 128, 256)
LENGTHS = (1, 63, 64, 65, 1000, 2048)
EMPTY_ENDS = (0, 0, 1, 64, 64, 129, 150, 150)  # sequences of no tokens at the start, in the middle and at the end
FEW_ENDS = (0, 0, 1, 1, 34, 34)  # likewise, in what an interpreter gets through in a second


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison. `backend` "eager" runs in float64, "triton" in `dtype`.

    offsets: cu_seqlens of a packed row, () for a plain batch. gates, keys: how the log decays and the key vectors are
    drawn (see `kcpgen.verify.inputs`). extreme: the inputs are there to break things, the bound is wider.
    segments: into how many the kernels cut each sequence, None for what suits the device. replayed: whether a forward
    keeps few states (`kcpgen.runtime.kept`). halves: whether heads that forget run both halves of a sequence side by
    side (`kcpgen.runtime.halves`), None for what suits the device.
    """

    label: str
    backend: str
    dtype: str = "bfloat16"
    batch: int = 1
    tokens: int = 70
    heads: int = 2
    value_heads: int = 2
    key_width: int = 64
    value_width: int = 64
    offsets: tuple[int, ...] = ()
    keywords: Mapping[str, bool | float] = field(default_factory=dict)
    gates: str = "random"
    keys: str = "random"
    initial_state: bool = True
    loss: str = "both"  # "output", "state" or "both"
    segments: int | None = None
    replayed: bool = False
    halves: bool | None = None

    @property
    def sequences(self) -> int:
        return len(self.offsets) - 1 if self.offsets else self.batch

    @property
    def extreme(self) -> bool:
        return self.gates not in ("random", "slow") or self.keys != "random"

    @property
    def compiled_for(self) -> tuple[object, ...]:
        """Cases that agree in this share their compiled kernels."""
        return self.backend, self.dtype, self.key_width, self.value_width, tuple(sorted(self.keywords.items()))


def exact_cases(op: Op, quick: bool) -> tuple[Case, ...]:
    """Eager float64 against the per-token reference."""
    base = Case(label="", backend="eager", dtype="float64", batch=2, tokens=70, key_width=16, value_width=16)
    lengths = (1, 65) if quick else (1, 2, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130)
    return (
        *(replace(base, label=f"T={length}", tokens=length) for length in lengths),
        replace(base, label="K=12 V=10", key_width=12, value_width=10),
        *_corners(op, base),
    )


def interpreted_cases(op: Op, quick: bool) -> tuple[Case, ...]:
    """Small shapes for Triton's interpreter, mostly in fp32, where a fault is not mistaken for rounding."""
    base = Case(label="", backend="triton", dtype="float32", tokens=33, key_width=16, value_width=16)
    one = replace(base, heads=1, value_heads=1)
    cases = (
        replace(base, label="T=33"),
        replace(base, label="K=20 V=12 T=70", tokens=70, key_width=20, value_width=12),
        replace(base, label="bf16", tokens=70, dtype="bfloat16", key_width=32, value_width=32),
    )
    few = (
        replace(one, label="packed, empty sequences", offsets=FEW_ENDS, tokens=FEW_ENDS[-1]),
        replace(one, label="HV=2H", value_heads=2),
        replace(one, label="repeated keys", tokens=64, keys="repeated", gates="zero"),
        replace(one, label="in 4 segments", tokens=290, segments=4, gates="slow"),
        replace(one, label="few states kept", tokens=290, gates="slow", replayed=True),  # more than one where C = 32
        *_halved(op, replace(base, tokens=290)),
    )
    more = (replace(base, label="fp16", dtype="float16"), replace(base, label="T=1", tokens=1))
    return (*cases, *few) if quick else (*cases, *more, *_corners(op, base))


def gpu_cases(op: Op, quick: bool) -> tuple[Case, ...]:
    """Triton on a GPU: every size at every length, then the corners."""
    base = Case(label="", backend="triton", tokens=1000)
    return (
        *_grid(base, (64,) if quick else SIZES, (1, 65, 1000) if quick else LENGTHS),
        *([] if quick else _unequal(base)),
        replace(base, label="fp16", dtype="float16"),
        replace(base, label="fp32", dtype="float32"),
        *_corners(op, replace(base, tokens=200)),
        *_cut(base),
        replace(base, label="few states kept", gates="slow", replayed=True),
        replace(base, label="few states kept, in 4 segments", gates="slow", replayed=True, segments=4),
        *_many(base),
        *_halved(op, replace(base, value_heads=4)),
        *([] if quick else [replace(base, label="T=32768", tokens=32768, heads=1, value_heads=1)]),
    )


def _grid(base: Case, sizes: tuple[int, ...], lengths: tuple[int, ...]) -> Iterator[Case]:
    for size in sizes:
        for length in lengths:
            yield replace(base, label=f"K=V={size} T={length}", key_width=size, value_width=size, tokens=length)


def _unequal(base: Case) -> Iterator[Case]:
    for key, value in ((64, 128), (128, 64), (100, 60), (60, 256), (72, 120)):
        yield replace(base, label=f"K={key} V={value}", key_width=key, value_width=value, tokens=200)


def _cut(base: Case) -> Iterator[Case]:
    """Sequences in segments, as long ones of few heads would be; states must outlive them, or none would be missed, but
    in those of which a part is summarised."""
    base = replace(base, gates="slow")
    yield replace(base, label="in 4 segments", segments=4)
    yield replace(base, label="fp32 in 4 segments", segments=4, dtype="float32")
    yield replace(base, label="in 4 segments that forget", segments=4, gates="random")
    packed = replace(base, batch=1, offsets=EMPTY_ENDS, tokens=EMPTY_ENDS[-1], key_width=100, value_width=60)
    yield replace(packed, label="packed, K=100 V=60, in 3 segments", segments=3)


def _halved(op: Op, base: Case) -> Iterator[Case]:
    """Sequences of which some heads, that forget, run both halves side by side, and the others all of it."""
    if op.has_halves:
        base = replace(base, gates="heads", halves=True)  # of every other head
        yield replace(base, label="in halves")
        yield replace(base, label="in halves, packed", offsets=(0, base.tokens // 2 + 7, base.tokens))
        yield replace(base, label="in halves, few states kept", replayed=True)
        yield replace(base, label="in halves, all heads", gates="random")


def _many(base: Case) -> Iterator[Case]:
    """More programs of 32 columns than multiprocessors, so that serial kernels take 64; and more of 64, so that they
    may take 128, with a border of sequences within a chunk."""
    one = replace(base, batch=1, tokens=200, heads=40, value_heads=40, key_width=128, value_width=128)
    yield replace(one, label="many heads")
    yield replace(one, label="many heads, packed", offsets=(0, 100, 200))


def _corners(op: Op, base: Case) -> Iterator[Case]:
    """Packing, grouped heads, states, options and extremes, at one shape."""
    packed = replace(base, batch=1, offsets=EMPTY_ENDS, tokens=EMPTY_ENDS[-1])
    yield replace(packed, label="packed, empty sequences")
    yield replace(base, label="HV=2H", value_heads=2 * base.heads)
    yield replace(base, label="no initial state", initial_state=False)
    yield replace(base, label="loss on the state", loss="state")
    yield replace(base, label="loss on the output", loss="output")
    for label, keywords in option_keywords(op):
        yield replace(base, label=label, keywords=keywords)
    if op.description.log_decays:
        for gates in GATES:
            yield replace(base, label=f"gates: {gates}", gates=gates)
    yield replace(base, label="repeated keys", keys="repeated", gates="zero")


def option_keywords(op: Op) -> Iterator[tuple[str, Mapping[str, bool | float]]]:
    """Every variant of every option by itself, then all options together."""
    together: dict[str, bool | float] = {}
    for option, variants in op.description.rewrites.items():
        for when, targets in variants.items():
            switch = {when: _switch(op, when, targets)} if when else {}
            yield " ".join([option, *switch]), {option: True, **switch}
        together.update({option: True, **switch})
    if len(op.description.rewrites) > 1:
        yield "all options", together


def _switch(op: Op, name: str, targets: tuple[str, ...]) -> bool | float:
    """A value for what selects a variant: a flag is True, a constant negative where a log decay is made from it."""
    if name in op.signature.flags:
        return True
    return -2.0 if set(op.description.log_decays) & set(targets) else 0.5
