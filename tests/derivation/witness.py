"""Float64 witnesses: token-local expressions in torch, the spec's update token by token, and one chunk of blocks.

The recurrence walks the parsed update on matrices and knows nothing of the normal form.
"""

from __future__ import annotations

from collections.abc import Mapping

import sympy
import torch

from kcpgen.derivation.chunk_form import ChunkForm, Equation, Factor, Monomial
from kcpgen.derivation.normal_form import NormalForm
from kcpgen.language import syntax as sx
from kcpgen.spec import Spec
from kcpgen.tokenwise import RowSum, sigmoid, softplus

Tensor = torch.Tensor
SIZES = {"": 1, "K": 4, "V": 3}


def random_inputs(spec: Spec, tokens: int, seed: int = 0) -> dict[str, Tensor]:
    """[T, size of axis] per name the equations may use; a scalar keeps an axis of size 1."""
    generator = torch.Generator().manual_seed(seed)
    values = {}
    for name, axis in spec.axes.items():
        values[name] = torch.randn(tokens, SIZES[axis], dtype=torch.float64, generator=generator) / 2
    for given in spec.inputs:
        if given.role == "log_decay":
            values[given.name] = -values[given.name].abs()
    return {name: value.requires_grad_() for name, value in values.items()}


def elementwise(expr: sympy.Basic, values: Mapping[str, Tensor]) -> Tensor:
    """A token-local expression on [..., axis] tensors."""
    if isinstance(expr, sympy.Symbol):
        return values[expr.name]
    if expr.is_Number:
        return torch.tensor([float(expr)], dtype=torch.float64)
    if isinstance(expr, RowSum):
        return elementwise(expr.args[0], values).sum(-1, keepdim=True)
    arguments = [elementwise(argument, values) for argument in expr.args]
    if isinstance(expr, sympy.Add):
        return sum(arguments[1:], arguments[0])
    if isinstance(expr, sympy.Mul):
        return torch.stack(torch.broadcast_tensors(*arguments)).prod(0)
    if isinstance(expr, sympy.Pow):
        return arguments[0] ** arguments[1]
    unary = {sympy.exp: torch.exp, sigmoid: torch.sigmoid, softplus: torch.nn.functional.softplus}
    return unary[expr.func](*arguments)


def matrix(expr: sx.Expr, spec: Spec, values: Mapping[str, Tensor]) -> Tensor:
    """The parsed syntax on matrices: vectors are [n, 1], scalars [1, 1]."""
    match expr:
        case sx.Number():
            return torch.full((1, 1), float(expr.value), dtype=torch.float64)
        case sx.Name():
            return values[expr.name]
        case sx.Identity():
            return torch.eye(SIZES["K"], dtype=torch.float64)
        case sx.Negative():
            return -matrix(expr.operand, spec, values)
        case sx.Transpose():
            return matrix(expr.operand, spec, values).T
        case sx.Call():
            return call(expr.function, matrix(expr.argument, spec, values))
    left, right = matrix(expr.left, spec, values), matrix(expr.right, spec, values)
    match expr:
        case sx.Sum():
            return left + right
        case sx.Difference():
            return left - right
        case sx.Quotient():
            return left / right
        case sx.Product() if 1 not in (left.numel(), right.numel()):
            return left @ right
    return left * right


def call(function: str, argument: Tensor) -> Tensor:
    known = {
        "Diag": lambda x: torch.diag(x.flatten()),
        "exp": torch.exp,
        "sqrt": torch.sqrt,
        "sigmoid": torch.sigmoid,
        "softplus": torch.nn.functional.softplus,
        "sum": lambda x: x.sum().reshape(1, 1),
        "l2norm": lambda x: x / torch.sqrt((x * x).sum() + 1e-6),
    }
    return known[function](argument)


def recurrence(spec: Spec, values: Mapping[str, Tensor], S: Tensor) -> tuple[Tensor, Tensor]:
    """Output [T, V] and final state, token by token from the syntax."""
    outputs = []
    for t in range(len(next(iter(values.values())))):
        token = {name: value[t][:, None] for name, value in values.items()}
        S = matrix(spec.update, spec, {**token, spec.state: S})
        outputs.append(matrix(spec.readout, spec, {**token, spec.state: S}).T)
    return torch.cat(outputs), S


