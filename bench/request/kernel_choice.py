"""The kernel of `kernel=auto`, the reason for it, and the check that it must pass."""

from __future__ import annotations

from bench.attention.kernel_facts import CUDNN, CUDNN_CAPABILITIES, DEFAULT_KERNEL, KERNEL_FACTS
from bench.common.environment import Machine
from bench.config import Cell
from bench.ranks.log import JOIN
from bench.record.record import Record, Status
from bench.request.hardware import compute_capability
from bench.request.modes import PREDICT
from bench.training.trainer_facts import is_stack

UP_TO_PARITY = (None, JOIN, "strategy", "limit", "build", "parity")
"""Phases of a rank up to its parity check."""


def kernel_choice(cell: Cell, machine: Machine) -> tuple[str, str]:
    """Return the kernel for a cell, whatever its strategy, and the reason as the end of a sentence."""
    if cell.cluster.device == "cpu":
        return DEFAULT_KERNEL, "the flash attention that torch has for CPUs"
    facts, capability = KERNEL_FACTS[CUDNN], compute_capability(cell, machine)
    on, documents = ", ".join(map(str, CUDNN_CAPABILITIES)), cell.data.packs and not is_stack(cell.trainer)
    refusals = (
        (
            capability not in CUDNN_CAPABILITIES,
            f"{CUDNN} is chosen on compute capability {on}, and here it is {capability or 'unknown'}",
        ),
        (
            cell.dtype not in facts.dtypes["cuda"],
            f"no fused kernel has dtype={cell.dtype} on a GPU, kernel=math has",
        ),
        (not facts.takes_heads_of(cell), f"{CUDNN} does not take model.head_dim={cell.model.head_dim}"),
        (documents, f"{CUDNN} would compute one document after another"),
        (machine.cudnn_fault is not None and cell.mode != PREDICT, machine.cudnn_fault),
    )
    for applies, reason in refusals:
        if applies:
            return DEFAULT_KERNEL, f"FlashAttention-2; {reason}"
    return CUDNN, f"the first choice of torch's scaled_dot_product_attention on capability {capability}"


def parity_fault(record: Record) -> str | None:
    """Return why the parity check of a cell on cuDNN failed; empty if it passed, None if none was made."""
    if record.config["kernel"] != CUDNN:
        return None
    failure = record.failure
    if record.parity is not None or (failure is not None and failure.phase not in UP_TO_PARITY):
        return ""
    failed = record.status in (Status.ERROR, Status.CRASHED, Status.WRONG_RESULT)
    return record.reason if failed and failure is not None and failure.phase == "parity" else None
