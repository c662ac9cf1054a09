"""Trainings beside one another: how far each is from plain data parallelism, in multiples of the noise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from analysis.cells.comparison import FREE, FREE_GROUPS
from analysis.frame.archive import MADE_WITH, Archive
from analysis.frame.load import Record
from analysis.labels import count_label
from bench.equivalence.trajectory import Limit, distance, first_departure, noise_floor
from bench.labels import length_label
from bench.record import Role, Status

EXPERIMENT = "loss_equivalence"
FACTOR = 3.0
"""What is compared is one more draw of the noise, and may lie beyond the largest of a few."""
APART = ("data.deal", "mistake")
"""What only controls and mistakes do in another way."""
SPREAD = ("batch", "dp_replicate", "dp_shard", "grad_accum")
"""Numbers whose product is the sequences of a step."""
LEAST_CONTROLS = 3
"""Fewer show too little of the noise."""
TOLD = ("seq_len", "model", "dtype", "engine", "optimizer")
"""Settings that always name a comparison; others do where comparisons differ in them."""
NATIVE = "native"
"""The trainer whose loop is ours."""
LEAST_FALL = 0.5
"""In nats: a loss that hardly falls hardly shows what was learnt."""


@dataclass(frozen=True, slots=True)
class Training:
    """One record's steps."""

    record: Record
    origin: Mapping[str, str | None]
    """The code, torch and device that it was made with."""
    loss: Sequence[float] = field(default=())
    """Sum of token losses over the number of valid tokens."""
    grad_norm: Sequence[float] = field(default=())
    logged_loss: Sequence[float] | None = None
    """What the training stack itself logs; None where the loop is ours."""

    @property
    def role(self) -> str:
        return str(self.record["role"])

    @property
    def is_ok(self) -> bool:
        """Whether it came to its end and passed every gate of its own."""
        return bool(self.record["status"] == Status.OK and self.loss)

    @property
    def work(self) -> dict[str, Any]:
        """Every setting in which trainings agree that do the same work, on the same machine."""
        config = self.record["config"]
        free = (FREE - {"seed"}).union(APART)
        kept = {key: each for key, each in config.items() if not (key in free or key.startswith(FREE_GROUPS))}
        sequences = math.prod(config.get(key) or 1 for key in SPREAD)
        return {**kept, "sequences": sequences, **self.origin, "provenance": self.record["provenance"]}

    @property
    def label(self) -> str:
        """`ring zigzag`, `ulysses contiguous under trl`, `mistake: mask_off_by_one` or what a control is."""
        if self.role == Role.MISTAKE:
            return f"mistake: {self.setting('mistake')}"
        words = [str(self.setting("strategy")), str(self.setting("layout"))]
        if self.role == Role.CONTROL:
            words = ["control:", *self._differs()]
        return " ".join(
            words if self.setting("trainer") == NATIVE else [*words, "under", str(self.setting("trainer"))]
        )

    def _differs(self) -> list[str]:
        """What a control does in another way than the reference."""
        ranks = count_label(int(self.setting("cluster.world_size")), "rank")
        parts = [f"{ranks}, {self.setting('kernel')} kernel"]
        return [*parts, "dealt in reverse"] if self.setting("data.deal") == "reversed" else parts

    def setting(self, key: str) -> Any:
        """A value of the record's configuration, None where an older record has none."""
        return self.record["config"].get(key)


@dataclass(frozen=True, slots=True)
class Compared:
    """One training beside the reference."""

    training: Training
    mean_loss: float
    """Mean absolute difference of the loss, in nats."""
    max_loss: float
    max_grad_norm: float
    """Largest relative difference of the gradient norm."""
    noise: Limit
    """How far it is from the reference, in multiples of the noise floor."""
    logged: tuple[float, float] | None
    """Mean and largest difference of what the stack logs from what it logs of data parallelism, in nats;
    None where the stack logs nothing of its own, or there is no such record."""
    departure: str | None
    """The first step in which it is more than FACTOR times the floor away, in words."""

    @property
    def is_within(self) -> bool:
        return self.departure is None

    @property
    def is_as_expected(self) -> bool:
        """Whether a mistake was found, and anything else passed its own gates and this one."""
        if self.training.role == Role.MISTAKE:
            return not self.is_within
        return self.is_within and self.training.is_ok


