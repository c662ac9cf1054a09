"""The peak of one rank's forward and backward by torch's own tracker, on tensors without numbers.

Each argument holds the words of a cell of FSDP2 on four ranks; a line for each has the peak and what the
formula says, in bytes. No optimizer runs: its moments are left out of both.
"""

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.cost.memory import memory_need
from bench.ranks.groups import make_groups
from bench.ranks.log import StepPhase
from bench.strategies import STRATEGIES, load_strategy_class
from bench.training.engines.fsdp2.engine import FSDP2
from bench.training.loss import ModelWithLoss
from bench.training.models import empty_model
from bench.training.parameters import parameters
from tests.support.cells import make_cell

RANKS, WIDE_BYTES, MOMENTS = 4, 4, 2


def main():
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    for words in sys.argv[1:]:
        print(*both(make_cell("engine=fsdp2", f"cluster.world_size={RANKS}", *words.split())))


def both(cell):
    """The tracker's peak and the formula's."""
    groups = make_groups(cell)  # a mesh is made of real numbers
    strategy = load_strategy_class(cell.strategy)(cell, groups, STRATEGIES[cell.strategy])
    need = memory_need(cell)
    moments = MOMENTS * WIDE_BYTES * parameters(cell.model) // cell.cluster.world_size
    return peak_bytes(cell, groups, strategy), need.allocated_bytes - moments


def fill(model):
    """Take fake tensors of a CPU in place of those of the meta device; tied weights stay one."""
    made = {}
    for module in model.modules():
        for held in (module._parameters, module._buffers):
            for name, tensor in held.items():
                if tensor is not None and id(tensor) not in made:
                    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                    is_parameter = isinstance(tensor, nn.Parameter)
                    made[id(tensor)] = nn.Parameter(empty) if is_parameter else empty
                held[name] = None if tensor is None else made[id(tensor)]


def peak_bytes(cell, groups, strategy):
    """Return the peak bytes of tensors in a step with sharded weights."""
    with FakeTensorMode(allow_non_fake_inputs=True), strategy.install() as wiring:
        model = empty_model(cell.model, attention_name=wiring.attention_name, max_positions=cell.seq_len)
        fill(model)
        if cell.checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()
        whole = ModelWithLoss(model, cell.loss, StepPhase())
        engine = FSDP2(whole, [*model.model.layers], cell, groups, torch.device("cpu"))
        ids = torch.zeros(1, cell.shard_len, dtype=torch.long)
        positions = torch.arange(cell.shard_len)[None]
        tracker = MemTracker()
        tracker.track_external(whole)
        with tracker:
            engine.module(ids, ids, positions).backward()
        peak = tracker.get_tracker_snapshot("peak")
    return max(each["Total"] for each in peak.values())


if __name__ == "__main__":
    main()
