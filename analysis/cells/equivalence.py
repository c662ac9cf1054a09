"""Trainings beside one another: how far each is from plain data parallelism, in multiples of the noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from analysis.cells.comparison import FREE, FREE_GROUPS
from analysis.labels import count_label
from analysis.read.archive import MADE_WITH, Archive
from bench.common.labels import length_label
from bench.record.record import Record, Role, Status
from bench.record.trajectory_noise import (
    NAMES,
    Deviation,
    Draw,
    TrajectoryNoise,
    distance_of,
    first_departure,
    signals_of,
)

EXPERIMENT = "loss_equivalence"
APART = ("data.rank_order", "inject_fault")
"""What only controls and mistakes do in another way."""
SPREAD = ("batch", "dp_replicate", "dp_shard", "grad_accum")
"""Numbers whose product is the sequences of a step."""
TOLD = ("seq_len", "model", "dtype", "engine", "optimizer")
"""Settings that always name a comparison; others do where comparisons differ in them."""
NATIVE = "native"
"""The trainer whose loop is ours."""


@dataclass(frozen=True, slots=True)
class Training:
    """One record's steps."""

    record: Record
    origin: Mapping[str, str | None]
    """The code, torch and device that it was made with."""
    loss: Sequence[float] = field(default=())
    """Sum of token losses over the number of valid tokens."""
    grad_norm: Sequence[float] = field(default=())
    logged_loss: Sequence[float | None] | None = None
    """What the training stack itself logs; None where the loop is ours."""

    @property
    def role(self) -> Role:
        return self.record.role

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end and passed every gate of its own."""
        return self.record.status is Status.OK and bool(self.loss)

    @property
    def work(self) -> dict[str, Any]:
        """Every setting in which trainings agree that do the same work, on the same machine, but the seed."""
        config = self.record.config
        free = FREE.union(APART)
        kept = {key: each for key, each in config.items() if not (key in free or key.startswith(FREE_GROUPS))}
        sequences = math.prod(config.get(key) or 1 for key in SPREAD)
        return {**kept, "sequences": sequences, **self.origin, "provenance": self.record.provenance}

    @property
    def seed(self) -> int:
        return int(self.setting("seed") or 0)

    @property
    def way(self) -> str:
        """How it does the work: what is equal in trainings that differ in their seed alone."""
        free, groups = FREE.union(APART) - {"seed"}, tuple({*FREE_GROUPS} - {"measure."})
        config = self.record.config.items()
        chosen = {key: each for key, each in config if key in free or key.startswith(groups)}
        return json.dumps([self.role, self.record.repeat, chosen], sort_keys=True)

    @property
    def label(self) -> str:
        """`ring zigzag`, `ulysses contiguous under trl`, `mistake: mask_off_by_one` or what a control is."""
        if self.role == Role.INJECTED_FAULT:
            return f"mistake: {self.setting('inject_fault')}"
        words, trainer = f"{self.setting('strategy')} {self.setting('layout')}", self.setting("trainer")
        if self.role == Role.CONTROL:
            ranks = count_label(int(self.setting("cluster.world_size")), "rank")
            words = f"control: {ranks}, {self.setting('kernel')} kernel"
            words += ", dealt in reverse" if self.setting("data.rank_order") == "reversed" else ""
        return words if trainer == NATIVE else f"{words} under {trainer}"

    def setting(self, key: str) -> Any:
        """A value of the record's configuration, None where it has no such setting."""
        return self.record.config.get(key)


@dataclass(frozen=True)
class Seed:
    """All trainings of the same work from the same weights on the same data."""

    reference: Training
    others: Sequence[Training]

    @cached_property
    def equivalent(self) -> list[Training]:
        """The reference and the controls that passed their own gates: a wrong one would widen the floor."""
        controls = [each for each in self.others if each.role == Role.CONTROL and each.is_ok]
        return [self.reference, *controls]

    def draw(self, found: Training) -> Draw:
        """A training beside the equivalent ones, without itself."""
        return Draw(found, [each for each in self.equivalent if each is not found])


