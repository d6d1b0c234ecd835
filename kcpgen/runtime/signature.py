"""What an op takes, as data, and the one check that every call goes through before anything is launched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from kcpgen.runtime import backends, checks
from kcpgen.runtime.checks import Sizes, refusal
from kcpgen.runtime.context_parallel.arguments import meeting_others, share
from kcpgen.runtime.context_parallel.context import CPContext


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call that passed every check."""

    backend: str
    scale: float
    cu_seqlens: tuple[int, ...] | None
    params: Mapping[str, Tensor | None]


@dataclass(frozen=True, kw_only=True)
class Signature:
    """The arguments of a generated op beyond those that every op has.

    inputs: token inputs and their axes, e.g. {"q": "B T H K", "g": "B T HV"}. params: likewise, e.g. {"bias": "HV K"}.
    constants: each with the largest value allowed. flags: booleans that only select a variant of an option.
    options: for each boolean option its variants: the flag or constant that selects it ("" for the plain form) and
    the parameters and constants which that variant reads; the last variant selected is the active one.
    always: parameters and constants that the equation itself reads.
    """

    op: str
    inputs: Mapping[str, str]
    params: Mapping[str, str]
    constants: Mapping[str, float]
    flags: tuple[str, ...]
    options: Mapping[str, Mapping[str, tuple[str, ...]]]
    always: tuple[str, ...]

    def check(
        self,
        *,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor | None],
        constants: Mapping[str, float | None],
        switches: Mapping[str, bool],
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        backend: str | None,
        cp_context: CPContext | None = None,
    ) -> Call:
        """The backend to call and its arguments brought to one form.

        `switches` holds options and flags. Raises TypeError, ValueError, and RuntimeError or ImportError for a backend
        that is not available; with a cp_context the other ranks are told of it.
        """
        with meeting_others(self.op, cp_context):
            return self._check(
                inputs=inputs,
                params=params,
                constants=constants,
                switches=switches,
                scale=scale,
                initial_state=initial_state,
                output_final_state=output_final_state,
                cu_seqlens=cu_seqlens,
                cu_seqlens_cpu=cu_seqlens_cpu,
                backend=backend,
                cp_context=cp_context,
            )

    def _check(
        self,
        *,
        inputs: Mapping[str, Tensor],
        params: Mapping[str, Tensor | None],
        constants: Mapping[str, float | None],
        switches: Mapping[str, bool],
        scale: float | None,
        initial_state: Tensor | None,
        output_final_state: bool,
        cu_seqlens: Tensor | None,
        cu_seqlens_cpu: Tensor | None,
        backend: str | None,
        cp_context: CPContext | None,
    ) -> Call:
        optional = {**params, "initial_state": initial_state}
        tensors = {
            name: checks.tensor(self.op, name, x)
            for name, x in {**inputs, **optional}.items()
            if name in inputs or x is not None
        }
        device = checks.same_device(self.op, tensors)
        sizes = checks.sizes(self.op, {name: tensors[name] for name in inputs}, self.inputs)
        self._check_options(params, constants, switches)
        checks.boolean(self.op, "output_final_state", output_final_state)
        packed = checks.offsets(self.op, cu_seqlens, cu_seqlens_cpu, sizes, device)
        sizes["N"] = sizes["B"] if packed is None else len(packed) - 1
        if cp_context is not None:
            sizes["N"] = share(self.op, cp_context, cu_seqlens, sizes)
        if initial_state is not None:
            checks.shape(self.op, "initial_state", initial_state, ["N", "HV", "K", "V"], sizes)
        chosen = backends.choose(self.op, backend, device, tuple(x.dtype for x in tensors.values()))
        return Call(
            backend=chosen if sizes["B"] and sizes["T"] else "eager",  # no token: no kernel has anything to do
            scale=sizes["K"] ** -0.5 if scale is None else checks.real(self.op, "scale", scale),
            cu_seqlens=packed,
            params={name: self._param(name, x, sizes) for name, x in params.items()},
        )

    def _param(self, name: str, x: Tensor | None, sizes: Sizes) -> Tensor | None:
        return None if x is None else checks.param(self.op, name, x, self.params[name].split(), sizes)

    def _check_options(
        self, params: Mapping[str, Tensor | None], constants: Mapping[str, float | None], switches: Mapping[str, bool]
    ) -> None:
        """Everything an active variant reads is given, and nothing is given that no active variant reads."""
        for name, value in switches.items():
            checks.boolean(self.op, name, value)
        for name, constant in constants.items():
            if constant is not None and checks.real(self.op, name, constant) > self.constants[name]:
                raise ValueError(refusal(self.op, name, constant, f"a number of at most {self.constants[name]:g}"))
        given = {name for name, value in {**params, **constants}.items() if value is not None}
        given |= {name for name in self.flags if switches[name]}
        used = {*self.always}
        self._require("the equation", self.always, given)
        for option in self.options:
            if switches[option]:
                used |= self._active_reads(option, given)
        for name in sorted(given - used):
            raise ValueError(refusal(self.op, name, "given, but nothing reads it", self._readers(name)))

    def _active_reads(self, option: str, given: set[str]) -> set[str]:
        """What the option's active variant reads, and the flags and constants that select variants."""
        variants = self.options[option]
        selected = [when for when in variants if not when or when in given]
        self._require(f"{option}=True", variants[selected[-1]], given)
        return {*variants[selected[-1]], *selected} - {""}

    def _require(self, reader: str, reads: tuple[str, ...], given: set[str]) -> None:
        for name in reads:
            if name not in given:
                kind = "a tensor" if name in self.params else "a number"
                raise ValueError(refusal(self.op, name, "None", f"{kind}, because {reader} reads it"))

    def _readers(self, name: str) -> str:
        readers = [
            f"{option}=True"
            for option, variants in self.options.items()
            if name in variants or any(name in reads for reads in variants.values())
        ]
        return f"only with {' or '.join(readers)}" if readers else "None, since no option of this op reads it"
