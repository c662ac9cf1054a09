"""How fast the attention exchange of a record moved, beside the link between its devices."""

from __future__ import annotations

from collections.abc import Mapping

from analysis.labels import number_label, percent_label
from analysis.read.load import NodeLink, Record

ATTENTION = "attention"
NVLINK = "NVLink"
"""The start of such a link's name, and what a record calls pairs of GPUs that reach one another by it."""
GIGA = 1e9


def exchange_rate(record: Record, links: Mapping[str, NodeLink]) -> str | None:
    """`335 GB/s a rank ..., 74.4 % of NVLink 4 (450 GB/s)`; None where bytes, times or the link are unknown.

    Bytes that left all ranks in a step, over the time in which their exchange was in flight and all ranks
    that had to meet were there: the mean rank's rate in one direction. Across hosts waiting is not known, so
    what there is is of one node.
    """
    link = links.get(str(record["config"].get("hardware")))
    if link is None or not _has_link(record, link):
        return None
    trace = record.get("trace") or {}
    sent = ((record.get("engagement") or {}).get("sent_bytes") or {}).get(ATTENTION)
    total_ms, waiting_ms = (
        (trace.get(f"purpose_{what}_ms") or {}).get(ATTENTION) for what in ("total", "waiting")
    )
    if not sent or not total_ms or not waiting_ms or sum(total_ms) <= sum(waiting_ms):
        return None
    bytes_per_s = sum(sent) / (sum(total_ms) - sum(waiting_ms)) * 1e3
    rate, best = (number_label(each / GIGA) for each in (bytes_per_s, link.bytes_per_s))
    share = percent_label(bytes_per_s / link.bytes_per_s)
    return f"{rate} GB/s a rank while in flight, waiting left out; {share} of {link.name} ({best} GB/s)"


def _has_link(record: Record, link: NodeLink) -> bool:
    """Whether ranks have a device each, and NVLink, where that is the hardware's link, joins all of them."""
    if (record["config"].get("cluster.ranks_per_gpu") or 1) > 1:
        return False
    pairs = (record.get("environment") or {}).get("gpu_p2p") or {}
    return not link.name.startswith(NVLINK) or set(pairs.values()) == {NVLINK}
