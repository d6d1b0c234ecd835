"""Triton's autotuner, as peers use it, kept within minutes: compiled beside, timed briefly, asked once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Timer = Callable[..., list[float]]


@dataclass(kw_only=True)
class Tuning:
    """How kernels with several configurations are tuned in this process.

    most: configurations tried per kernel, spread over its list; None for all. shard: (i, n), of those only every n-th
    from the i-th. known: (kernel, K, V) -> the winner, taken without trying others: one choice serves all shapes.
    """

    most: int | None = None
    shard: tuple[int, int] = (0, 1)
    known: dict[str, dict[str, Any]] = field(default_factory=dict)
    tried: dict[str, int] = field(default_factory=dict)

    def install(self, timer: Timer) -> None:
        """`timer(kernel_call, quantiles=...)` times one configuration."""
        from triton.runtime.autotuner import Autotuner

        prune, run = Autotuner.prune_configs, Autotuner.run
        tuning = self

        def prune_configs(tuner: Any, keywords: dict[str, Any]) -> list[Any]:
            return tuning.choose(name_of(tuner, keywords), prune(tuner, keywords))

        def noted(tuner: Any, *args: Any, **keywords: Any) -> Any:
            found = run(tuner, *args, **keywords)
            if len(tuner.configs) > 1 and tuning.shard == (0, 1):
                tuning.known.setdefault(name_of(tuner, keywords), as_data(tuner.best_config))
            return found

        Autotuner.prune_configs = prune_configs
        Autotuner.run = noted
        Autotuner.do_bench = property(lambda tuner: timer)

    def choose(self, name: str, configs: Sequence[Any]) -> list[Any]:
        """The configurations to try, in a stable order; never none."""
        winner = [config for config in configs if as_data(config) == self.known.get(name)]
        if winner:
            return winner[:1]
        spread = list(configs)
        if self.most is not None and len(spread) > self.most:
            spread = [spread[i * len(spread) // self.most] for i in range(self.most)]
        self.tried[name] = len(spread)
        index, count = self.shard
        return spread[index::count] or [spread[index % len(spread)]]

    def read(self, path: Path) -> None:
        if path.is_file():
            self.known.update(json.loads(path.read_text(encoding="utf-8")))

    def write(self, path: Path) -> None:
        text = json.dumps(dict(sorted(self.known.items())), indent=1)
        path.write_text(text + "\n", encoding="utf-8")


@contextmanager
def autotuner_kept() -> Iterator[None]:
    """Afterwards the autotuner is as it was, whatever was installed inside: it is there for others too."""
    from triton.runtime.autotuner import Autotuner

    before = {name: vars(Autotuner)[name] for name in ("prune_configs", "run", "do_bench")}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(Autotuner, name, value)


def name_of(tuner: Any, keywords: dict[str, Any]) -> str:
    """A kernel at its head widths; other sizes change what it takes, hardly what is best."""
    return f"{tuner.base_fn.__module__}.{tuner.base_fn.__name__} K={keywords.get('K')} V={keywords.get('V')}"


def as_data(config: Any) -> dict[str, Any]:
    return {"kwargs": dict(config.kwargs), "num_warps": config.num_warps, "num_stages": config.num_stages}


def brief(kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    """A timer of milliseconds instead of a tenth of a second."""
    from triton.testing import do_bench

    found: list[float] = do_bench(kernel_call, warmup=2, rep=10, quantiles=list(quantiles))
    return found


def launch_only(kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
    kernel_call()
    return [0.0] * len(quantiles)
