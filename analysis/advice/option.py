"""One way to spread the work over the ranks, and what is known of it: by arithmetic, or measured."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from bench.config import RunConfig
from bench.cost.band import Band
from bench.cost.fit import Fit
from bench.cost.hardware import Hardware
from bench.cost.prediction import Prediction, parts_at_corners, predict
from bench.cost.time import StepParts, step_work
from bench.record import Provenance

PARTS: Mapping[str, tuple[str, ...]] = {
    "attention": ("attention_ms",),
    "other compute": ("other_compute_ms", "optimizer_ms"),
    "exchange": ("transfer_ms", "packing_ms"),
    "parameters and gradients": ("model_state_ms",),
    "waiting for the host": ("idle_ms",),
}
"""What a step's time goes to, and the fields of its parts that add up to it."""
TOKENS = 1_000_000
"""That a price is told for."""
SECONDS_PER_HOUR = 3600


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What records say of an option: of each of its processes that gave a speed, or that it ran out."""

    tokens_per_s: tuple[float, ...]
    """Of all ranks together; none where memory ran out."""
    started_at: tuple[str | None, ...]
    peak_allocated_bytes: float | None
    """Of the worst rank of all processes."""
    transfer: float | None
    """The share of the traced step; None where no trace tells it."""
    ran_out: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """A cell that does the work, and what it would take."""

    cell: RunConfig
    refused: str | None = None
    """Why it cannot run; None where it can."""
    prediction: Prediction | None = None
    corners: tuple[StepParts, ...] = ()
    """One step at each of `bench.cost.prediction.CORNERS`; none where no prediction is made."""
    measured: Measured | None = None

    @property
    def provenance(self) -> Provenance:
        return Provenance.PREDICTED if self.measured is None else Provenance.MEASURED

    @property
    def fit(self) -> Fit | None:
        """What happened, or else what arithmetic says; None where nobody knows what a rank may take."""
        if self.measured is not None:
            return Fit.OUT_OF_MEMORY if self.measured.ran_out else Fit.FITS
        return None if self.prediction is None else self.prediction.fit

    @property
    def can_run(self) -> bool:
        """Whether it is legal and not known to lack memory."""
        return self.refused is None and self.fit is not Fit.OUT_OF_MEMORY

    @property
    def may_lack_memory(self) -> bool:
        """Whether it is not known to fit, although what a rank may take is known."""
        return self.fit in (Fit.UNDECIDED, Fit.OUT_OF_MEMORY)

    @property
    def tokens_per_s(self) -> Band:
        """Of one rank: measured, the range of processes about their median; else the prediction's band."""
        if self.measured is not None:
            all_ranks = self.measured.tokens_per_s
            rates = min(all_ranks), statistics.median(all_ranks), max(all_ranks)
            return Band(*(rate / self.cell.cluster.world_size for rate in rates))
        assert self.prediction is not None
        times = self.prediction.step_time_ms
        return Band(*(self._rate(time_ms) for time_ms in (times.high, times.expected, times.low)))

    @property
    def corner_rates(self) -> tuple[float, ...]:
        """Predicted tokens/s of one rank at each corner."""
        return tuple(self._rate(parts.step_ms) for parts in self.corners)

    @property
    def transfer(self) -> Band:
        """The exposed exchange's share of a step."""
        if self.measured is not None and self.measured.transfer is not None:
            return Band(*(self.measured.transfer,) * 3)
        shares = [parts.transfer_ms / parts.step_ms for parts in self.corners]
        return Band(min(shares), shares[0], max(shares))

    @property
    def shares(self) -> dict[str, float]:
        """Of the expected step, by PARTS."""
        return {name: self.part_ms(name) / self.corners[0].step_ms for name in PARTS}

    @property
    def dominant(self) -> str:
        """The part of the expected step that takes longest."""
        shares = self.shares
        return max(shares, key=lambda name: shares[name])

    def part_ms(self, name: str) -> float:
        """Expected milliseconds of one of PARTS."""
        return float(sum(getattr(self.corners[0], field) for field in PARTS[name]))

    def cost(self, price_per_device_hour: float) -> Band:
        """Of TOKENS tokens, in the price's currency."""
        rates = self.tokens_per_s
        per_token = price_per_device_hour / SECONDS_PER_HOUR * TOKENS
        return Band(*(per_token / rate for rate in (rates.high, rates.expected, rates.low)))

    def _rate(self, step_ms: float) -> float:
        return self.cell.tokens_per_step / step_ms * 1e3 / self.cell.cluster.world_size


def forecast(cell: RunConfig, refused: str | None, hardware: Hardware, usable: int | None) -> Option:
    """A cell as arithmetic sees it; `usable` bytes are what one rank may take."""
    prediction = predict(cell, hardware, usable) if refused is None else None
    work = step_work(cell) if prediction else None
    corners = parts_at_corners(cell, work, hardware) if work else ()
    return Option(cell=cell, refused=refused, prediction=prediction, corners=corners)
