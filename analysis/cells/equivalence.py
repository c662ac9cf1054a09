"""Compares trainings with plain data parallelism: distances in multiples of the noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from analysis.cells.comparison import FREE_PREFIXES, FREE_SETTINGS
from analysis.labels import count_label
from analysis.read.archive import ORIGIN_COLUMNS, Archive
from bench.common.labels import length_label
from bench.record.record import Record, Role, Status
from bench.record.trajectory_noise import (
    SIGNAL_NAMES,
    ControlledTraining,
    Deviation,
    TrajectoryNoise,
    deviation_of,
    first_departure,
    signals_of,
)

LOSS_EQUIVALENCE = "loss_equivalence"
CONTROLLED = ("data.rank_order", "inject_fault")
"""Settings that only controls and injected mistakes change."""
SEQUENCE_COUNTS = ("batch", "dp_replicate", "dp_shard", "grad_accum")
"""Settings whose product is the number of sequences in a step."""
NAMING_KEYS = ("seq_len", "model", "dtype", "engine", "optimizer")
"""Settings that name every comparison; further settings do where comparisons differ in them."""
NATIVE = "native"
"""Trainer with the loop of this project."""


@dataclass(frozen=True, slots=True)
class Training:
    """Losses and gradient norms of the steps of one record."""

    record: Record
    origin: Mapping[str, str | None]
    """Code, torch and device that made the record, by the keys of ORIGIN_COLUMNS."""
    loss: Sequence[float] = field(default=())
    """Loss of each step: the sum of token losses over the number of valid tokens."""
    grad_norm: Sequence[float] = field(default=())
    logged_loss: Sequence[float | None] | None = None
    """Losses that a training stack logs by itself; None with the native loop."""

    @property
    def role(self) -> Role:
        return self.record.role

    @property
    def is_ok(self) -> bool:
        """Whether the training finished and passed every gate of its cell."""
        return self.record.status is Status.OK and bool(self.loss)

    @property
    def work(self) -> dict[str, Any]:
        """Settings, origin and provenance in which trainings of the same workload agree, without the seed."""
        config = self.record.config
        free = FREE_SETTINGS.union(CONTROLLED)
        settings = {
            key: value for key, value in config.items() if not (key in free or key.startswith(FREE_PREFIXES))
        }
        sequences = math.prod(config.get(key) or 1 for key in SEQUENCE_COUNTS)
        return {**settings, "sequences": sequences, **self.origin, "provenance": self.record.provenance}

    @property
    def seed(self) -> int:
        return int(self.setting("seed") or 0)

    @property
    def method_key(self) -> str:
        """Role, repeat and free settings as JSON, equal for trainings that differ only in the seed."""
        free, groups = FREE_SETTINGS.union(CONTROLLED) - {"seed"}, tuple({*FREE_PREFIXES} - {"measure."})
        config = self.record.config.items()
        chosen = {key: value for key, value in config if key in free or key.startswith(groups)}
        return json.dumps([self.role, self.record.repeat, chosen], sort_keys=True)

    @property
    def label(self) -> str:
        """`ring zigzag`, `ulysses contiguous under trl`, `mistake: mask_off_by_one` or `control: ...`."""
        if self.role == Role.INJECTED_FAULT:
            return f"mistake: {self.setting('inject_fault')}"
        words, trainer = f"{self.setting('strategy')} {self.setting('layout')}", self.setting("trainer")
        if self.role == Role.CONTROL:
            ranks = count_label(int(self.setting("cluster.world_size")), "rank")
            words = f"control: {ranks}, {self.setting('kernel')} kernel"
            words += ", data in reverse rank order" if self.setting("data.rank_order") == "reversed" else ""
        return words if trainer == NATIVE else f"{words} under {trainer}"

    def setting(self, key: str) -> Any:
        """Return a value of the record's configuration; None where it has no such setting."""
        return self.record.config.get(key)


@dataclass(frozen=True)
class SeedTrainings:
    """Trainings of the same workload with one seed: the same weights and the same data."""

    reference: Training
    others: Sequence[Training]

    @cached_property
    def equivalent(self) -> list[Training]:
        """The reference and the controls that passed their gates; a wrong control would widen the floor."""
        controls = [other for other in self.others if other.role == Role.CONTROL and other.is_ok]
        return [self.reference, *controls]

    def draw(self, training: Training) -> ControlledTraining:
        """Return a training with the equivalent trainings that it is compared with, without itself."""
        return ControlledTraining(training, [other for other in self.equivalent if other is not training])


