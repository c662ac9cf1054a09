"""Section, limits and checks of the full_length pass: a real attention call against float64. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct
from msgspec.structs import replace

from bench.config import Cell
from bench.measure.check import Check
from bench.measure.facts import ErrorFacts, FaultOrigin

CONTROL_FACTOR = 2.5
"""Largest error of a sound result, as a multiple of the error of its control, the same rows or keys in the
cell's dtype on one device."""
OUT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-5}
"""Smallest limits of `out`, by dtype. In 16 bit the limit follows the control alone."""
GRADIENT_FLOORS: Mapping[str, float] = {"fp64": 1e-12, "fp32": 1e-3, "fp16": 3e-2, "bf16": 3e-2}
"""Smallest limits of `dq`, by dtype.

The error of torch's own kernel on a CPU grows with the sequence: in bf16 it is 6e-3 in `dq` at 32k, and in
`dk` and `dv` of sampled keys 1.1e-2 at 16k and 4.6e-2 at 64k. With `CPU_SCORES`, keys are compared up to 17k
tokens if a rank has one causal head, and up to fewer tokens if it has more heads."""
KEY_FLOORS: Mapping[str, float] = {**GRADIENT_FLOORS, "fp16": 5e-2, "bf16": 5e-2}
"""Smallest limits of `dk` and `dv` of sampled keys, by dtype.

The gradients of a single key may nearly cancel: in bf16 the kernel `math` erred by 3.5e-2 after some steps of
SGD with learning rate 0.1."""
IDENTITY_LIMITS: Mapping[str, float] = {"fp64": 1e-9, "fp32": 1e-3, "fp16": 0.25, "bf16": 0.25}
"""Limits of the identities of `dk` and `dv`, by dtype. In 16 bit a kernel rounds the sums in the identities,
so that only gross errors exceed the limit."""


def error_limit(floor: float, control: float) -> float:
    """Return the limit of a result's error: a multiple of its control's error, at least the floor."""
    return max(floor, CONTROL_FACTOR * control)


SAMPLED_ROWS = 32
"""Number of tokens whose `out` and `dq` are compared for every head, over all ranks of a sequence."""
SAMPLED_KEYS = 32
"""Number of keys whose `dk` and `dv` are compared for every KV head, over all ranks of a sequence."""
CPU_SCORES = 150_000_000
"""Largest number of scores that a CPU rank computes for the LSE of its queries.

They take about one second in float32 and two in float64. With many more scores the error of torch's own
kernel exceeds the limit."""
ROWS_CHECK, KEYS_CHECK = "attention at full length", "dk and dv of sampled keys"
LABELS = {
    "out": "out of the sampled rows is off by",
    "dq": "dq of the sampled rows is off by",
    "dk": "dk and dq disagree about the scores' gradients by",
    "dv": "dv and out disagree about the weights by",
    "dk_keys": "dk of the sampled keys is off by",
    "dv_keys": "dv of the sampled keys is off by",
}
"""Beginnings of messages by the name of the error."""


class FullLengthSection(Struct, frozen=True, kw_only=True):
    """Errors of one attention call in the inspected step, gradients included."""

    tokens: int
    """Number of tokens of the sequence."""
    call: int = 0
    """Number of the compared call in the step, counted from 0. Cells sample different calls, and with them
    different layers."""
    rows: int
    """Number of tokens whose `out` and `dq` were compared for every head, over all ranks of a sequence. Cells
    sample different tokens."""
    keys: int = 0
    """Number of tokens whose `dk` and `dv` were compared for every KV head, over all ranks of a sequence."""
    keys_reason: str | None = None
    """Reason for comparing no keys; null if keys were compared."""
    errors: Mapping[str, float | None]
    """Relative errors by tensor.

    `out`, `dq`: Euclidean length of the sampled rows' deviation from float64, divided by the rows' length.
    `dk`, `dv`: difference of the two sides of an identity over all tokens, divided by the size of its terms.
    `dk_keys`, `dv_keys`: root mean square over sampled keys of the deviation from float64, divided by the
    size of the key's gradient."""
    limits: Mapping[str, float | None]
    """Largest errors that pass, by tensor."""
    reason: str | None = None
    """Reason for missing errors; null if the call was compared."""


class FullLengthFacts(ErrorFacts[FullLengthSection]):
    name = "full_length"
    part_type = FullLengthSection
    fault_origin = FaultOrigin.INSPECTED_STEP
    check_names = ROWS_CHECK, KEYS_CHECK
    too_large = "attention at {tokens:,} tokens: {label} {error:.1e} (limit {limit:.1e})"
    not_finite = "attention at {tokens:,} tokens: {name} is not finite"
    labels = LABELS

    def error_checks(self, cell: Cell, section: FullLengthSection) -> list[Check]:  # noqa: ARG002
        """Return the checks of sampled rows and sampled keys; the latter has a reason if it was not made."""
        rows = Check(what=ROWS_CHECK, against="float64", tokens=section.tokens, rows=section.rows, steps=1)
        if section.keys_reason is not None:
            return [rows, Check(what=KEYS_CHECK, against="float64", reason=section.keys_reason)]
        return [rows, replace(rows, what=KEYS_CHECK, rows=section.keys)]


def sampled_call(cell: Cell) -> int:
    """Return the number of the attention call, one per layer, that this cell compares."""
    return int(cell.cell_id, 16) % cell.model.num_layers if cell.workload.trains else 0


def why_no_keys(device_type: str, scores: int) -> str | None:
    """Return why keys are not compared if a rank needs `scores` scores; None if they are compared."""
    if device_type != "cpu" or scores <= CPU_SCORES:
        return None
    return f"needs {scores:.1e} attention scores per rank; a CPU rank computes at most {CPU_SCORES:.1e}"


FACTS = FullLengthFacts()
