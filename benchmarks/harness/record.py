"""Results as they are written down: one row a measurement, JSON that is whole after every row."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Row:
    """One implementation at one configuration.

    status: "ok"; "unsupported" (not tried); "failed" (raised); "wrong" (disagrees with the reference); "other kernels"
    (something else than what was to be measured ran). Only "ok" rows count. ms: the median.
    errors: relative RMS by tensor. kernels: device ms by name, of one call.
    """

    op: str
    shape: str
    gates: str
    direction: str
    implementation: str
    status: str
    message: str = ""
    ms: float | None = None
    samples: tuple[float, ...] = ()
    host_ms: float | None = None
    peak_mib: float | None = None
    floor_ms: float | None = None
    floor_bytes: int | None = None
    floor_flops: int | None = None
    errors: Mapping[str, float] = field(default_factory=dict)
    kernels: Mapping[str, float] = field(default_factory=dict)

    @property
    def configuration(self) -> tuple[str, str, str, str]:
        return self.op, self.shape, self.gates, self.direction


@dataclass(kw_only=True)
class Record:
    """Everything of one run. environment: device, versions, measured rates, how it was timed."""

    environment: dict[str, Any]
    path: Path | None = None
    rows: list[Row] = field(default_factory=list)
    cold: list[dict[str, Any]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            partial = self.path.with_suffix(".partial")
            partial.write_text(self.as_json(), encoding="utf-8")
            partial.replace(self.path)

    def as_json(self) -> str:
        whole = {
            "format": FORMAT,
            "environment": self.environment,
            "rows": [asdict(row) for row in self.rows],
            "cold": self.cold,
        }
        return json.dumps(_rounded(whole), indent=1, ensure_ascii=False) + "\n"


def read(path: Path) -> Record:
    """A record written before. Raises ValueError if it is none."""
    whole = json.loads(path.read_text(encoding="utf-8"))
    if whole.get("format") != FORMAT:
        raise ValueError(f"{path} is no record of format {FORMAT}")
    rows = [Row(**{**row, "samples": tuple(row["samples"])}) for row in whole["rows"]]
    return Record(environment=whole["environment"], rows=rows, cold=whole["cold"])


def _rounded(value: Any) -> Any:
    """Five digits are more than the clock gives; NaN has no place in JSON."""
    if isinstance(value, float):
        return float(f"{value:.5g}") if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, Mapping):
        return {key: _rounded(item) for key, item in value.items()}
    return [_rounded(item) for item in value] if isinstance(value, (list, tuple)) else value