@dataclass(frozen=True, slots=True)
class ComparedTraining:
    """Trainings that differ only in their seed, compared with the equivalent trainings of their seeds."""

    trainings: Sequence[Training]
    """One training per seed."""
    mean_loss: float
    """Mean absolute difference of the loss from the reference's, in nats."""
    max_loss: float
    max_grad_norm: float
    """Largest relative difference of the gradient norm."""
    noise: Deviation
    """Distance from the mean of the equivalent trainings, in multiples of the noise floor."""
    logged: tuple[float, float] | None
    """Mean and largest difference between the losses that the training stack logs and those that it logs with
    data parallelism, in nats; None where the stack logs no loss, or has no record with data parallelism."""
    departure: str | None
    """Sentence on the first step beyond the floor; None where the mean over all steps is within it."""

    @property
    def training(self) -> Training:
        """The training that represents all seeds: the first that failed, else the first."""
        return next((training for training in self.trainings if not training.is_ok), self.trainings[0])

    @property
    def is_within(self) -> bool:
        return max(self.noise.loss, self.noise.grad_norm) <= 1

    @property
    def is_as_expected(self) -> bool:
        """Whether the training is what its role promises.

        A mistake must be beyond the floor. Any other training must pass its gates and, unless it is a
        control, be within the floor.
        """
        if self.training.role == Role.INJECTED_FAULT:
            return not self.is_within
        return self.training.is_ok and (self.training.role == Role.CONTROL or self.is_within)


@dataclass(frozen=True)
class LossComparison:
    """Trainings of the same workload, of every seed."""

    seeds: Sequence[SeedTrainings]
    more_naming_keys: tuple[str, ...] = ()
    """Settings that name the comparison besides NAMING_KEYS, because other comparisons differ in them."""

    @property
    def reference(self) -> Training:
        return self.seeds[0].reference

    @cached_property
    def noise(self) -> TrajectoryNoise:
        return TrajectoryNoise([seed.equivalent for seed in self.seeds])

    @property
    def compared_trainings(self) -> list[Training]:
        """All trainings of all seeds but the references."""
        return [training for seed in self.seeds for training in seed.others]

    @property
    def control_counts(self) -> list[int]:
        """Number of controls of each seed that passed their gates."""
        return [len(seed.equivalent) - 1 for seed in self.seeds]

    def floor(self, seeds: int | None = None) -> Deviation:
        """Return the noise floor: any compared training crosses it by chance in FALSE_ALARMS of comparisons.

        Args:
            seeds: number of seeds in which the training ran; None for all seeds.
        """
        compared = {
            other.method_key for other in self.compared_trainings if other.role == Role.CELL and other.loss
        }
        return self.noise.floor(seeds or len(self.seeds), len(compared))

    @cached_property
    def rows(self) -> list[ComparedTraining]:
        """Compared trainings: strategies first, then references, controls and mistakes."""
        order = (Role.CELL, Role.REFERENCE, Role.CONTROL, Role.INJECTED_FAULT)
        pairs: dict[str, list[tuple[SeedTrainings, Training]]] = {}
        for seed in self.seeds:
            for training in seed.others:
                if training.loss and seed.draw(training).controls:
                    pairs.setdefault(training.method_key, []).append((seed, training))
        rows = [self._compare(pairs_of_method) for pairs_of_method in pairs.values()]
        return sorted(rows, key=lambda row: order.index(row.training.role))

    @property
    def steps(self) -> int:
        """Number of steps that the references and every compared strategy ran."""
        strategies = [other for other in self.compared_trainings if other.role == Role.CELL and other.loss]
        references = [seed.reference for seed in self.seeds]
        return min(len(training.loss) for training in (*references, *strategies))

    @property
    def fall(self) -> float:
        """Fall of the reference's loss over the training, in nats; the smallest fall of all seeds."""
        return min(seed.reference.loss[0] - seed.reference.loss[-1] for seed in self.seeds)

    @property
    def name(self) -> str:
        """`1k, qwen3_nano, fp32, zero3, adamw`, with the number of seeds where there are several."""
        seq_len, *others = (self.reference.setting(key) for key in NAMING_KEYS)
        more = [f"{key}={self.reference.work[key]}" for key in self.more_naming_keys]
        more += [f"{len(self.seeds)} seeds"] if len(self.seeds) > 1 else []
        return ", ".join([length_label(int(seq_len)), *map(str, others), *more])

    def _compare(self, pairs: Sequence[tuple[SeedTrainings, Training]]) -> ComparedTraining:
        """Return the comparison of trainings that differ only in their seed."""
        losses = [
            abs(loss - reference_loss)
            for seed, training in pairs
            for loss, reference_loss in zip(training.loss, seed.reference.loss, strict=False)
        ]
        norms = [
            abs(norm - reference_norm) / (abs(reference_norm) or 1.0)
            for seed, training in pairs
            for norm, reference_norm in zip(training.grad_norm, seed.reference.grad_norm, strict=False)
        ]
        floor = self.floor(len(pairs))
        noise = deviation_of([seed.draw(training) for seed, training in pairs]).divided_by(floor)
        return ComparedTraining(
            trainings=[training for _, training in pairs],
            mean_loss=sum(losses) / len(losses),
            max_loss=max(losses),
            max_grad_norm=max(norms),
            noise=noise,
            logged=_logged_difference(pairs),
            departure=self._departure(pairs, floor, noise),
        )

    def _departure(
        self, pairs: Sequence[tuple[SeedTrainings, Training]], floor: Deviation, noise: Deviation
    ) -> str | None:
        """Return the first step beyond the floor of any seed; None where the mean over steps is within it.

        If the mean over steps is beyond the floor, so is at least one step.
        """
        beyond = {
            name: getattr(floor, name) if getattr(noise, name) > 1 else math.inf for name in SIGNAL_NAMES
        }
        for seed, training in pairs:
            draw = seed.draw(training)
            departure = first_departure(training, draw.centre, Deviation(**beyond).times(draw.widening))
            if departure is not None:
                return departure if len(self.seeds) == 1 else f"seed {training.seed}, {departure}"
        return None


