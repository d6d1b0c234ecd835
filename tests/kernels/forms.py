"""Recurrences made up to reach every branch of the emitter."""

from __future__ import annotations

from pathlib import Path

from kcpgen.compiler import compile_spec
from kcpgen.emit.package import write

KEYS = "token q, k : [H, K]"
VALUES = "token v : [HV, V]"
GATE = "token g : [HV] log decay"
GATES = "token g : [HV, K] log decay"
BETA = "token x : [HV]"
READ = "o[t] = scale S[t]^T q"
DELTA = "S[t] = exp(g) (I - x k k^T) S[t-1] + x k v^T"
FORMS = {
    "three_erases": (
        "token q, k, a, b : [H, K]", VALUES, GATE, BETA, "token y : [HV]",
        "S[t] = (I - x k k^T) (I - y a a^T) (I - x b b^T) exp(g) S[t-1] + x k v^T", READ,
    ),
    "erases_before_and_after_a_promised_decay": (
        "token q, k, a, b : [H, K]", VALUES, f"{GATES} in [-5, 0]", BETA,
        "S[t] = Diag(exp(g)) S[t-1] - x k (k^T S[t-1]) + b (a^T Diag(exp(g)) S[t-1]) + x k v^T", READ,
    ),
    "an_erase_before_a_scalar_decay": (
        "token q, k, p : [H, K]", VALUES, GATE, BETA, "S[t] = exp(g) S[t-1] - x k (p^T S[t-1]) + k v^T", READ,
    ),
    "a_coefficient_on_one_of_two_writes": (
        "token q, k, p : [H, K]", "token v, w : [HV, V]", GATES, BETA,
        "S[t] = Diag(exp(g)) S[t-1] + sigmoid(x) k v^T + p w^T", READ,
    ),
    "a_gate_that_is_a_sum_over_keys": (
        "token q, k, p : [H, K]", VALUES, GATE, BETA,
        "S[t] = exp(g) (I - sigmoid(k^T p) k k^T) S[t-1] + x k v^T", READ,
    ),
    "sums_of_two_options_and_a_parameter_of_one": (
        KEYS, VALUES, GATES, BETA, "param c : [HV, K]", "S[t] = Diag(exp(g)) (I - x k k^T) S[t-1] + x k v^T", READ,
        "option norm: q <- l2norm(q)", "option shifted: x <- sigmoid(x + sum(c .* c))",
    ),
    "sums_in_sums": (
        "token q, k, p : [H, K]", VALUES, GATE,
        "S[t] = exp(g) S[t-1] + l2norm(k + sigmoid(sum(p)) p) (v sigmoid(sum(v sum(k .* k))))^T", READ,
    ),
    "keys_per_value_head_and_gates_per_group": (
        "token q, k : [HV, K]", VALUES, "token g : [H] log decay", "token x : [H]", DELTA, READ,
    ),
    "values_of_a_group_and_of_a_head": (
        KEYS, "token v : [H, V]", "token z : [HV, V]", GATE, BETA, "S[t] = exp(g) S[t-1] + x k (v .* z)^T", READ,
    ),
    "a_parameter_is_written_and_read": (
        KEYS, VALUES, GATE, "param c : [HV, K]", "S[t] = exp(g) S[t-1] + k v^T + c v^T", "o[t] = scale S[t]^T (q + c)",
    ),
    "roots_powers_and_numbers": (
        KEYS, VALUES, GATE, BETA,
        "S[t] = exp(g) S[t-1] + exp(1) sqrt(sqrt(1 + x * x)) (k .* k .* k) (v / sqrt(2) / sqrt(sqrt(2 + x)))^T", READ,
    ),
    "quotients_of_vectors": (
        KEYS, VALUES, "token p : [H, K]", "token z : [HV, V]", GATE,
        "S[t] = exp(g) S[t-1] + (k / exp(p)) (v / (exp(z) + exp(-z)))^T", READ,
    ),
    "reads_of_the_key_that_is_erased": ("token k : [H, K]", VALUES, GATE, BETA, DELTA, "o[t] = scale S[t]^T k"),
    "one_vector_that_a_parameter_makes_erase": (
        "token k : [H, K]", VALUES, GATES, BETA, "param c : [HV, K]",
        "S[t] = Diag(exp(g)) S[t-1] - x k ((k .* c)^T S[t-1]) + k v^T", "o[t] = scale S[t]^T k",
    ),
    "a_strength_made_with_a_parameter": (
        KEYS, VALUES, GATE, BETA, "param d : [HV]",
        "S[t] = exp(g) (I - sigmoid(x + d) k k^T) S[t-1] + sigmoid(x + d) k v^T", READ,
    ),
    "a_norm_over_values": (KEYS, VALUES, GATE, BETA, DELTA, READ, "option norm: v <- l2norm(v)"),
    "a_scalar_made_with_a_sum_over_keys": (
        KEYS, VALUES, GATE, BETA, "param c : [HV, K]", DELTA, READ, "option shifted: x <- sigmoid(x + sum(c .* c))",
    ),
    "values_made_with_a_sum_over_keys": (
        KEYS, VALUES, GATE, BETA, "param c : [HV, K]", DELTA, READ, "option scaled: v <- v sigmoid(sum(c .* c))",
    ),
    "values_made_with_a_sum_over_values": (
        KEYS, VALUES, GATE, BETA, "param c : [HV, V]", DELTA, READ, "option scaled: v <- (v .* c) sigmoid(sum(c .* v))",
    ),
    "two_options_on_one_axis": (
        KEYS, VALUES, GATES, BETA, "param c : [HV, K]", "param d : [HV]", "flag twice",
        "S[t] = (I - x k k^T) Diag(exp(g)) S[t-1] + x k v^T", READ,
        "option norm: q <- l2norm(q)",
        "option gate: g <- -exp(d) softplus(g + c)",
        "    when twice: g <- -2 exp(d) softplus(g + c)",
    ),
    "parameters_of_a_gate_and_of_reads": (  # one alone in what it adds up, two always and one at times with others
        "token q, k, p : [HV, K]", VALUES, GATES, BETA,
        "param a : [HV]", "param b : [HV]", "param c : [HV]", "param d : [HV, K]", "param f : [HV]",
        "S[t] = Diag(exp(g)) S[t-1] - x k (p^T S[t-1]) + k v^T", READ,
        "option scaled: q <- exp(c) (q .* d)",
        "option gate: g <- -2 sigmoid(f) sigmoid(exp(a + b + c) (g - d))",
    ),
}  # fmt: skip


def built(name: str, folder: Path, op_name: str = "") -> Path:
    """The package of a form, generated in a folder."""
    path = folder / f"{op_name or name}.kcp"
    *declared, update, read = [line for line in FORMS[name] if not line.lstrip().startswith(("option", "when"))]
    options = [line for line in FORMS[name] if line.lstrip().startswith(("option", "when"))]
    lines = [f'op {path.stem} "A form"', *declared, "state S : [HV, K, V]", update, read, *options, ""]
    path.write_text("\n".join(lines), encoding="utf-8")
    write(compile_spec(path, folder / "generated"), folder / "generated")
    return folder / "generated" / path.stem
