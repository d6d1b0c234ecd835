"""A run on a GPU: compile beside, then measure configuration after configuration, and keep what there is."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import torch

from benchmarks.harness import device, inputs, tables
from benchmarks.harness.agreement import reference
from benchmarks.harness.calls import PEERS, absence
from benchmarks.harness.cold import first_calls
from benchmarks.harness.compiling import Compiling
from benchmarks.harness.device import DeviceLostError
from benchmarks.harness.environment import environment
from benchmarks.harness.floor import Rates
from benchmarks.harness.measure import Problem, Protocol, measure
from benchmarks.harness.record import Record, Row
from benchmarks.harness.shapes import Shape
from benchmarks.harness.tuning import Tuning, brief
from kcpgen.verify.op import Op, load_op

DEVICE = "cuda"
RESERVE = 10.0  # seconds that one more configuration may need


class Session:
    def __init__(self, options: argparse.Namespace, clock: Any) -> None:
        self.options = options
        self.clock = clock
        self.ops: dict[str, Op] = {}
        self.tuning = Tuning(most=options.peer_configs)
        asked = [] if options.no_peers else [p for p in PEERS if not options.peers or p.name in options.peers]
        self.absent = {peer.name: why for peer in asked if (why := absence(peer))}
        self.peers = [peer for peer in asked if peer.name not in self.absent]
        self.compiling = Compiling(options, self.tuning, self.peers, self.say)
        self.record = Record(environment={}, path=options.json)

    def run(self, wanted: Sequence[Any]) -> int:
        """0; 1 if a row of ours does not count; 3 if the device was lost."""
        self._begin()
        try:
            for at, (shape, group) in enumerate(groupby(wanted, key=lambda c: c.shape)):
                configurations = list(group)
                self.compiling.before(at, configurations, wanted, self.clock.left * self.options.warm_share)
                self._measure_shape(shape, configurations)
            self._cold(wanted)
        except DeviceLostError as lost:
            self.say(f"the device is lost: {lost}")
            self._finish()
            return 3
        self._finish()
        return 1 if any(row.status in ("failed", "wrong", "other kernels") for row in self._ours()) else 0

    def close(self) -> None:
        self.compiling.close()

    def say(self, text: str) -> None:
        print(f"[{self.clock.elapsed:5.0f} s] {text}", flush=True)

    def _ours(self) -> list[Row]:
        return [row for row in self.record.rows if row.implementation == "kcpgen"]

    def _begin(self) -> None:
        if self.options.peer_tuning:
            self.tuning.read(self.options.peer_tuning)
        for name, why in self.absent.items():
            self.say(f"{name} is absent: {why}")
        self.tuning.install(brief)
        self.say("measuring the copy rate and the matmul rate")
        self.rates = Rates(copy=device.copy_rate(), matmul=device.matmul_rate())
        torch.cuda.empty_cache()
        self.record.environment = environment(self.options, self.rates, self.absent)
        self.record.write()
        print(tables.HEAD)
        self.say(f"copy {self.rates.copy / 1e12:.2f} TB/s, matmul {self.rates.matmul / 1e12:.0f} TFLOP/s")

    def _op(self, name: str) -> Op:
        if name not in self.ops:
            self.ops[name] = load_op(self.options.generated / name)
        return self.ops[name]

    def _measure_shape(self, shape: Shape, group: Sequence[Any]) -> None:
        for (name, gates), same in groupby(group, key=lambda c: (c.op, c.gates)):
            if self.clock.left < RESERVE:
                self.say(f"no time left for {name} {shape.label} {gates}")
                continue
            try:
                self._measure_op(self._op(name), shape, gates, [c.direction for c in same])
            except torch.cuda.OutOfMemoryError as error:
                self.say(f"{name} {shape.label} {gates}: {device.first_line(error)}")
            torch.cuda.empty_cache()

    def _measure_op(self, op: Op, shape: Shape, gates: str, directions: Sequence[str]) -> None:
        arguments = inputs.draw(op, shape, gates, DEVICE)
        problem = Problem(
            op=op,
            shape=shape,
            gates=gates,
            arguments=arguments,
            expected=reference(op, shape, arguments),
        )
        protocol = Protocol(
            rounds=self.options.rounds,
            warm_ups=self.options.warm_ups,
            rates=self.rates,
            peers=self.peers,
        )
        for direction in directions:
            if self.clock.left < RESERVE:
                self.say(f"no time left for {op.name} {shape.label} {gates} {direction}")
                return
            rows = list(measure(problem, direction, protocol))
            for row in rows:
                self.record.add(row)
                print(tables.line(row, rows[0]), flush=True)
                if self.options.kernels and row.kernels:
                    print(tables.kernel_line(row), flush=True)
            self._keep_tuning()

    def _keep_tuning(self) -> None:
        if self.options.peer_tuning and self.tuning.known:
            self.tuning.write(self.options.peer_tuning)

    def _cold(self, wanted: Sequence[Any]) -> None:
        if not self.options.cold or self.clock.left < 3 * RESERVE:
            return
        directories = [self.options.generated / name for name in dict.fromkeys(c.op for c in wanted)]
        shape = wanted[0].shape.label
        for found in first_calls(directories, shape, self.options.cold_jobs, min(self.clock.left, 300.0)):
            self.record.cold.append({**found, "jobs": self.options.cold_jobs})
            self.record.write()
            self.say("first call, empty cache: " + ", ".join(f"{k} {v}" for k, v in found.items()))

    def _finish(self) -> None:
        self.record.environment["seconds"] = round(self.clock.elapsed)
        self.record.environment["peer_configurations_tried"] = dict(sorted(self.tuning.tried.items()))
        self.record.write()
        if self.options.plot:
            tables.plot(self.record, self.options.plot)