@dataclass(frozen=True, slots=True)
class Compared:
    """One way to do the work, over all seeds in which it ran, beside the equivalent ones."""

    trainings: Sequence[Training]
    """One a seed."""
    mean_loss: float
    """Mean absolute difference of the loss from the reference's, in nats."""
    max_loss: float
    max_grad_norm: float
    """Largest relative difference of the gradient norm."""
    noise: Deviation
    """How far it is from the mean of the equivalent ones, in multiples of the noise floor."""
    logged: tuple[float, float] | None
    """Mean and largest difference of what the stack logs from what it logs of data parallelism, in nats;
    None where the stack logs nothing of its own, or there is no such record."""
    departure: str | None
    """The first step that is beyond the floor, in words, where the mean over all steps is."""

    @property
    def training(self) -> Training:
        """The one that speaks for all seeds: the first that did not end well, if any."""
        return next((each for each in self.trainings if not each.is_ok), self.trainings[0])

    @property
    def is_within(self) -> bool:
        return max(self.noise.loss, self.noise.grad_norm) <= 1

    @property
    def is_as_expected(self) -> bool:
        """Whether a mistake was found, and anything else passed its own gates and, if compared, this one."""
        if self.training.role == Role.INJECTED_FAULT:
            return not self.is_within
        return self.training.is_ok and (self.training.role == Role.CONTROL or self.is_within)