@dataclass(frozen=True)
class Comparison:
    """All trainings of the same work."""

    reference: Training
    others: Sequence[Training]
    told: tuple[str, ...] = ()
    """Further settings that name it, because other comparisons differ in them."""

    @cached_property
    def floor(self) -> Limit:
        """The largest distance between any two of the reference and its controls."""
        return noise_floor([self.reference, *self.controls])

    @property
    def controls(self) -> list[Training]:
        """Those that passed their own gates: a wrong one would widen the floor."""
        return [each for each in self.others if each.role == Role.CONTROL and each.is_ok]

    @cached_property
    def rows(self) -> list[Compared]:
        """Every other training that ran, subjects first, then controls, then mistakes."""
        order = (Role.CELL, Role.REFERENCE, Role.CONTROL, Role.MISTAKE)
        ran = sorted(
            (each for each in self.others if each.loss), key=lambda each: order.index(Role(each.role))
        )
        return [self._compared(each) for each in ran]

    @property
    def without_steps(self) -> list[Training]:
        """Those whose ranks did not come to the end of a step."""
        return [each for each in self.others if not each.loss]

    @property
    def steps(self) -> int:
        """Those that the reference and every subject ran."""
        subjects = (row.training for row in self.rows if row.training.role == Role.CELL)
        return min(len(each.loss) for each in (self.reference, *subjects))

    @property
    def fall(self) -> float:
        """By how much the reference's loss fell, in nats."""
        return self.reference.loss[0] - self.reference.loss[-1]

    @property
    def name(self) -> str:
        """`1k, qwen3_nano, fp32, zero3, adamw`."""
        seq_len, *others = (self.reference.setting(key) for key in TOLD)
        more = [f"{key}={self.reference.work[key]}" for key in self.told]
        return ", ".join([length_label(int(seq_len)), *map(str, others), *more])

    @property
    def machine(self) -> str:
        """`measured, cpu, AMD EPYC`."""
        record = self.reference.record
        device = (record.get("environment") or {}).get("device_name")
        parts = (record["provenance"], self.reference.setting("hardware"), device)
        return ", ".join(str(part) for part in parts if part)

    def _compared(self, found: Training) -> Compared:
        pairs = [*zip(found.loss, self.reference.loss, strict=False)]
        apart = [abs(own - other) for own, other in pairs]
        norms = zip(found.grad_norm, self.reference.grad_norm, strict=False)
        return Compared(
            training=found,
            mean_loss=sum(apart) / len(apart),
            max_loss=max(apart),
            max_grad_norm=max(abs(own - other) / (abs(other) or 1.0) for own, other in norms),
            noise=distance(found, self.reference).over(self.floor),
            logged=self._logged(found),
            departure=first_departure(found, self.reference, self.floor.times(FACTOR)),
        )

    def _logged(self, found: Training) -> tuple[float, float] | None:
        bases = (
            each.logged_loss
            for each in self.others
            if each.setting("strategy") == self.reference.setting("strategy")
            and each.setting("trainer") == found.setting("trainer")
            and each is not found
        )
        base = next((each for each in bases if each), None)
        if base is None or not found.logged_loss:
            return None
        apart = [abs(own - other) for own, other in zip(found.logged_loss, base, strict=False)]
        return sum(apart) / len(apart), max(apart)


def comparisons(archive: Archive) -> list[Comparison]:
    """Those of the records of EXPERIMENT.

    Where the reference did not end well a control takes its place; without either a work is left out.
    """
    rows = archive.frame[archive.frame["experiment"] == EXPERIMENT]
    columns = [rows[name].astype("object").where(rows[name].notna(), None) for name in MADE_WITH.values()]
    origins = [dict(zip(MADE_WITH, each, strict=True)) for each in zip(*columns, strict=True)]
    return [*_comparisons(map(_training, map(archive.record, rows.index), origins))]


def _comparisons(trainings: Iterable[Training]) -> Iterator[Comparison]:
    alike: dict[str, list[Training]] = {}
    for training in trainings:
        alike.setdefault(json.dumps(training.work, sort_keys=True), []).append(training)
    told = _telling([group[0].work for group in alike.values()])
    for group in alike.values():
        plain = [each for each in group if each.role in (Role.REFERENCE, Role.CONTROL) and each.is_ok]
        if plain:
            reference = min(plain, key=lambda each: each.role != Role.REFERENCE)
            yield Comparison(reference, [each for each in group if each is not reference], told)


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
    losses: Mapping[str, Any] = record.get("losses") or {}
    if None in (*losses.get("loss", ()), *losses.get("grad_norm", ())):
        return Training(record, origin)  # null stands for a number that is not finite
    return Training(
        record,
        origin,
        losses.get("loss", ()),
        losses.get("grad_norm", ()),
        losses.get("logged_loss") or None,
    )
