"""`scan_hopper.py`, `reverse_hopper.py` and `summary_hopper.py`: serial kernels in Gluon, products in flight together.

The equations are those of `triton_scan` and `triton_summary`. What differs is that a sum becomes a line for each of its
products, which begins it, and that a line says where the sum is waited for (`gluon_sums`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kcpgen.emit import gluon_upright, scores_in_scan, solve_in_scan, triton_values
from kcpgen.emit.gluon_sums import Products, Sum, renamed, turned
from kcpgen.emit.render import Value, render
from kcpgen.emit.triton_blocks import math, variable
from kcpgen.emit.triton_forgetting import halves
from kcpgen.emit.triton_scratch import field_of, in_place, row_decays
from kcpgen.emit.triton_serial import is_vector, shared
from kcpgen.plan import KernelPlan

# Kinds of tiles: rows, columns, and how they are laid out. BV is `block` on the host.
KINDS = {
    "keys": ("C", "KP", "wide"),
    "values": ("C", "BV", "narrow"),
    "scores": ("C", "C", "square"),
    "row": ("1", "C", "numbers"),
    "channels": ("1", "KP", "numbers"),
}

ALWAYS = "True"  # instead of a flag

PARTS = 3  # products that one with an fp32 operand takes


@dataclass(frozen=True, kw_only=True)
class Tile:
    """What the loading warp copies of a chunk. kind: a key of KINDS. output: whether only the output needs it.

    for_scores: whether only what makes scores of reads does, where that is a role of its own.
    in_place: the flag that says whether it is an input's, whose rows behind a sequence's end are another sequence's; ""
    for scratch.
    """

    name: str
    kind: str
    fetch: str
    descriptor: str
    output: bool = False
    for_scores: bool = False
    in_place: str = ""

    @property
    def numbers(self) -> bool:
        """Whether it holds fp32 numbers; the others feed products."""
        return KINDS[self.kind][2] == "numbers"

    @property
    def size(self) -> str:
        rows, columns, _ = KINDS[self.kind]
        return columns if rows == "1" else f"{rows} * {columns}"

    def as_data(self) -> dict[str, Value]:
        rows, columns, layout = KINDS[self.kind]
        return {
            "name": self.name,
            "shape": f"{rows}, {columns}",
            "dtype": "gl.float32" if self.numbers else "low",
            "layout": layout,
            "fetch": self.fetch,
            "descriptor": self.descriptor,
            "output": self.output,
            "for_scores": self.for_scores,
        }


def emit_scan_hopper(plan: KernelPlan) -> str:
    output, advance = (e for e in plan.form.solved if e.target.name in ("O", "S_next"))
    values = triton_values.equations(plan)
    two = frozenset({"value"} if triton_values.in_parts(plan) else ())
    printer = Products(
        plan=plan,
        state="S",
        corrected=frozenset(f"U_{e}" for e in plan.erasing),
        rename=renamed(plan, {"S_next": "S"}),
        in_two=two,
    )
    corrections = [printer.sum(values[e], halves=plan.reads_state_alone) for e in plan.erasing]
    reading = [t for t in output.terms if "S" in (f.name for f in t.factors)]
    read, written = printer.sum(output, reading), printer.sum(output, [t for t in output.terms if t not in reading])
    advanced = printer.sum(advance)
    solving, scoring = solve_in_scan.solves_in_scan(plan), scores_in_scan.scores_in_scan(plan)
    tiles = _scan_tiles(plan)
    common = _common(plan, tiles, len(plan.erasing) + 1)
    context: dict[str, Value] = {
        "correct": [line for found in corrections for line in found.lines()],
        "read": [*read.lines()],
        "corrected_lines": [
            line
            for found, later in zip(corrections, _later([len(c.opening) for c in corrections]), strict=True)
            for line in (
                found.awaited(f"{later + len(read.opening)} if STORE_OUTPUT else {later}"),
                _lowered(found),
            )
        ],
        **(_solving(plan, corrections[0], len(read.opening)) if solving else {}),
        "solves": int(solving),
        "scoring": int(scoring),
        "score_vectors": [field_of(plan, letter) for letter in ("q_in", "w_out_0") if scoring],
        "score_numbers": scores_in_scan.numbers(plan),
        "score_loads": scores_in_scan.loads(plan),
        "score_lines": scores_in_scan.lines(plan),
        "decayed": [*advanced.beginning()],
        "advance": [*advanced.opened()],
        "output": [
            *read.settled(str(len(advanced.opening) + (1 if solving else 0))),
            *(scores_in_scan.awaited() if scoring else []),
            *(f"O_T = product({left}, {right}, O_T)" for left, right in written.products),
        ],
        "outputs": len(written.products),
        "corrected": [f"U_{e}" for e in plan.erasing],
        "in_halves": int(plan.reads_state_alone),
        "helpers": [
            *(
                "NOWHERE",
                "barriers",
                *(["clear_behind"] if common["cleared"] else []),
                "fetch_vectors",
                "fresh_product",
            ),
            *(["in_bf16"] if plan.erasing else []),
            *(["product", "rounded"] if plan.reads_state_alone else ["product"]),
        ],
        "raw_values": triton_values.scan_only(plan),
        "halves": int(halves(plan)),
    }
    corrected = solve_in_scan.equations(plan) if solving else [math(e) for e in values.values()]
    equations = [*(scores_in_scan.equations() if scoring else []), *corrected, math(output), math(advance)]
    context["output_bytes"] = _bytes([t for t in tiles if t.output])
    if scoring:  # they have a place in the ring, which no copy fills
        common["host_bytes"] = _on_host(_bytes([*tiles, _scratch("A_0", "scores")]))
    if solving:
        common["vectors"] = [
            *_vectors(plan, ["q_in", "w_out_0"]),
            _erase_vectors(plan),
        ]
    context |= gluon_upright.scan(plan)
    return render("scan_hopper.py.jinja", equations=equations, **context, **common)


def _solving(plan: KernelPlan, correction: Sum, outputs: int) -> dict[str, Value]:
    """Lines by which the scan solves itself. outputs: products that are begun meanwhile, where there is an output."""
    (term,) = plan.terms
    written = f"{field_of(plan, f'w_out_{term}')}_tile.permute([1, 0])"
    loaded = f"value_{term}_tile.permute([1, 0]).load(of_tokens)"
    R, U, inverse = f"R_{term}_T", f"U_{term}_T", f"inverse_{term}_tile.permute([1, 0])"
    return {
        "correct": [
            "if EARLY:",
            f"    value_{term}_T = {loaded}",
            f"{R} = fresh_product(S_T_low, {written}, nothing)",
        ],
        "corrected_lines": [
            f"{R} = warpgroup_mma_wait({outputs} if STORE_OUTPUT else 0, deps=({R},))",
            "if not EARLY:",
            f"    value_{term}_T = {loaded}",
            f"strengthened = {correction.start.replace(loaded, f'value_{term}_T')}",
            f"{R} = gl.fma({R}, erase_from_start_tile.load(of_tokens), strengthened)",  # rounded once, as upright
            f"{U} = product(gl.convert_layout({R}.to(low), left), {inverse}, {R})",
            f"{U} = warpgroup_mma_wait(0, deps=({U},))",
            _lowered(correction),
        ],
    }


def emit_reverse_hopper(plan: KernelPlan) -> str:
    equations = plan.form.reverse_scan
    printer = Products(
        plan=plan,
        state="dS_next",
        corrected=frozenset(f"dU_{j}" for j in plan.terms),
        rename=renamed(plan, {"dS": "dS_next"}),
    )
    corrections = [printer.sum(e, halves=True) for e in equations if e.target.name == "dU"]
    (advance,) = (e for e in equations if e.target.name == "dS")
    last = [t for t in advance.terms if "dU" in (f.name for f in t.factors)]
    begun = printer.sum(advance, [t for t in advance.terms if t not in last])
    ended = printer.sum(advance, last)
    rests = [f"dU_{e}_T" for e in plan.erasing]
    opening = [len(found.opening) for found in corrections]
    closing = [len(found.closing or found.opening) for found in corrections]
    context: dict[str, Value] = {
        "correct": [line for found in corrections for line in found.lines()],
        "decayed": [*begun.beginning()],
        "settle": [
            *(
                line
                for found, later in zip(corrections, _later(opening), strict=True)
                for line in found.settled(str(later))
            ),
            *(line for found in corrections for line in found.closed()),
        ],
        "begin": [*begun.opened()],
        "corrected_lines": [
            line
            for found, later in zip(corrections, _later(closing), strict=True)
            for line in (found.awaited(str(later + len(begun.opening))), _lowered(found, rests))
        ],
        "advance": [f"dS_next_T = product({left}, {right}, dS_next_T)" for left, right in ended.products],
        "solves": "",
    }
    handed_back = solve_in_scan.handed_back(plan)
    gradients = [handed_back.get(f"dU_{j}", f"dU_{j}") for j in plan.terms]
    solved = [f"dU_{e}" for e in plan.erasing if not handed_back]
    written = [math(e) for e in equations]
    if handed_back:
        context |= _solving_backwards(plan, len(begun.opening))
        written = solve_in_scan.reverse_equations(plan)
    leaving = len(gradients) + len(solved)
    common = _common(plan, _reverse_tiles(plan), leaving)
    common["leaving_bytes"] = f"2 * block * ({f'{leaving} * C' if leaving > 1 else 'C'} + KP)"
    if handed_back:
        common["vectors"] = [*_vectors(plan, ["q_in", "w_out_0"]), _erase_vectors(plan)]
    return render(
        "reverse_hopper.py.jinja",
        equations=written,
        gradients=gradients,
        solved=solved,
        **gluon_upright.reverse(plan),
        halves=int(halves(plan)),
        helpers=[
            *("barriers", "clear_behind", "fetch_vectors", "fresh_product"),
            *(["in_bf16"] if handed_back or len(plan.erasing) < len(plan.terms) else []),
            *("product", "rounded"),
        ],
        **context,
        **common,
    )


def _solving_backwards(plan: KernelPlan, begun: int) -> dict[str, Value]:
    """Lines by which the reverse scan solves. begun: products that are under way when dU is waited for.

    dU and T in two parts each, but for the product of what rounding left: dR may be a difference of many. dR is scaled
    before it is rounded for the state. The least parts come first: tensor cores cut off what a sum cannot hold.
    """
    (term,) = plan.terms
    U, R, inverse = f"dU_{term}_T", f"dR_{term}_T", f"inverse_{term}"
    written = f"{field_of(plan, f'w_out_{term}')}_tile"
    scaled = f"({R} * erase_from_start_tile.load(of_tokens)).to(low)"
    return {
        "solves": inverse,
        "corrected_lines": [
            f"{U} = warpgroup_mma_wait({begun}, deps=({U},))",
            f"{U}_low, {U}_rest = rounded({U})",
            f"{U}_low = gl.convert_layout({U}_low, left)",
            f"{R} = product({U}_low, {inverse}_rest_tile, {U})",
            f"{R} = product(gl.convert_layout({U}_rest.to(low), left), {inverse}_tile, {R})",
            f"{R} = product({U}_low, {inverse}_tile, {R})",
            f"{R} = warpgroup_mma_wait(0, deps=({R},))",
            f"{R}_low = in_bf16({R})",
        ],
        "advance": [f"dS_next_T = product(gl.convert_layout({scaled}, left_of_keys), {written}, dS_next_T)"],
    }


def _erase_vectors(plan: KernelPlan) -> str:
    return f"a_in_0 = erase_from_start {field_of(plan, 'w_out_0')}"


def emit_summary_hopper(plan: KernelPlan) -> str:
    """For ops that erase. Each product of two matrices is applied to M factor by factor, the right one first."""
    (transition,) = (e for e in plan.form.summary if e.target.name == "M")
    terms = [t.factors for t in transition.terms if t.factors[0].name != "decay_out"]
    read, meanwhile, awaited, advance = [], [], [], []
    for number, (left, right) in enumerate(terms):
        seen, (rows, _) = f"X_{number}_T", row_decays(plan).get(left.name, ("", ""))
        tile = turned(f"{field_of(plan, variable(right))}_tile", right.T)
        read.append(f"{seen} = fresh_product_fp32(M_T, {tile}, nothing, left)")
        awaited.append(f"{seen} = warpgroup_mma_wait({PARTS * (len(terms) - 1 - number)}, deps=({seen},))")
        if rows:
            meanwhile.append(f"{rows} = {rows}_tile.load(of_tokens)")
            awaited.append(f"{seen} = {seen} * {rows}")
        tile = turned(f"{field_of(plan, variable(left))}_tile", left.T)
        begin, into = ("product_fp32", "added_T") if number else ("fresh_product_fp32", "nothing_of_keys")
        advance.append(f"added_T = {begin}({seen}, {tile}, {into}, left_of_keys)")
    letters = list(dict.fromkeys(variable(f) for factors in terms for f in factors))
    decay = {None: "", "": " * decay_out"}.get(plan.decay_axis, " * decay_out_tile.load(of_keys)")
    common = _common(plan, _transition_tiles(plan, letters), 0)
    del common["leaving_bytes"]
    common["vectors"] = list(_vectors(plan, letters))
    return render(
        "summary_hopper.py.jinja",
        transition=math(transition).removeprefix("M = "),
        read=read,
        meanwhile=[*dict.fromkeys(meanwhile), *([f"M_T = M_T{decay}"] if decay else [])],
        advance=[*awaited, *advance],  # the parts of M give their registers to what is added to it
        **common,
    )


def _later(counts: Sequence[int]) -> list[int]:
    """Products of the sums that follow, for each."""
    return [sum(counts[n + 1 :]) for n in range(len(counts))]


def _lowered(found: Sum, rests: Sequence[str] = ()) -> str:
    """rests: names of sums of which somebody wants what rounding left too."""
    if found.name in rests:
        return f"{found.name}_low, {found.name}_rest = rounded({found.name})"
    return f"{found.name}_low = in_bf16({found.name})"


def _scan_tiles(plan: KernelPlan) -> list[Tile]:
    raw, solving = triton_values.scan_only(plan), solve_in_scan.read_by_scan(plan)
    scores, rows = _by_shape(plan, solving)
    return [
        _key_tile(plan, "q_in", output=True),
        *(_key_tile(plan, f"w_out_{j}") for j in plan.terms),
        *(_key_tile(plan, f"W_{i}") for i in plan.erasing if not solving),
        *(_scratch(f"U_{p}", "values") for p in plan.pure_writes if f"U_{p}" not in raw),
        *(_vector(name, "values", "head", "block", "VALUES_IN_PLACE", "values_in_place") for name in raw),
        *(_scratch(name, "scores") for name in scores or triton_values.blocks(plan)),
        *(_scratch(f"A_{j}", "scores", output=True) for j in plan.terms if not scores_in_scan.scores_in_scan(plan)),
        *(replace(_scratch(name, "row", output=True), for_scores=True) for name in scores_in_scan.fields(plan)),
        *(_scratch(name, "row") for name in [*triton_values.strengths(plan), *rows]),
        *(_scratch(name, "row", output=letter == "q_in") for letter, (name, _) in row_decays(plan).items()),
        *([_scratch("decay_out", "channels")] if plan.decay_axis else []),
    ]


def _by_shape(plan: KernelPlan, solving: Sequence[str]) -> tuple[list[str], list[str]]:
    """Of what scans solve with: matrices, and numbers of tokens."""
    shapes = {name: shape for name, (shape, _) in solve_in_scan.fields(plan).items()}
    scores = [name for name in solving if shapes[name] == "C, C"]
    return scores, [name for name in solving if name not in scores]


def _reverse_tiles(plan: KernelPlan) -> list[Tile]:
    scores, rows = _by_shape(plan, [*solve_in_scan.fields(plan)])
    place = "batch, head, first + c * C, 0, head, block, arrived, dO_ring.index(stage), True"
    return [
        Tile(
            name="dO",
            kind="values",
            fetch=f"fetch_vectors(dO, {place})",
            descriptor="vector_descriptor(do, True, C, block)",
            in_place=ALWAYS,
        ),
        *(_key_tile(plan, letter) for letter in ["q_in", *(f"w_out_{j}" for j in plan.terms)]),
        *(_key_tile(plan, f"W_{i}") for i in plan.erasing if not scores),
        *(_scratch(name, "scores") for name in scores),
        *(_scratch(f"A_{j}", "scores") for j in plan.terms),
        *(_scratch(name, "row") for name in [*rows, *(name for name, _ in row_decays(plan).values())]),
        *([_scratch("decay_out", "channels")] if plan.decay_axis else []),
    ]


def _transition_tiles(plan: KernelPlan, letters: Sequence[str]) -> list[Tile]:
    rows = [name for vector, (name, _) in row_decays(plan).items() if any(v.startswith(vector) for v in letters)]
    return [
        *(_key_tile(plan, letter) for letter in letters),
        *(_scratch(name, "row") for name in rows),
        *([_scratch("decay_out", "channels")] if plan.decay_axis else []),
    ]


def _key_tile(plan: KernelPlan, letter: str, output: bool = False) -> Tile:
    name = field_of(plan, letter)
    if not is_vector(plan, name):
        return _scratch(name, "keys", output)
    return _vector(name, "keys", "group" if shared(plan, name) else "head", "0", "IN_PLACE", "in_place", output)


def _vector(name: str, kind: str, owner: str, column: str, flag: str, field: str, output: bool = False) -> Tile:
    place = f"batch, {owner}, first + c * C, first_chunk + c, head, {column}, arrived, {name}_ring.index(stage), {flag}"
    return Tile(
        name=name,
        kind=kind,
        fetch=f"fetch_vectors({name}, {place})",
        descriptor=f"vector_descriptor(prepared.{name}, prepared.{field}, C, {_on_host(KINDS[kind][1])})",
        output=output,
        in_place=flag,
    )


def _scratch(name: str, kind: str, output: bool = False) -> Tile:
    rows, columns, _ = KINDS[kind]
    row, column = "at" if rows == "1" else f"at * {rows}", "block" if kind == "values" else "0"
    function, sizes = ("row_descriptor", []) if rows == "1" else ("tile_descriptor", [rows])
    return Tile(
        name=name,
        kind=kind,
        fetch=f"tma.async_copy_global_to_shared({name}, [{row}, {column}], arrived, {name}_ring.index(stage))",
        descriptor=f"{function}({', '.join([f'prepared.{name}', *sizes, _on_host(columns)])})",
        output=output,
    )


def _on_host(size: str) -> str:
    return size.replace("BV", "block")


def _common(plan: KernelPlan, tiles: Sequence[Tile], leaving: int) -> dict[str, Value]:
    return {
        "title": plan.spec.title,
        "tiles": [tile.as_data() for tile in tiles],
        "by_rows": int(any(tile.kind == "keys" and is_vector(plan, tile.name) for tile in tiles)),
        "scalar_decay": int(plan.decay_axis == ""),
        "vectors": list(_vectors(plan, ["q_in", *(f"w_out_{j}" for j in plan.terms)])),
        **_cleared(plan, tiles),
        "state_bytes": _bytes([t for t in tiles if not t.output]),
        "host_bytes": _on_host(_bytes(tiles)),
        "leaving_bytes": f"{2 * leaving} * C * block",
    }


def _cleared(plan: KernelPlan, tiles: Sequence[Tile]) -> dict[str, Value]:
    """What the last chunk of a sequence has to clear behind its end. A row that only an output reads makes another
    sequence's row of it, which is not stored; all others meet rows of this one in a sum over tokens."""
    conditions = {ALWAYS: "", "IN_PLACE": in_place(plan), "VALUES_IN_PLACE": triton_values.in_place(plan)}
    found = [t for t in tiles if not t.output and conditions.get(t.in_place, "False") != "False"]
    return {
        "cleared": [f"clear_behind({t.name}_tile, tokens - c * C, {t.in_place}, in_rows)" for t in found],
        "clearing": list(dict.fromkeys(t.in_place for t in found if t.in_place != ALWAYS)),
    }


def _vectors(plan: KernelPlan, letters: Sequence[str]) -> Iterator[str]:
    """What the derivation's vectors are, where tiles hold them as they came and rows of products are scaled."""
    for letter in letters:
        name, rows = field_of(plan, letter), [row for v, (row, _) in row_decays(plan).items() if letter.startswith(v)]
        if name != letter:
            yield f"{letter} = {' '.join([*rows, name])}"


def _bytes(tiles: Sequence[Tile]) -> str:
    """Of one chunk, e.g. `2 * (2 * C * KP + C * BV) + 4 * C`."""
    found = []
    for element, numbers in ((2, False), (4, True)):
        counts = Counter(tile.size for tile in tiles if tile.numbers == numbers)
        terms = [f"{n} * {size}" if n > 1 else size for size, n in counts.items()]
        if terms:
            found.append(f"{element} * {terms[0]}" if len(terms) == 1 else f"{element} * ({' + '.join(terms)})")
    return " + ".join(found) or "0"