def _logged_difference(pairs: Sequence[tuple[SeedTrainings, Training]]) -> tuple[float, float] | None:
    """Return mean and largest difference of the logged losses from those logged with data parallelism.

    Both are over all seeds, in nats; None where a training stack logs nothing, or has no data-parallel
    record.
    """
    differences = []
    for seed, training in pairs:
        base_key = seed.reference.setting("strategy"), training.setting("trainer")
        bases = (
            other.logged_loss
            for other in seed.others
            if (other.setting("strategy"), other.setting("trainer")) == base_key
            and other is not training
            and other.logged_loss
        )
        logged = zip(training.logged_loss or (), next(bases, ()), strict=False)
        differences += [abs(loss - base) for loss, base in logged if loss is not None and base is not None]
    return (sum(differences) / len(differences), max(differences)) if differences else None


def loss_comparisons(archive: Archive) -> list[LossComparison]:
    """Return a comparison for each workload among the records of EXPERIMENT.

    Where a reference failed, a control takes its place. A workload without either is left out.
    """
    rows = archive.frame[archive.frame["experiment"] == LOSS_EQUIVALENCE]
    columns = [
        rows[name].astype("object").where(rows[name].notna(), None) for name in ORIGIN_COLUMNS.values()
    ]
    groups: dict[str, list[Training]] = {}
    for row, *origin in zip(rows.index, *columns, strict=True):
        training = _training(archive.record(row), dict(zip(ORIGIN_COLUMNS, origin, strict=True)))
        groups.setdefault(json.dumps(training.work, sort_keys=True), []).append(training)
    keys = _distinguishing_keys([group[0].work for group in groups.values()])
    seeds_of_groups = ([*_seeds(group)] for group in groups.values())
    return [LossComparison(seeds, keys) for seeds in seeds_of_groups if seeds]


def _seeds(group: Sequence[Training]) -> Iterator[SeedTrainings]:
    """Yield the seeds of one workload, ascending, without those whose reference and controls failed."""
    for number in sorted({training.seed for training in group}):
        trainings = [training for training in group if training.seed == number]
        plain = [
            training
            for training in trainings
            if training.role in (Role.REFERENCE, Role.CONTROL) and training.is_ok
        ]
        if plain:
            reference = min(plain, key=lambda training: training.role != Role.REFERENCE)
            yield SeedTrainings(reference, [other for other in trainings if other is not reference])


def _distinguishing_keys(works: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the settings besides NAMING_KEYS that distinguish these workloads.

    A setting that differs only where an earlier one differs is not among them.
    """
    keys, distinct_before = [*NAMING_KEYS], 0
    for key in (NAMING_KEYS[-1], *dict.fromkeys(key for work in works for key in work)):
        distinct = len({json.dumps([work.get(name) for name in (*keys, key)]) for work in works})
        if distinct_before and distinct > distinct_before:
            keys.append(key)
        distinct_before = max(distinct_before, distinct)
    return tuple(keys[len(NAMING_KEYS) :])


def _training(record: Record, origin: Mapping[str, str | None]) -> Training:
    losses = record.losses
    signals = None if losses is None else signals_of(losses)
    if losses is None or signals is None or not all(map(math.isfinite, (*signals.loss, *signals.grad_norm))):
        return Training(record, origin)
    return Training(record, origin, signals.loss, signals.grad_norm, losses.logged_loss)
