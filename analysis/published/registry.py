"""The file of published claims, checked as it is read: claims.yaml beside this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

from bench.config import ConfigError

CLAIMS_FILE = Path(__file__).parent / "claims.yaml"
METRICS = (
    "a2a_share", "comm_bytes", "comm_bytes_ratio", "comm_reduction", "communication_share",
    "cp_mandatory", "faster_than_ring_rotation", "final_loss", "iters_per_s", "loss_abs_tolerance",
    "loss_at_step", "loss_curves_overlap", "loss_max_abs_diff", "loss_mean_abs_diff", "max_seq_len",
    "mfu", "mfu_ratio", "oom", "pct_of_ideal_flash_attn", "peak_mem_gb", "peak_mem_ratio",
    "peak_mem_reduction", "prediction_error", "ruler_score", "seq_len_ratio", "speedup", "step_time_s",
    "tflops_per_gpu", "tokens_per_s", "tokens_per_s_per_gpu",
)  # fmt: skip

Text = Annotated[str, Meta(min_length=1)]
Identifier = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[float, Meta(gt=0)]
Setting = str | int | float | bool


class Source(Struct, frozen=True, forbid_unknown_fields=True):
    title: Text
    ref: Text
    revision: str | None


class Hardware(Struct, frozen=True, forbid_unknown_fields=True):
    gpu: Text
    count: Count | Text | None
    """A text where several numbers are claimed for at once."""
    memory_gb: Size | None
    interconnect: str | None


class Claim(Struct, frozen=True, forbid_unknown_fields=True):
    """One published number; null is what its source does not state."""

    id: Identifier
    group: Identifier
    system: Identifier
    """The method, by its source's name."""
    source: Source
    model: str | None
    hardware: Hardware
    software: Mapping[str, Setting | None]
    seq_len: Count | None
    """Tokens of the whole sequence."""
    batch: Mapping[str, Setting] | None
    sp_degree: Count | None
    metric: str
    value: bool | float
    """As published, in `unit`."""
    unit: Text
    baseline: str | None
    verified: Literal["exact", "chart", "secondhand"]
    read_from: Text
    notes: str | None

    def __post_init__(self) -> None:
        if self.metric not in METRICS:
            raise ValueError(
                f"Unknown metric {self.metric!r}, known are {', '.join(METRICS)} - at `$.metric`"
            )


class Reading(Struct, frozen=True, forbid_unknown_fields=True):
    """What some claims' texts say of their set-up beyond their fields."""

    claims: Annotated[Sequence[Text], Meta(min_length=1)]
    """Their ids, as shell patterns."""
    why: Text
    set: Mapping[str, Setting] = {}
    """Keys of the command line."""
    baseline: Mapping[str, Setting] = {}
    """Those in which the cell differs that a ratio is taken to."""


class OpenSetting(Struct, frozen=True, forbid_unknown_fields=True):
    """A setting that decides some claims' numbers and that their source leaves open."""

    claims: Annotated[Sequence[Text], Meta(min_length=1)]
    field: Text
    why: Text


class Read(NamedTuple):
    """All readings of one claim."""

    settings: Mapping[str, Setting]
    baseline: Mapping[str, Setting]
    why: Mapping[str, str]
    """Per key the reason of the reading that set it."""


class Registry(Struct, frozen=True):
    """All claims, and how their texts are read."""

    claims: Sequence[Claim]
    read_as: Sequence[Reading]
    open: Sequence[OpenSetting]

    def reading(self, claim_id: str) -> Read:
        """Of readings that name the same key the last one counts."""
        found = Read({}, {}, {})
        for each in self.read_as:
            if _names(each.claims, claim_id):
                why = dict.fromkeys(each.set, each.why)
                found = Read(
                    {**found.settings, **each.set}, {**found.baseline, **each.baseline}, {**found.why, **why}
                )
        return found

    def left_open(self, claim_id: str) -> list[OpenSetting]:
        return [each for each in self.open if _names(each.claims, claim_id)]


@cache
def read_registry(path: Path = CLAIMS_FILE) -> Registry:
    """The claims of a file; raises ConfigError, in one line with the claim's id and field, for a bad one."""
    try:
        content = yaml.load(path.read_bytes(), Loader=_Loader)  # noqa: S506  a safe loader
        claims = [_claim(path, number, raw) for number, raw in enumerate(content["claims"], start=1)]
        readings = [_converted(path, "read_as", raw, Reading) for raw in content["read_as"]]
        left_open = [_converted(path, "open", raw, OpenSetting) for raw in content["open"]]
    except (OSError, yaml.YAMLError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no registry of claims ({' '.join(str(error).split())})") from None
    _refuse_unmatched(path, claims, [*readings, *left_open])
    return Registry(claims, readings, left_open)


_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The one in C takes a tenth of the time."""

Kind = TypeVar("Kind")


def _claim(path: Path, number: int, raw: Any) -> Claim:
    name = raw.get("id") if isinstance(raw, dict) else None
    return _converted(path, f"claim {name or f'number {number}'}", raw, Claim)


def _converted(path: Path, what: str, raw: Any, kind: type[Kind]) -> Kind:
    try:
        return msgspec.convert(raw, kind)
    except (msgspec.ValidationError, ValueError) as error:
        text = str(error).replace(" - at `$.", ", at `").replace("`$`", what)
        raise ConfigError(f"{path}: {what}: {text}; correct the file") from None


def _refuse_unmatched(path: Path, claims: Sequence[Claim], rules: Sequence[Reading | OpenSetting]) -> None:
    """Raises ConfigError for an id given twice and for a pattern that names no claim."""
    ids = Counter(claim.id for claim in claims)
    for name, count in ids.items():
        if count > 1:
            raise ConfigError(f"{path}: claim {name}: {count} claims have this id; give each its own")
    for pattern in _patterns(rules):
        if not any(fnmatchcase(name, pattern) for name in ids):
            raise ConfigError(f"{path}: {pattern}: names no claim; correct the pattern or leave it out")


def _patterns(rules: Sequence[Reading | OpenSetting]) -> Iterator[str]:
    for rule in rules:
        yield from rule.claims


def _names(patterns: Sequence[str], claim_id: str) -> bool:
    return any(fnmatchcase(claim_id, pattern) for pattern in patterns)
