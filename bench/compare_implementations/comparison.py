"""What became of every implementation in every setting."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bench.compare_implementations.entrants import Entrant, Setting
from bench.statistics import Interval, median_interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One implementation in one setting, over all sets of processes."""

    ranks: int
    seq_len: int
    num_heads: int
    num_kv_heads: int
    dtype: str
    implementation: str
    package: str | None
    """The distribution whose code ran, with its version; None where it is ours."""
    counterpart: str | None
    """Ours that it is held against."""
    reason: str | None
    """Why it did not run, or was not timed."""
    call_ms: tuple[float, ...] = ()
    """Of each set of processes the median call, forward and backward, of the slowest rank."""
    ratios: tuple[float, ...] = ()
    """Of each set the median of its time over its counterpart's, round by round."""
    rounds: tuple[int, ...] = ()
    """How often it took a turn in each set."""
    sent_bytes: int | None = None
    """What the rank that sends most hands to others in a call."""
    peak_bytes: int | None = None
    """The most that tensors of a rank held in a call, beyond its inputs."""
    error_ulps: Mapping[str, float] | None = None
    """By tensor its largest error, in units of the last place of the exact tensor's largest element."""

    @property
    def interval(self) -> Interval | None:
        """Of the ratio; None below six sets of processes."""
        return median_interval(self.ratios)

    @property
    def verdict(self) -> str | None:
        """What the ratio says of ours beside a package; None where there is none, or no interval."""
        interval = self.interval
        if interval is None or self.package is None:
            return None
        if interval.high < 1:
            return f"ours is slower by {1 / statistics.median(self.ratios) - 1:.1%}"
        return "ours is faster" if interval.low > 1 else "no clear difference"

    @property
    def is_ours_slower(self) -> bool:
        return self.package is not None and self.interval is not None and self.interval.high < 1


def rows_of(
    setting: Setting,
    entrants: Sequence[Entrant],
    sets: Sequence[Sequence[Mapping[str, Any]]],
    packages: Mapping[str, str | None],
) -> list[Row]:
    """The rows of a setting, from the reports of all ranks of every set of processes."""
    calls_ms = {
        entrant.label: [_slowest_ms(ranks, number) for ranks in sets]
        for number, entrant in enumerate(entrants)
    }
    return [
        _row(
            setting,
            entrant,
            calls_ms,
            [[report["looked"][number] for report in ranks] for ranks in sets],
            packages.get(entrant.label),
        )
        for number, entrant in enumerate(entrants)
    ]


def _row(
    setting: Setting,
    entrant: Entrant,
    calls_ms: Mapping[str, Sequence[Sequence[float]]],
    sets: Sequence[Sequence[Mapping[str, Any]]],
    package: str | None,
) -> Row:
    """`sets` holds what the ranks of each set found; one that failed in any set has the reason."""
    own_ms, looked = calls_ms[entrant.label], sets[0]
    failures = (each["failure"] for ranks in sets for each in ranks)
    reason = next((failure for failure in failures if failure is not None), None)
    has_times = all(own_ms)
    against = calls_ms.get(entrant.counterpart or "", ())
    return Row(
        **asdict(setting),
        dtype=entrant.cell.dtype,
        implementation=entrant.label,
        package=package,
        counterpart=entrant.counterpart,
        reason=reason,
        call_ms=tuple(map(statistics.median, own_ms)) if has_times else (),
        ratios=_ratios(own_ms, against) if has_times and against and all(against) else (),
        rounds=tuple(map(len, own_ms)) if has_times else (),
        sent_bytes=max((each["sent_bytes"] for each in looked), default=None) if reason is None else None,
        peak_bytes=max((each["peak_bytes"] for each in looked), default=None) if reason is None else None,
        error_ulps=_worst([each["errors"] for each in looked]) if reason is None else None,
    )


def _slowest_ms(ranks: Sequence[Mapping[str, Any]], number: int) -> list[float]:
    """Of each round the slowest rank's call."""
    return [max(call) for call in zip(*(report["times_ms"][number] for report in ranks), strict=True)]


def _ratios(own_ms: Sequence[Sequence[float]], ours_ms: Sequence[Sequence[float]]) -> tuple[float, ...]:
    pairs = zip(own_ms, ours_ms, strict=True)
    return tuple(statistics.median(b / a for a, b in zip(ours, own, strict=True)) for own, ours in pairs)


def _worst(errors: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: max(each[name] for each in errors) for name in errors[0]}
