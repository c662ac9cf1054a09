"""Attention of the cell's own step, at the measured length, against float64. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, Moment

CONTROL_FACTOR = 2.5
"""A sound result errs at most so many times as much as the control does."""
OUT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
"""Where control and strategy both err by rounding alone; in 16 bit the control decides."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-2, "bf16": 3e-2}
"""Torch's own kernel on a CPU errs more the longer the sequence: in bf16 by 6e-3 in `dq` at 32k, in `dk` and
`dv` of sampled keys by 1.1e-2 at 16k and by 4.6e-2 at 64k. `CPU_SCORES` ends their comparison at 17k where a
rank has one causal head, and before that where it has more."""
KEY_FLOORS: Mapping[str, float] = {**GRADIENT_FLOORS, "fp16": 5e-2, "bf16": 5e-2}
"""Of single keys, whose gradients may nearly cancel: `math` in bf16 erred by 3.5e-2 once SGD at learning rate
0.1 had trained for some steps."""
IDENTITY_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""Limits of the identities of `dk` and `dv`. In 16 bit a kernel rounds their sums, so that only gross errors
exceed them."""


def limit_of(floor: float, control: float) -> float:
    """The limit of a result whose control errs by so much."""
    return max(floor, CONTROL_FACTOR * control)


SAMPLED_ROWS = 32
"""Over all ranks that share a sequence, of every head."""
SAMPLED_KEYS = 32
"""Keys whose dk and dv are compared, over all ranks that share a sequence, of every KV head."""
CPU_SCORES = 150_000_000
"""A CPU rank makes no more for the LSE of its queries: about a second in float32, two in float64.
Far beyond, torch's own kernel errs by more than a sound one may."""
OF_ROWS, OF_KEYS = "attention at full length", "dk and dv of sampled keys"
LABELS = {
    "out": "out of the sampled rows is off by",
    "dq": "dq of the sampled rows is off by",
    "dk": "dk and dq disagree about the scores' gradients by",
    "dv": "dv and out disagree about the weights by",
    "dk_keys": "dk of the sampled keys is off by",
    "dv_keys": "dv of the sampled keys is off by",
}


class FullLengthSection(Struct, frozen=True, kw_only=True):
    """One call of attention in the inspected step, gradients included."""

    tokens: int
    rows: int
    """Of `out` and `dq`, drawn anew for every cell, over all ranks of a sequence, of every head."""
    keys: int = 0
    """Of `dk_keys` and `dv_keys`, drawn and counted as rows are."""
    keys_reason: str | None = None
    """Why no keys were compared."""
    errors: Mapping[str, float | None]
    """Of `out` and `dq`: the length of the sampled rows' deviation from float64, relative to theirs.
    Of `dk` and `dv`: by how much an identity over all tokens is missed, relative to its terms.
    Of `dk_keys` and `dv_keys`: the sampled keys' deviation from float64, each relative to its own size."""
    limits: Mapping[str, float | None]
    reason: str | None = None
    """Why there are no errors."""


class FullLengthFacts(ErrorFacts[FullLengthSection]):
    name = "full_length"
    part = FullLengthSection
    judges = Moment.INSPECTED_STEP
    compares = OF_ROWS, OF_KEYS
    too_large = "attention at {tokens:,} tokens: {label} {error:.1e} (limit {limit:.1e})"
    not_finite = "attention at {tokens:,} tokens: {name} is not finite"
    labels = LABELS

    def made(self, cell: Cell, section: FullLengthSection) -> list[Check]:  # noqa: ARG002
        """Return the checks of the sampled rows and keys of one call."""
        rows = Check(what=OF_ROWS, against="float64", tokens=section.tokens, rows=section.rows, steps=1)
        if section.keys_reason is not None:
            return [rows, Check(what=OF_KEYS, against="float64", reason=section.keys_reason)]
        return [rows, replace(rows, what=OF_KEYS, rows=section.keys)]


def why_no_keys(device_type: str, scores: int) -> str | None:
    """Why no keys are sampled of a call whose LSE takes a rank so many scores; None where they are."""
    if device_type != "cpu" or scores <= CPU_SCORES:
        return None
    return f"takes {scores:.1e} scores a rank, more than the {CPU_SCORES:.1e} that a CPU is given"


FACTS = FullLengthFacts()
