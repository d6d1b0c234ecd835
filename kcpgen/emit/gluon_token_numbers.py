"""Numbers of tokens in chunk-parallel kernels for Hopper: worked out by every warp alone, then handed over to tiles.

The portable kernels have one layout for rows and columns, x[:, None] and x[None, :] of one x. Here such an x is found
by where it stands in a line, and made anew in the layout that the tile wants.
"""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Callable, Iterable, Sequence

from kcpgen.emit import triton_values
from kcpgen.emit.gluon_chunks import laid_out
from kcpgen.emit.render import Value
from kcpgen.emit.triton_prologue import local
from kcpgen.plan import KernelPlan

NUMBERS = re.compile(r"(?<![\w.])([A-Za-z_]\w*)\b(?![(.\w])")  # names that are neither called nor modules


def by_warp(lines: Iterable[str]) -> list[str]:
    """Numbers of tokens as every warp has all of them; rows of tiles get theirs, and a sum over keys comes by rows."""
    found = []
    for line in laid_out(lines):
        line = line.replace("by_token", "by_warp").replace("inside = live[", "inside = live_rows[")
        line = re.sub(r"running_sum\((\w+)", r"tl.cumsum(\1, axis=0", line)
        line = re.sub(r"\+= (tl\.sum\(.*, axis=1\))$", r"+= gl.convert_layout(\1, by_warp)", line)
        found.append(_replaced(line, rows=lambda x: x if x == "live_rows" else f"gl.convert_layout({x}, by_token)"))
    return found


def loaded_once(lines: Sequence[str]) -> list[str]:
    """Lines whose numbers of tokens come from memory once a program, not once a warp, begun together.

    They lie a row of heads apart, so that each is 32 bytes for the memory: where four warps had each all of them, a
    quarter of `prepare` went to waiting for them.
    """
    loads = {m[1]: m[2] for line in lines if (m := re.fullmatch(r"(\w+) = load_column\((.*), rows, count\)", line))}
    if not loads:
        return [*lines]
    kept = [line for line in lines if line.partition(" = ")[0] not in loads or "load_column" not in line]
    return [
        "once: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])",
        "each = gl.arange(0, 32 * gl.num_warps(), once)  # those beyond the chunk load nothing",
        *(f"{name}_once = load_column({place}, each, count)" for name, place in loads.items()),
        *(f"{name}_for_all = handed_over({name}_once)" for name in loads),
        *(f"{name} = {name}_for_all.slice(0, C, dim=0).load(by_warp)" for name in loads),
        *kept,
    ]


def by_columns(plan: KernelPlan, lines: Iterable[str]) -> list[str]:
    """What a token has of each column of scores, where the portable kernel has one layout for rows and columns."""
    numbers = {*numbers_of_tokens(plan), *(planned.name for planned in plan.sums)}  # a head's are alike everywhere

    def across(x: str) -> str:
        return re.sub(NUMBERS, lambda name: f"{name[1]}_across" if name[1] in numbers else name[1], x)

    return [_replaced(_masks(line), columns=across) for line in lines]


def handed_over(plan: KernelPlan, lines: Sequence[str], rows: str = "by_token") -> dict[str, Value]:
    """Numbers of tokens that rows or columns of tiles are scaled by, through shared memory."""
    numbers = numbers_of_tokens(plan)
    scaling: list[str] = []

    def seen(x: str) -> str:
        scaling.append(x)
        return x

    for line in lines:
        _replaced(line, rows=seen)
    of_rows = dict.fromkeys(name for x in scaling for name in re.findall(NUMBERS, x) if name in numbers)
    of_columns = {name.removesuffix("_across"): name for name in _across(lines)}
    return {
        "handed_over": [*{**of_rows, **of_columns}],
        "taken_over": [f"{name} = {name}_shared.load({rows})" for name in of_rows],
    }


def loaded_across(lines: Iterable[str], columns: str = "by_channel") -> list[str]:
    """Where they are used: until then they would take registers."""
    return [f"{name} = {name.removesuffix('_across')}_shared.load({columns})" for name in _across(lines)]


def numbers_of_tokens(plan: KernelPlan) -> set[str]:
    """Variables of the kernel that hold one number a token."""
    return {*(local(plan, i.name) for i in plan.inputs_on("")), "G", "G_before", *triton_values.strengths(plan)}


def _masks(line: str) -> str:
    named = line.replace("up_to(rows)", "up_to").replace("before(rows)", "before")
    return named.replace("== rows[None, :]", "== token_columns[None, :]")


def _across(lines: Iterable[str]) -> dict[str, None]:
    return dict.fromkeys(name for line in lines for name in re.findall(r"\b\w+_across\b", line))


def _replaced(line: str, rows: Callable[[str], str] = lambda x: x, columns: Callable[[str], str] = lambda x: x) -> str:
    """A line with every x[:, None] and x[None, :] of numbers of tokens made anew."""
    try:
        module = ast.parse(textwrap.dedent(line))
    except SyntaxError:  # the head of a branch or loop
        return line
    before = ast.unparse(module)
    after = ast.unparse(_Expanded(rows, columns).visit(module))
    return line if after == before else line[: len(line) - len(line.lstrip())] + after


class _Expanded(ast.NodeTransformer):
    def __init__(self, rows: Callable[[str], str], columns: Callable[[str], str]) -> None:
        self._made = {":, None": rows, "None, :": columns}

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        made = self._made.get(ast.unparse(node.slice).strip("()"))
        if made:
            node.value = ast.parse(made(ast.unparse(node.value)), mode="eval").body
            return node
        return self.generic_visit(node)
