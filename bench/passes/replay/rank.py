"""What a replayed rank handed to collectives, from the calls that the tap saw in the inspected step."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, cast

import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group

from bench.cost.traffic import Messages
from bench.passes.calls import Call
from bench.passes.rank_pass import RankPass
from bench.passes.replay.section import Replay
from bench.strategies.schedule import Exchange

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import GroupName  # a name that torch had not always


class ReplayPass(RankPass):
    def part(self) -> Replay | None:
        strategy = self.measurement.subject.strategy
        rank = None if strategy is None else strategy.cell.replay.rank
        if rank is None:
            return None
        counts = Counter((call.purpose, exchange_of(call)) for call in self.measurement.tap.calls)
        messages = [Messages(purpose, exchange, count) for (purpose, exchange), count in counts.items()]
        return Replay(rank=rank, messages=messages)


def exchange_of(call: Call) -> Exchange:
    """The call with the size and the stride of its whole group, also of a send or receive."""
    ranks = dist.get_process_group_ranks(_resolve_process_group(cast("GroupName", call.group)))
    moved_bytes = call.received_bytes if call.kind == "recv" else call.sent_bytes
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    return Exchange(call.kind, moved_bytes, len(ranks), stride)


PASS = ReplayPass
