"""A run of the tuner: compile beside, check, time, keep the best of each part, put it into the table."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness import trial, tuned_file
from benchmarks.harness.candidates import Candidate, Fields, Part, candidates, parts_of, written
from benchmarks.harness.compilers import Compiled, Compilers, Job
from benchmarks.harness.device import DeviceLostError
from benchmarks.harness.shapes import Shape
from benchmarks.harness.trial import Reference, Times
from benchmarks.harness.tuned_file import Winner
from kcpgen import __version__
from kcpgen.runtime.launch import Tiles
from kcpgen.runtime.tuned_table import Structure, chosen
from kcpgen.verify.op import load_op

DEVICE = "cuda"
GAIN = 0.98  # of the chosen tiles' time, the most that others may take to be kept: less is the clock's doing
RESERVE = 4.0  # seconds that a group's last check and timing may need

Overrides = dict[str, Fields]


@dataclass(frozen=True, kw_only=True)
class Group:
    """The ops, by their directories, that share an entry of the table, with the tiles chosen for them."""

    structure: Structure
    tiles: Tiles
    directories: tuple[Path, ...]

    @property
    def label(self) -> str:
        return "+".join(directory.name for directory in self.directories)


@dataclass(kw_only=True)
class Score:
    """What became of the candidates of a part of a group."""

    timed: list[tuple[float, Candidate]] = field(default_factory=list)
    rejected: list[tuple[Candidate, str]] = field(default_factory=list)
    skipped: int = 0

    @property
    def best(self) -> Candidate | None:
        """The fastest, unless it gains nothing over the chosen tiles, which are timed first."""
        ms, found = min(self.timed, key=lambda one: one[0], default=(0.0, None))
        return found if found is not None and found.fields and ms <= GAIN * self.timed[0][0] else None


def groups_of(directories: Sequence[Path], shape: Shape) -> list[Group]:
    """The groups in the order of their first ops, at the widths of the shape and in bfloat16."""
    found: dict[Structure, tuple[Tiles, list[Path]]] = {}
    for directory in directories:
        structure, tiles = chosen(load_op(directory).form, shape.key_width, shape.value_width, torch.bfloat16)
        found.setdefault(structure, (tiles, []))[1].append(directory)
    return [Group(structure=s, tiles=t, directories=tuple(d)) for s, (t, d) in found.items()]


def wanted(group: Group, options: argparse.Namespace) -> Iterator[tuple[Part, list[Candidate]]]:
    """The parts of `options.kernels`, and of their candidates, whose first is the choice, those not in `without`."""
    for part in parts_of(group.structure, options.kernels):
        first, *others = candidates(part, group.structure, group.tiles)
        yield part, [first, *(one for one in others if not any(text in one.label for text in options.without))]


class Tuner:
    """options: shape, kernels, without, rounds, out; clock: seconds elapsed and left."""

    def __init__(self, options: argparse.Namespace, clock: Any, groups: Sequence[Group], device: str) -> None:
        self.options = options
        self.clock = clock
        self.groups = groups
        self.device = device
        self.compilers = Compilers(options.jobs)
        self.references: dict[int, list[Reference]] = {}
        self.scores = {
            (at, part.name): Score() for at, group in enumerate(groups) for part, _ in wanted(group, options)
        }

    def run(self) -> int:
        """0; 1 if a group could not be tuned; 3 if the device was lost, and then nothing is written."""
        try:
            return self._run()
        except DeviceLostError as lost:
            self.say(f"the device is lost, nothing is written: {lost}")
            return 3
        finally:
            self.compilers.stop()

    def say(self, text: str) -> None:
        print(f"[{self.clock.elapsed:5.1f} s] {text}", flush=True)

    def _run(self) -> int:
        chosen_tiles, others = self._jobs()
        self.say(f"compiling {len(chosen_tiles) + len(others)} candidates in {self.options.jobs} processes")
        self.compilers.begin([*chosen_tiles, *others])
        early = self._references(chosen_tiles)
        reserve = RESERVE * max(1, len(self.references))
        for compiled in chain(early, self._results(reserve)):
            if self.clock.left < reserve:
                break
            try:
                self._try(compiled)
            except DeviceLostError as lost:
                raise DeviceLostError(f"{compiled.job.candidate.label}: {lost}") from lost
        self.compilers.stop()
        self._count_skipped()
        rows = [row for at in self.references for row in self._conclude(at)]
        print("\n".join([HEAD, *rows]), flush=True)
        return 0 if len(self.references) == len(self.groups) else 1

    def _results(self, reserve: float) -> Iterator[Compiled]:
        return self.compilers.results(self.clock.left - reserve) if self.references else iter(())

    def _jobs(self) -> tuple[list[Job], list[Job]]:
        """Of the chosen tiles, all parts, so that the first call compiles nothing; then, of all groups and parts in
        turn, the candidates that differ least."""

        def job(at: int, candidate: Candidate) -> Job:
            directories = self.groups[at].directories
            return Job(group=at, directories=directories, shape=self.options.shape, candidate=candidate)

        first = [
            job(at, Candidate(part=p, fields={})) for at, g in enumerate(self.groups) for p in parts_of(g.structure)
        ]
        ranked = [
            (rank, job(at, candidate))
            for at, group in enumerate(self.groups)
            for _, tried in wanted(group, self.options)
            for rank, candidate in enumerate(tried)
            if candidate.fields
        ]
        return first, [one for _, one in sorted(ranked, key=lambda pair: pair[0])]

    def _references(self, jobs: Sequence[Job]) -> list[Compiled]:
        """Check and time the chosen tiles of every group; what else was compiled until then."""
        missing, early = len(jobs), []
        for compiled in self.compilers.results(self.clock.left):
            if compiled.job.candidate.fields:
                early.append(compiled)
                continue
            missing -= 1
            if compiled.failure:
                self.say(f"{self.groups[compiled.job.group].label} {compiled.job.candidate.label}: {compiled.failure}")
            if not missing:
                break
        for at, group in enumerate(self.groups):
            try:
                found = [trial.reference_of(d, self.options.shape, DEVICE) for d in group.directories]
                times = trial.times(found, {}, self.options.rounds)
                for part, (plain, *_) in wanted(group, self.options):
                    self.scores[at, part.name].timed.append((trial.of(part.kernels, times), plain))
            except ValueError as error:
                self.say(f"{group.label} is left out: {error}")
            else:
                self.references[at] = found
                self.say(f"{group.label}, as chosen: {_listed(times)}")
        return early

    def _try(self, compiled: Compiled) -> None:
        """Check, then time; or say why not."""
        at, candidate = compiled.job.group, compiled.job.candidate
        if at not in self.references:
            return
        score, label = self.scores[at, candidate.part.name], f"{self.groups[at].label} {candidate.label}"
        why = compiled.failure or trial.fault(self.references[at], candidate.overrides)
        if why:
            score.rejected.append((candidate, why))
            self.say(f"{label}: REJECTED, {why}")
            return
        times = trial.times(self.references[at], candidate.overrides, self.options.rounds)
        ms = trial.of(candidate.part.kernels, times)
        score.timed.append((ms, candidate))
        takes = f"{compiled.registers} registers, {compiled.stack} bytes of stack, {compiled.shared} shared"
        self.say(f"{label}: {ms:.4f} ms, chosen {score.timed[0][0]:.4f}; {takes}")

    def _count_skipped(self) -> None:
        for at in self.references:
            for part, tried in wanted(self.groups[at], self.options):
                score = self.scores[at, part.name]
                score.skipped = len(tried) - len(score.timed) - len(score.rejected)

    def _conclude(self, at: int) -> list[str]:
        """Winners together: right, each faster than what it replaces; into the file, and a row for each part."""
        group, references = self.groups[at], self.references[at]
        parts = parts_of(group.structure, self.options.kernels)
        best = {part.name: found.fields for part in parts if (found := self.scores[at, part.name].best)}
        while True:
            together = _together(parts, best)
            why = trial.fault(references, together)
            before, after = (trial.times(references, o, self.options.rounds) for o in ({}, together))
            slower = [
                part.name
                for part in parts
                if part.name in best and trial.of(part.kernels, after) > GAIN * trial.of(part.kernels, before)
            ]
            if why:
                self.say(f"{group.label}: winners are not kept, together {why}")
                best = {}
            elif slower:
                self.say(f"{group.label}: not faster again, and not kept: {', '.join(slower)}")
                best = {name: fields for name, fields in best.items() if name not in slower}
            else:
                break
        winners = [
            Winner(
                part=part,
                fields=best.get(part.name, {}),
                about=self._about(part, before, after if part.name in best else before),
            )
            for part in parts
        ]
        table = tuned_file.merged(tuned_file.read(self.options.out), self.device, group.structure, winners)
        tuned_file.write(self.options.out, table)
        return [self._row(at, winner) for winner in winners]

    def _about(self, part: Part, before: Times, after: Times) -> dict[str, Any]:
        return {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "versions": versions(),
            "shape": self.options.shape.label,
            "ms_before": round(trial.of(part.kernels, before), 4),
            "ms_after": round(trial.of(part.kernels, after), 4),
        }

    def _row(self, at: int, winner: Winner) -> str:
        score, about = self.scores[at, winner.part.name], winner.about
        return (
            f"{self.groups[at].label:16} {winner.part.name:10} {about['ms_before']:>9.4f} {about['ms_after']:>9.4f} "
            f"{len(score.timed):>6} {len(score.rejected):>9} {score.skipped:>10}  {written(winner.fields)}"
        )


HEAD = f"{'ops':16} {'kernels':10} {'ms':>9} {'tuned':>9} {'timed':>6} {'rejected':>9} {'no time':>10}  tiles"


def _together(parts: Sequence[Part], best: dict[str, Fields]) -> Overrides:
    found: Overrides = {}
    for part in parts:
        if part.name in best:
            found[part.group] = {**found.get(part.group, {}), **best[part.name]}
    return found


def _listed(times: Times) -> str:
    return ", ".join(f"{name} {ms:.4f}" for name, ms in sorted(times.items(), key=lambda item: -item[1]))


def versions() -> dict[str, str]:
    import triton

    cuda = str(torch.version.cuda)
    return {"kcpgen": __version__, "torch": torch.__version__, "triton": triton.__version__, "cuda": cuda}
