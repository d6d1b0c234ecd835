"""The op and its peers brought to one form of call, (o, final state) = call(); what each peer can take."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import Tensor

from benchmarks.harness.inputs import Arguments
from benchmarks.harness.shapes import Shape
from kcpgen.verify.op import Op

Call = Callable[[], tuple[Tensor, Any]]
OURS = "kcpgen"
BACKEND = "triton"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A peer's function for one op. grouped: takes H < HV. gates: whether it can compute a bounded gate itself."""

    module: str
    function: str
    grouped: bool = False
    gates: bool = False


@dataclass(frozen=True, kw_only=True)
class Peer:
    """environment: set before the import, so that what is measured is what it is said to be."""

    name: str
    distribution: str
    module: str
    environment: Mapping[str, str]
    entries: Mapping[str, Entry]
    widths: tuple[int, ...] = ()  # key and value widths it is limited to; (): any
    tuned: bool = False  # its kernels are tuned by Triton, at the first call with new sizes
    by_tokens: bool = False  # which kernels it compiles depends on how many sequences and tokens there are

    def unsupported(self, op: str, shape: Shape, bound: float | None) -> str:
        """Why the peer has no such call, "" if it has. bound: of the log decay, computed and promised in the call."""
        entry = self.entries.get(op)
        if entry is None:
            return f"has no {op}"
        if shape.grouped and not entry.grouped:
            return f"{entry.function} takes no grouped heads"
        if self.widths and {shape.key_width, shape.value_width} - set(self.widths):
            return f"{entry.function} takes only K = V = {' or '.join(map(str, self.widths))}"
        if bound is not None and not entry.gates:
            return f"{entry.function} takes no bounded gate"
        return ""


FLA = Peer(
    name="fla",
    distribution="fla-core",
    module="fla",
    environment={"FLA_DISABLE_BACKEND_DISPATCH": "1"},  # else other backends replace its Triton kernels silently
    entries={
        "kda": Entry(module="fla.ops.kda", function="chunk_kda", grouped=True, gates=True),
        "gdn": Entry(module="fla.ops.gated_delta_rule", function="chunk_gated_delta_rule", grouped=True),
        "dplr": Entry(module="fla.ops.generalized_delta_rule", function="chunk_dplr_delta_rule"),
        "delta_rule": Entry(module="fla.ops.delta_rule", function="chunk_delta_rule"),
        "gla": Entry(module="fla.ops.gla", function="chunk_gla"),
        "simple_gla": Entry(module="fla.ops.simple_gla", function="chunk_simple_gla"),
        "gdn2": Entry(module="fla.ops.gdn2", function="chunk_gdn2"),
        "comba": Entry(module="fla.ops.comba", function="chunk_comba", grouped=True),
    },
    tuned=True,
)
FLASH_QLA = Peer(
    name="FlashQLA",
    distribution="flash-qla",
    module="flash_qla",
    environment={},
    entries={"gdn": Entry(module="flash_qla", function="chunk_gated_delta_rule", grouped=True)},
    widths=(128,),
    by_tokens=True,  # it cuts sequences, and tiles the value axis, by what fills the device
)
PEERS = (FLA, FLASH_QLA)


def absence(peer: Peer) -> str:
    """Why the peer cannot be measured here, "" if it can."""
    os.environ.update(peer.environment)
    try:
        import_module(peer.module)
        for entry in peer.entries.values():
            import_module(entry.module)
    except Exception as error:  # a peer may fail to import in any way
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""


def installed(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def our_call(op: Op, arguments: Arguments) -> Call:
    return lambda: op.chunk(
        **arguments.tokens,
        **arguments.params,
        **arguments.keywords,
        cu_seqlens=arguments.cu_seqlens,
        cu_seqlens_cpu=arguments.cu_seqlens_cpu,
        backend=BACKEND,
    )


def peer_call(peer: Peer, op: str, arguments: Arguments) -> Call:
    entry = peer.entries[op]
    function = getattr(import_module(entry.module), entry.function)
    return lambda: function(**arguments.tokens, **peer_keywords(peer, arguments))


def peer_keywords(peer: Peer, arguments: Arguments) -> dict[str, Any]:
    """Everything beyond the token inputs, whose names are the same everywhere."""
    keywords: dict[str, Any] = {}
    if arguments.cu_seqlens is not None:
        keywords["cu_seqlens"] = arguments.cu_seqlens
        if peer is FLA:
            keywords["cu_seqlens_cpu"] = arguments.cu_seqlens_cpu
    if arguments.bound is not None:
        params = {name: x.flatten() for name, x in arguments.params.items()}
        keywords |= {"use_gate_in_kernel": True, "safe_gate": True, "lower_bound": arguments.bound, **params}
    return keywords
