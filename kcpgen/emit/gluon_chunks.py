"""What chunk-parallel kernels for Hopper are made of: tiles that are copied at once, and products begun in groups.

Products of a group do not wait for each other.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

from kcpgen.derivation.chunk_form import Equation, Factor
from kcpgen.emit import solve_in_scan
from kcpgen.emit.render import Value
from kcpgen.emit.triton_blocks import variable
from kcpgen.emit.triton_key_axis import EQUATIONS
from kcpgen.emit.triton_score_gradients import tensor_of
from kcpgen.plan import KernelPlan
from kcpgen.spec import TokenInput

ZEROS = {
    "tl.zeros((C, BK), tl.float32)": "nothing",
    "tl.zeros((C,), tl.float32)": "gl.zeros([C], gl.float32, by_token)",
    "tl.zeros((BK,), tl.float32)": "gl.zeros([BK], gl.float32, by_channel)",
    "tl.zeros((BV,), tl.float32)": "gl.zeros([VP], gl.float32, by_channel)",
    "tl.zeros((), tl.float32)": "gl.to_tensor(0.0)",
}
STORE_TILE = re.compile(
    r"store_tile\((?P<pointer>d_(?P<name>\w+)_ptr)(?P<row> \+ token_head \* \w), (?P<stride>HV \* \w), rows, "
    r"(?P<columns>keys|columns), count, (?P<width>\w), (?P<value>\w+)\)"
)  # what `triton_sweeps.store_input` emits
STATES = ("S", "dS_next")  # held [values, keys]; what they are multiplied with is held [tokens, values]


def in_64_bits(used: dict[str, list[str]]) -> dict[str, list[str]]:
    """`used_arguments` with heads found by 64 bits: their numbers have 32 in these kernels, and strides are as large as
    a sequence where inputs lie head by head."""
    starts = [re.sub(r"\b(head|group) \*", r"\1.to(gl.int64) *", line) for line in used["starts"]]
    return {**used, "starts": starts}


def state_sums(plan: KernelPlan) -> list[Equation]:
    """Sums over the value axis, of a state and what meets it."""
    return [e for e in plan.form.gradients if e.target.name in EQUATIONS[:3]]


def adds_only(plan: KernelPlan) -> bool:
    """A product can be added to a sum, not subtracted from it."""
    return all(term.sign > 0 for e in state_sums(plan) for term in e.terms)


def copy(source: str, place: str, barrier: int, tile: str) -> str:
    return f"tma.async_copy_global_to_shared({source}, [{place}], arrived.index({barrier}), {tile})"


def copy_input(i: TokenInput, barrier: int) -> str:
    return _copy_input(i, barrier, "key_start")


def copy_value_input(i: TokenInput, barrier: int) -> str:
    return _copy_input(i, barrier, "0")


def _copy_input(i: TokenInput, barrier: int, column: str) -> str:
    owner = "group" if i.heads == "H" else "head"
    place = f"batch.to(gl.int32), {owner}, first.to(gl.int32), {column}"
    return copy(f"{i.name}_source", place, barrier, f"{i.name}_tile")


def output_gradient(barrier: int) -> dict[str, Value]:
    return {
        "name": "dO",
        "shape": "[1, 1, C, VP]",
        "fetch": copy("dO", "batch.to(gl.int32), head, first.to(gl.int32), 0", barrier, "dO_tile"),
        "descriptor": "vector_descriptor(do, True, C, VP)",
    }


def state_tile(name: str, tensor: str, barrier: int) -> dict[str, Value]:
    return _tile(name, tensor, barrier, "at", "VP", "BK", "key_start")


def value_tile(plan: KernelPlan, name: str, barrier: int) -> dict[str, Value]:
    return _tile(name, tensor_of(plan, name), barrier, "at", "C", "VP", "0")


def where_solved(plan: KernelPlan, name: str) -> str:
    """What dR is called: it lies in the place of dU, unless the reverse scan has left it."""
    return name if name in solve_in_scan.handed_back(plan).values() else name.replace("dR_", "dU_")


def score_tile(name: str, barrier: int, held: str = "tile") -> dict[str, Value]:
    """held: how the tile's name ends."""
    return {
        **_tile(name, name, barrier, "here", "C", "C", "0"),
        "fetch": copy(name, "here * C, 0", barrier, f"{name}_{held}"),
    }


