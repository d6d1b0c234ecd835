"""What a rewrite may do: replace one token input by a value of its own shape, made of itself and learned parameters."""

from __future__ import annotations

from kcpgen.diagnostics import Faults
from kcpgen.language import names
from kcpgen.language import statements as st
from kcpgen.language.declarations import Declarations
from kcpgen.language.promises import bounds
from kcpgen.language.reads import check_reads, reads
from kcpgen.language.shapes import ShapeChecker, shown
from kcpgen.language.syntax import Name
from kcpgen.spec import Bounds, Rewrite, TokenInput


class RewriteChecker:
    def __init__(self, declared: Declarations, faults: Faults) -> None:
        self.declared = declared
        self.faults = faults
        self.shapes = declared.shapes
        self.inputs = {given.name: given for given in declared.inputs}
        self.params = {param.name for param in declared.params}
        self.constants = {constant.name for constant in declared.constants}

    def checked(self, rewrite: st.Rewrite, when: str) -> Rewrite | None:
        """The rewrite as later stages see it; `when` is the flag or constant its variant tests."""
        target = self.inputs.get(rewrite.target.text)
        if target is None:
            self._report_target(rewrite.target)
            return None
        check_reads(rewrite.value, self.declared, "rewrite", self.faults)
        for name in reads(rewrite.value):
            self._check_read(name, target, when)
        self._check_shape(rewrite, target)
        promised = self._bounds(rewrite, target, when)
        return Rewrite(target=target.name, value=rewrite.value, bounds=promised, span=rewrite.span)

    def _report_target(self, target: st.Word) -> None:
        message = f"`{target.text}` is not a token input"
        hint = names.did_you_mean(target.text, self.inputs)
        note = "an option replaces token inputs, nothing else" if target.text in self.declared.words else ""
        self.faults.add("KCP112", message, target.span, note=note, hint=hint)

    def _check_read(self, name: Name, target: TokenInput, when: str) -> None:
        if name.name in self.inputs and name.name != target.name:
            note = "a rewrite reads its target, parameters and the constant its `when` tests"
            message = f"the rewrite of `{target.name}` reads `{name.name}`"
            self.faults.add("KCP114", message, name.span, note=note)
        elif name.name in self.constants and name.name != when:
            note = f"`{name.name}` may be None here; `when {name.name}:` makes sure that it is given"
            self.faults.add("KCP117", f"constant `{name.name}` is not tested", name.span, note=note)
        elif name.name in self.params and target.heads == "H":
            note = f"`{target.name}` has H heads; parameters have HV, a multiple of H"
            message = f"`{name.name}` has no value for the heads of `{target.name}`"
            self.faults.add("KCP114", message, name.span, note=note)

    def _check_shape(self, rewrite: st.Rewrite, target: TokenInput) -> None:
        shape = ShapeChecker(self.shapes, self.faults).shape(rewrite.value)
        expected = self.shapes.get(target.name)
        if shape and expected and shape != expected:
            message = f"`{target.name}` is {shown(expected)}, its rewrite is {shown(shape)}"
            self.faults.add("KCP121", message, rewrite.value.span)

    def _bounds(self, rewrite: st.Rewrite, target: TokenInput, when: str) -> Bounds | None:
        if rewrite.promise is None:
            return None
        return bounds(rewrite.promise, target.role, when if when in self.constants else "", self.faults)