def operands(form: NormalForm, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The blocks that enter the equations, from the definitions in the derivation's notes."""
    tokens = len(next(iter(values.values())))
    g = elementwise(form.decay.log, values) if form.decay else torch.zeros(tokens, 1, dtype=torch.float64)
    g = g.expand(tokens, SIZES["K"])
    G = g.cumsum(0)
    X = G - g
    vector = lambda expr, axis: elementwise(expr, values).expand(tokens, SIZES[axis])  # noqa: E731
    read = vector(form.read, "K")
    blocks = {"q_in": G.exp() * read, "decay_out": torch.diag(G[-1].exp())}
    earlier = torch.ones(tokens, tokens).tril(-1).bool()
    upto = torch.ones(tokens, tokens).tril().bool()
    for j, term in enumerate(form.terms):
        write = vector(term.write, "K")
        blocks[f"w_out[{j}]"] = (G[-1] - G).exp() * write
        blocks[f"A[{j}]"] = scores(read, write, G, G, upto)
        if term.value != 0:
            blocks[f"V[{j}]"] = vector(term.value, "V")
    for i in form.erasing:
        erase, until = vector(form.terms[i].erase, "K"), G if form.terms[i].erase_reads_decayed else X
        blocks[f"a_in[{i}]"] = until.exp() * erase
        for j, term in enumerate(form.terms):
            blocks[f"L[{i},{j}]"] = scores(erase, vector(term.write, "K"), until, G, earlier)
    return blocks


def scores(left: Tensor, right: Tensor, until: Tensor, since: Tensor, mask: Tensor) -> Tensor:
    decay = (until[:, None] - since[None]).masked_fill(~mask[:, :, None], -torch.inf).exp()
    return torch.einsum("tk,sk,tsk->ts", left, right, decay)


def inverse(form: NormalForm, blocks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """T[i,e]: blocks of (I - L)^-1 over the erasing terms."""
    erasing = form.erasing
    if not erasing:
        return {}
    L = torch.cat([torch.cat([blocks[f"L[{i},{e}]"] for e in erasing], 1) for i in erasing])
    tokens = len(L) // len(erasing)
    T = torch.linalg.inv(torch.eye(len(L), dtype=torch.float64) - L)
    cut = lambda n: slice(n * tokens, (n + 1) * tokens)  # noqa: E731
    return {f"T[{i},{e}]": T[cut(m), cut(n)] for m, i in enumerate(erasing) for n, e in enumerate(erasing)}


def run(equations: tuple[Equation, ...], blocks: dict[str, Tensor]) -> None:
    """Evaluate equations in order, adding their targets to the blocks."""
    for equation in equations:
        blocks[str(equation.target)] = value_of(equation, blocks)


def value_of(equation: Equation, blocks: Mapping[str, Tensor]) -> Tensor:
    total = sum(monomial(term, blocks) for term in equation.terms)
    masks = {
        "": lambda x: x,
        "tril": torch.tril,
        "strict_tril": lambda x: x.tril(-1),
        "diagonal": lambda x: x.diag().diag(),
    }
    return masks[equation.mask](total)


def monomial(term: Monomial, blocks: Mapping[str, Tensor]) -> Tensor:
    first, *rest = (factor(f, blocks) for f in term.factors)
    for other in rest:
        first = first @ other
    return term.sign * first


def factor(f: Factor, blocks: Mapping[str, Tensor]) -> Tensor:
    value = blocks[f"{f.name}[{','.join(map(str, f.index))}]" if f.index else f.name]
    return value.T if f.transposed else value


def forward(form: ChunkForm, values: Mapping[str, Tensor], S: Tensor) -> dict[str, Tensor]:
    """All blocks of a chunk, solved and summarised."""
    blocks = operands(form.normal_form, values)
    blocks |= inverse(form.normal_form, blocks)
    blocks["S"] = S
    run(form.solved, blocks)
    run(form.summary, blocks)
    return blocks