def _tile(name: str, tensor: str, barrier: int, owner: str, rows: str, columns: str, column: str) -> dict[str, Value]:
    return {
        "name": name,
        "shape": f"[{rows}, {columns}]",
        "fetch": copy(name, f"{owner} * {rows}, {column}", barrier, f"{name}_tile"),
        "descriptor": f"tile_descriptor({tensor}, {rows}, {columns})",
    }


def nbytes(tiles: Sequence[dict[str, Value]], more: Sequence[str] = ()) -> str:
    """Of what is copied, for a barrier."""
    names = [*more, *(str(tile["name"]) for tile in tiles)]
    return " + ".join(f"{name}.block_type.nbytes" for name in names)


def shared_bytes(plan: KernelPlan, rows: int, scores: int) -> str:
    """Host code: what vectors, the two states, `rows` tiles that meet them, and `scores` tiles take."""
    vectors = " + ".join(f"{i.name}.element_size()" for i in plan.inputs_on("K"))
    return f"C * BK * ({vectors}) + 4 * VP * BK + {2 * rows} * C * VP + {2 * scores} * C * C"


def products(name: str, pairs: Sequence[tuple[str, str]], into: str = "nothing") -> Iterator[str]:
    """A sum of products, begun; `into` is zero and as large."""
    begin = "fresh_product"
    for first, second in pairs:
        yield f"{name} = {begin}({first}, {second}, {into})"
        begin, into = "product", name


def awaited(names: Sequence[str], later: int = 0) -> str:
    """later: how many products stay under way that were begun after these."""
    listed = ", ".join(names)
    return f"{listed} = warpgroup_mma_wait({later}, deps=({listed}{',' if len(names) == 1 else ''}))"


def products_with(plan: KernelPlan, state: str, *, turned: bool) -> list[tuple[str, list[tuple[str, str]]]]:
    """Sums over the value axis by that state, A S^T, or (A S^T)^T = S A^T where results are held turned."""
    found = []
    for e in state_sums(plan):
        pairs = []
        for term in e.terms:
            first, second = term.factors
            if second.name == state:
                for value in _values(plan, first):
                    held = f"{second.name}_tile"
                    if turned:
                        of_state = held + (".permute([1, 0])" if second.transposed else "")
                        pairs.append((of_state, f"{value}.permute([1, 0])"))
                    else:
                        pairs.append((value, held + ("" if second.transposed else ".permute([1, 0])")))
        if pairs:
            found.append((variable(e.target), pairs))
    return found


def _values(plan: KernelPlan, factor: Factor) -> Iterator[str]:
    """What a state is multiplied with, [tokens, values]; of a solve in two parts where it has them."""
    if factor.name == "dO":
        yield "dO_tile.reshape([C, VP])"
        return
    name = where_solved(plan, variable(factor))
    yield f"{name}_tile"
    if factor.name == "dR" and plan.erases_apart:
        yield f"{name}_rest_tile"


def leaving_by_rows(lines: Iterable[str], tiles: Mapping[str, str]) -> tuple[list[str], list[str]]:
    """Lines with gradients laid into tiles in place of their stores, and the stores, for behind them.

    tiles: by the name of an input, what has room for its gradient where that is stored. Others are stored as they are.
    """
    laid, stores = [], []
    for line in lines:
        found = STORE_TILE.fullmatch(line)
        if found is None or found["name"] not in tiles:
            laid.append(line)
            continue
        tile, pointer, start = tiles[found["name"]], found["pointer"], "key_start" if found["columns"] == "keys" else ""
        place = f"{pointer}{found['row']}" + (f" + {start}" if start else "")
        width = found["width"] + (f" - {start}" if start else "")
        laid.append(f"laid_by_rows({found['value']}, {tile}, {pointer})")
        stores.append(f"store_rows({found['value']}, {tile}, {place}, {found['stride']}, count, {width})")
    return laid, stores


def laid_out(lines: Iterable[str]) -> list[str]:
    """Zeros have a layout here, and numbers of tokens are laid out anew to be summed up from one to the next."""
    found = []
    for line in lines:
        for zeros, laid_out in ZEROS.items():
            line = line.replace(zeros, laid_out)
        line = re.sub(r"tl\.full\(\(C,\), (.+), tl\.float32\)", r"gl.full([C], \1, gl.float32, by_token)", line)
        found.append(re.sub(r"tl\.cumsum\((\w+), axis=0", r"running_sum(\1", line))
    return found