@dataclass(frozen=True)
class Comparison:
    """All trainings of the same work, of every seed."""

    seeds: Sequence[Seed]
    told: tuple[str, ...] = ()
    """Further settings that name it, because other comparisons differ in them."""

    @property
    def reference(self) -> Training:
        return self.seeds[0].reference

    @cached_property
    def noise(self) -> TrajectoryNoise:
        return TrajectoryNoise([each.equivalent for each in self.seeds])

    @property
    def others(self) -> list[Training]:
        return [each for seed in self.seeds for each in seed.others]

    @property
    def control_counts(self) -> list[int]:
        """Controls that ended well, by seed."""
        return [len(each.equivalent) - 1 for each in self.seeds]

    def floor(self, seeds: int | None = None) -> Deviation:
        """The distance that one of what is compared crosses by chance in FALSE_ALARMS of comparisons.

        The distance is that of a training that ran in so many seeds; None for all of them.
        """
        compared = {each.way for each in self.others if each.role == Role.CELL and each.loss}
        return self.noise.floor(seeds or len(self.seeds), len(compared))

    @cached_property
    def rows(self) -> list[Compared]:
        """Every other training that ran, subjects first, then controls, then mistakes."""
        order = (Role.CELL, Role.REFERENCE, Role.CONTROL, Role.INJECTED_FAULT)
        ways: dict[str, list[tuple[Seed, Training]]] = {}
        for seed in self.seeds:
            for each in seed.others:
                if each.loss and seed.draw(each).controls:
                    ways.setdefault(each.way, []).append((seed, each))
        rows = [self._compared(each) for each in ways.values()]
        return sorted(rows, key=lambda each: order.index(each.training.role))

    @property
    def steps(self) -> int:
        """Those that the references and every subject ran."""
        subjects = [each for each in self.others if each.role == Role.CELL and each.loss]
        references = [each.reference for each in self.seeds]
        return min(len(each.loss) for each in (*references, *subjects))

    @property
    def fall(self) -> float:
        """By how much the reference's loss fell, in nats; of several the one that fell least."""
        return min(each.reference.loss[0] - each.reference.loss[-1] for each in self.seeds)

    @property
    def name(self) -> str:
        """`1k, qwen3_nano, fp32, zero3, adamw`, and the number of seeds where there are several."""
        seq_len, *others = (self.reference.setting(key) for key in TOLD)
        more = [f"{key}={self.reference.work[key]}" for key in self.told]
        more += [f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else []
        return ", ".join([length_label(int(seq_len)), *map(str, others), *more])

    def _compared(self, found: Sequence[tuple[Seed, Training]]) -> Compared:
        losses = [
            abs(own - other)
            for seed, each in found
            for own, other in zip(each.loss, seed.reference.loss, strict=False)
        ]
        norms = [
            abs(own - other) / (abs(other) or 1.0)
            for seed, each in found
            for own, other in zip(each.grad_norm, seed.reference.grad_norm, strict=False)
        ]
        draws = [seed.draw(each) for seed, each in found]
        floor = self.floor(len(found))
        noise = distance_of(draws).divided_by(floor)
        return Compared(
            trainings=[each for _, each in found],
            mean_loss=sum(losses) / len(losses),
            max_loss=max(losses),
            max_grad_norm=max(norms),
            noise=noise,
            logged=_logged(found),
            departure=self._departure(found, floor, noise),
        )

    def _departure(
        self, found: Sequence[tuple[Seed, Training]], floor: Deviation, noise: Deviation
    ) -> str | None:
        """Where the mean over steps is beyond the floor, so is a step of a seed: the first one."""
        beyond = {name: getattr(floor, name) if getattr(noise, name) > 1 else math.inf for name in NAMES}
        for seed, each in found:
            draw = seed.draw(each)
            departure = first_departure(each, draw.centre, Deviation(**beyond).times(draw.widening))
            if departure is not None:
                return departure if len(self.seeds) == 1 else f"seed {each.seed}, {departure}"
        return None


def _logged(found: Sequence[tuple[Seed, Training]]) -> tuple[float, float] | None:
    """Mean and largest difference of what a stack logs from what it logs of data parallelism, over seeds."""
    apart = []
    for seed, training in found:
        plain = seed.reference.setting("strategy"), training.setting("trainer")
        alike = (each for each in seed.others if (each.setting("strategy"), each.setting("trainer")) == plain)
        bases = (each.logged_loss for each in alike if each is not training and each.logged_loss)
        pairs = zip(training.logged_loss or (), next(bases, ()), strict=False)
        apart += [abs(own - other) for own, other in pairs if own is not None and other is not None]
    return (sum(apart) / len(apart), max(apart)) if apart else None


def comparisons(archive: Archive) -> list[Comparison]:
    """Those of the records of EXPERIMENT, by work.

    Where the reference did not end well a control takes its place; without either a work is left out.
    """
    rows = archive.frame[archive.frame["experiment"] == EXPERIMENT]
    columns = [rows[name].astype("object").where(rows[name].notna(), None) for name in MADE_WITH.values()]
    alike: dict[str, list[Training]] = {}
    for row, *origin in zip(rows.index, *columns, strict=True):
        training = _training(archive.record(row), dict(zip(MADE_WITH, origin, strict=True)))
        alike.setdefault(json.dumps(training.work, sort_keys=True), []).append(training)
    told = _telling([group[0].work for group in alike.values()])
    by_seed = ([*_seeds(group)] for group in alike.values())
    return [Comparison(seeds, told) for seeds in by_seed if seeds]


def _seeds(group: Sequence[Training]) -> Iterator[Seed]:
    """Those of one work, by number; without any of which neither reference nor control ended well."""
    for number in sorted({each.seed for each in group}):
        alike = [each for each in group if each.seed == number]
        plain = [each for each in alike if each.role in (Role.REFERENCE, Role.CONTROL) and each.is_ok]
        if plain:
            reference = min(plain, key=lambda each: each.role != Role.REFERENCE)
            yield Seed(reference, [each for each in alike if each is not reference])


def _telling(works: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """The settings that, beside TOLD, tell these works apart; none that differs only where another does."""
    keys, told_apart = [*TOLD], 0
    for key in (TOLD[-1], *dict.fromkeys(key for work in works for key in work)):
        distinct = len({json.dumps([work.get(each) for each in (*keys, key)]) for work in works})
        if told_apart and distinct > told_apart:
            keys.append(key)
        told_apart = max(told_apart, distinct)
    return tuple(keys[len(TOLD) :])


def _training(record: Record, origin: Mapping[str, str | None]) -> Training:
    losses = record.losses
    signals = None if losses is None else signals_of(losses)
    if losses is None or signals is None or not all(map(math.isfinite, (*signals.loss, *signals.grad_norm))):
        return Training(record, origin)
    return Training(record, origin, signals.loss, signals.grad_norm, losses.logged_loss)
