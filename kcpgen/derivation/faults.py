"""What the derivation can find wrong with a spec, each as one diagnostic."""

from __future__ import annotations

from dataclasses import replace

from kcpgen.diagnostics import Diagnostic
from kcpgen.language.syntax import Name, Node
from kcpgen.spec import Spec

DERIVATION_CODES = {
    "KCP201": "the update is not affine in the state",
    "KCP202": "the state is multiplied from its value side",
    "KCP203": "the decay is not the exponential of declared log decays",
    "KCP204": "the update drops the previous state",
    "KCP205": "the update writes nothing",
    "KCP206": "the readout is not a read of the new state by one key vector",
    "KCP207": "the readout reads the state before the update",
    "KCP208": "not an elementwise expression of one token",
    "KCP209": "something written that cancels out",
}


def not_affine(node: Node) -> Diagnostic:
    return Diagnostic(
        code="KCP201",
        message="the recurrence must be affine in the state",
        span=node.span,
        label="the state occurs twice in this product",
        notes=("a chunk of a nonlinear recurrence has no closed form, so nothing can be computed in parallel",),
        hints=("every term of the update may contain S[t-1] at most once",),
    )


def state_inside(node: Node, what: str) -> Diagnostic:
    return Diagnostic(
        code="KCP201",
        message="the recurrence must be affine in the state",
        span=node.span,
        label=f"the state is inside {what}",
        hints=("the state may only be multiplied by inputs and added to terms without it",),
    )


def value_side(node: Node) -> Diagnostic:
    return Diagnostic(
        code="KCP202",
        message="the state may only be transformed on its key side",
        span=node.span,
        label="this multiplies the state from its value side",
        notes=("S[t] = D S[t-1] + sum of w u^T with u = v + S[t-1]^T a: every factor stands left of S[t-1]",),
        hints=("to act on the value axis, scale the value that is written: k (w ⊙ v)^T",),
    )


def decay_form(node: Node, spec: Spec, found: str) -> Diagnostic:
    declared = [given.name for given in spec.inputs if given.role == "log_decay"]
    example = declared[0] if declared else "g"
    return Diagnostic(
        code="KCP203",
        message="the factor of S[t-1] must be exp of a log decay, exp of a sum of them, or nothing",
        span=node.span,
        label=found,
        notes=("a chunk multiplies up the decays of its tokens, which is only safe as a sum of natural logs <= 0",),
        hints=(
            f"declare a token input as log decay and write exp({example}) S[t-1] or Diag(exp({example})) S[t-1]",
            "a factor f is passed as its natural logarithm: for 1 - f the caller computes log1p(-f)",
        ),
    )


def no_log_decay(name: Name, spec: Spec) -> Diagnostic:
    """As above, of one name in an exp."""
    found = decay_form(name, spec, f"{name.name} is not a log decay")
    lines = [given.span.line for given in spec.inputs if given.name == name.name]
    if not lines:
        return found
    hint = f"add `log decay` to the declaration of `{name.name}` on line {lines[0]}, if it is the natural log of one"
    return replace(found, hints=(hint, *found.hints[1:]))


def dropped(node: Node) -> Diagnostic:
    return Diagnostic(
        code="KCP204",
        message="the update must keep the previous state, decayed or not",
        span=node.span,
        label="S[t-1] has no factor exp(...) or 1 here",
        hints=("write S[t-1] + ..., or exp(g) S[t-1] + ... with a log decay g",),
    )


def nothing_written(node: Node) -> Diagnostic:
    return Diagnostic(
        code="KCP205",
        message="the update must add at least one rank-1 term",
        span=node.span,
        label="nothing is written or erased here",
        hints=("write a key-value pair, for example exp(g) S[t-1] + k v^T",),
    )


def readout_form(node: Node, found: str) -> Diagnostic:
    return Diagnostic(
        code="KCP206",
        message="the readout must be S[t]^T times one key vector",
        span=node.span,
        label=found,
        hints=("write o[t] = scale * S[t]^T q; skip connections and output gates belong outside the op",),
    )


def output_scaled(node: Node) -> Diagnostic:
    return readout_form(node, "this acts on the output, after the read")


def cancelled(node: Node, what: str) -> Diagnostic:
    return Diagnostic(
        code="KCP209",
        message=f"{what} cancels out of the recurrence",
        span=node.span,
        label="what is left does not depend on it",
        notes=("a generated op would take an argument, and return a gradient, for nothing",),
        hints=("simplify the equation and drop what it does not need",),
    )


def readout_before(node: Node) -> Diagnostic:
    return Diagnostic(
        code="KCP207",
        message="a readout of the state before the update is not supported yet",
        span=node.span,
        label="this reads S[t-1]",
        hints=("write S[t]; a term in this token's key and value can be added outside the op",),
    )
