"""A derivation for a person (`to_text`, `to_latex`) and for a program (`to_json`). The same bytes in every run."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import sympy
from sympy.printing.str import StrPrinter

from kcpgen.derivation import structure
from kcpgen.derivation.chunk_form import ChunkForm, Equation, Monomial
from kcpgen.derivation.latex import to_latex_document
from kcpgen.derivation.normal_form import NormalForm
from kcpgen.derivation.proof import Proof
from kcpgen.language.format import equations

# (field of ChunkForm, heading)
PARTS = (
    ("implicit", "Chunk, as the recurrence gives it"),
    ("solved", "Chunk, solved"),
    ("summary", "Rank summary: S_next = M S + S_ext"),
    ("reverse_scan", "Backward, serial: given dO and dS_next"),
    ("gradients", "Backward, parallel over chunks"),
    ("summary_adjoint", "Backward rank summary: the same M, transposed"),
)


def to_text(form: ChunkForm, proof: Proof) -> str:
    """The derivation on a page: equation, normal form, structure, chunk, adjoints, proof."""
    spec = form.normal_form.spec
    blocks = [
        [f"{spec.name}: {spec.title}" if spec.title != spec.name else spec.name],
        _section("As written", equations(spec)),
        _section("Normal form", _normal_form(form.normal_form)),
        _section("Structure", structure.facts(form)),
        _section("Operands of a chunk of C tokens", _operands(form.normal_form)),
        *(_section(heading, _equations(getattr(form, part))) for part, heading in PARTS),
        _section("Proof", proof_text(proof)),
    ]
    return "\n\n".join("\n".join(line.rstrip() for line in block) for block in blocks) + "\n"


def to_latex(form: ChunkForm, proof: Proof) -> str:
    """The equations as amsmath `align*` blocks, with the proof as a comment; to be pasted into a document."""
    parts = [(heading, getattr(form, part)) for part, heading in PARTS]
    return to_latex_document(form.normal_form, parts, proof_text(proof))


def to_json(form: ChunkForm, proof: Proof) -> str:
    """Every stage as JSON: expressions as text, equations as lists of signed factors."""
    normal, spec = form.normal_form, form.normal_form.spec
    update, readout = equations(spec)
    document = {
        "op": spec.name,
        "title": spec.title,
        "written": {"update": update, "readout": readout},
        "normal_form": _normal_form_data(normal),
        "diagonal_summary": form.diagonal_summary,
        "shared_vectors": [{"base": expr_text(v.base), "users": v.users} for v in structure.shared_vectors(normal)],
        "operands": [
            {"name": o.name, "vector": expr_text(o.vector), "decay": o.decay} for o in structure.operands(normal)
        ],
        "scores": [_scores_data(each) for each in structure.scores(normal)],
        "equations": {part: [_equation_data(e) for e in getattr(form, part)] for part, _ in PARTS},
        "proof": _proof_data(proof),
    }
    return json.dumps(document, indent=2, ensure_ascii=False) + "\n"


def _section(heading: str, lines: Iterable[str]) -> list[str]:
    return [heading, *(f"    {line}" for line in lines)]


def _normal_form(form: NormalForm) -> list[str]:
    decay, count = form.decay, len(form.terms)
    diagonal = "" if decay is None else "exp(log) " if decay.axis == "" else "Diag(exp(log)) "
    lines = [
        f"S[t] = {diagonal}S[t-1]{''.join(f' + w_{j} u_{j}^T' for j in range(count))}",
        *(f"u_{j}  = {_corrected(form, j)}" for j in range(count)),
        "o[t] = S[t]^T read",
        "",
        f"read = {expr_text(form.read)}",
    ]
    if decay is not None:
        lines.append(f"log  = {expr_text(decay.log)}")
    for j, term in enumerate(form.terms):
        lines += ["", f"term {j}: {structure.erase_in_words(form, term)}", f"  w_{j} = {expr_text(term.write)}"]
        lines += [f"  v_{j} = {expr_text(term.value)}"] if term.value != 0 else []
        lines += [f"  a_{j} = {_erase(form, j)}"] if term.erase != 0 else []
    return lines


def _corrected(form: NormalForm, j: int) -> str:
    term = form.terms[j]
    parts = [f"v_{j}"] if term.value != 0 else []
    return " + ".join([*parts, *([f"S[t-1]^T a_{j}"] if term.erase != 0 else [])])


def _erase(form: NormalForm, j: int) -> str:
    term = form.terms[j]
    erase = expr_text(term.erase)
    return f"exp(log) * {wrapped(term.erase)}" if term.erase_reads_decayed else erase


def _operands(form: NormalForm) -> list[str]:
    lines = []
    if form.decay is not None:
        lines += ["G: log summed over the tokens up to and including t;  X = G - log;  G_C: G of the last token", ""]
    kept = ("decay_out", "I" if form.decay is None else "Diag(exp(G_C))")
    lines += _aligned([*((o.name, _operand(o)) for o in structure.operands(form)), kept])
    lines += ["", *_aligned([(f"{s.name}[t,s]", _score(form, s)) for s in structure.scores(form)])]
    return [*lines, "", "T: the blocks of (I - L)^-1 over the terms that erase"] if form.erasing else lines


def _operand(operand: structure.Operand) -> str:
    return f"exp({operand.decay}) * {wrapped(operand.vector)}" if operand.decay else expr_text(operand.vector)


def _score(form: NormalForm, scores: structure.Scores) -> str:
    decay = f" exp({scores.until}[t] - G[s])" if form.decay is not None else ""
    order = "s < t" if scores.strict else "s <= t"
    return f"sum_K {wrapped(scores.left)}[t] {wrapped(scores.right)}[s]{decay},  {order}"


def _aligned(pairs: Sequence[tuple[str, str]]) -> list[str]:
    width = max(len(left) for left, _ in pairs)
    return [f"{left:<{width}} = {right}" for left, right in pairs]


def _equations(found: Sequence[Equation]) -> list[str]:
    """Lines such as `dL[0,0] = strict_tril(dR[0] U[0]^T)`."""
    totals = [(equation, sum_text(equation.terms)) for equation in found]
    return _aligned([(str(e.target), f"{e.mask}({total})" if e.mask else total) for e, total in totals])


def sum_text(terms: Sequence[Monomial]) -> str:
    signed = [("-" if term.sign < 0 else "+", " ".join(map(str, term.factors))) for term in terms]
    (sign, first), *rest = signed
    return ("-" if sign == "-" else "") + first + "".join(f" {sign} {product}" for sign, product in rest)


def proof_text(proof: Proof) -> list[str]:
    """What was compared, exactly; what fails, if something does."""
    size = f"{proof.tokens} tokens, K = {proof.key}, V = {proof.value}"
    failed = [identity.claim for identity in proof.identities if not identity.holds]
    if failed:
        return [f"FAILED for {size}: {', '.join(failed)}"]
    return [
        f"{size}: the chunk equals the unrolled recurrence, and every gradient its derivative, as polynomials,",
        f"exactly ({len(proof.identities)} identities, {proof.monomials} monomials compared)",
    ]


class _Printer(StrPrinter):
    def _print_RowSum(self, expr: sympy.Expr) -> str:
        return f"sum_{expr.args[1].name}({self._print(expr.args[0])})"


def expr_text(expr: sympy.Expr) -> str:
    """A token-local expression; products are elementwise, sum_K(...) is a sum over the key axis."""
    return str(_Printer().doprint(expr))


def wrapped(expr: sympy.Expr) -> str:
    text = expr_text(expr)
    return text if isinstance(expr, sympy.Symbol) else f"({text})"


def _normal_form_data(form: NormalForm) -> dict[str, object]:
    decay = form.decay
    return {
        "decay": None if decay is None else {"axis": decay.axis, "log": expr_text(decay.log)},
        "read": expr_text(form.read),
        "terms": [
            {
                "write": expr_text(term.write),
                "value": expr_text(term.value),
                "erase": expr_text(term.erase),
                "erase_reads_decayed": term.erase_reads_decayed,
            }
            for term in form.terms
        ],
    }


def _scores_data(scores: structure.Scores) -> dict[str, object]:
    left, right = expr_text(scores.left), expr_text(scores.right)
    return {"name": scores.name, "left": left, "right": right, "until": scores.until, "strict": scores.strict}


def _equation_data(equation: Equation) -> dict[str, object]:
    terms = [{"sign": term.sign, "factors": [str(factor) for factor in term.factors]} for term in equation.terms]
    return {"target": str(equation.target), "mask": equation.mask, "terms": terms}


def _proof_data(proof: Proof) -> dict[str, object]:
    identities = [{"claim": i.claim, "monomials": i.monomials, "holds": i.holds} for i in proof.identities]
    sizes = {"tokens": proof.tokens, "key": proof.key, "value": proof.value}
    return {"holds": proof.holds, **sizes, "identities": identities}
