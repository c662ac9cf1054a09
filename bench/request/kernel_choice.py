"""The kernel of `kernel=auto`, the reason for it, and the check that it must pass."""

from __future__ import annotations

from bench.attention.kernel_facts import CUDNN, CUDNN_CAPABILITIES, DEFAULT_KERNEL, KERNEL_FACTS
from bench.common.environment import Machine
from bench.config import Cell
from bench.record.record import Record, Status
from bench.request.hardware import compute_capability
from bench.request.modes import PREDICT


def kernel_choice(cell: Cell, machine: Machine) -> tuple[str, str]:
    """Return the kernel for a cell, whatever its strategy, and the reason as the end of a sentence."""
    if cell.cluster.device == "cpu":
        return DEFAULT_KERNEL, "the flash attention that torch has for CPUs"
    facts, capability = KERNEL_FACTS[CUDNN], compute_capability(cell, machine)
    refusals = (
        (
            capability is None or int(capability) not in CUDNN_CAPABILITIES,
            f"{CUDNN} is chosen on compute capability 9 and 10, and here it is {capability or 'unknown'}",
        ),
        (cell.dtype not in facts.dtypes["cuda"], f"{CUDNN} has no dtype={cell.dtype}"),
        (
            not facts.takes_heads_of(cell),
            f"{CUDNN} takes heads up to {facts.max_head_dim}, and model.head_dim={cell.model.head_dim}",
        ),
        (cell.data.packs, f"{CUDNN} would compute one document after another"),
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
    if record.parity is not None:
        return ""
    failed = record.status in (Status.ERROR, Status.CRASHED, Status.WRONG_RESULT)
    failed = failed and record.failure is not None and record.failure.phase == "parity"
    return record.reason if failed else None
