"""What looks at every operator changes nothing of what it looks at."""

import pytest
import torch

from bench.attention.watch import AttentionWatch
from bench.passes.memory.allocations import AllocationTracker
from bench.passes.tap import CommunicationTap

MODES = {"tap": lambda: CommunicationTap(AttentionWatch()), "memory": AllocationTracker}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_compiled_stays_compiled(mode):
    ran = []

    def backend(graph, _):
        return lambda *inputs: ran.append(graph) or graph(*inputs)

    double = torch.compile(lambda x: x * 2, backend=backend)
    with MODES[mode]():
        assert double(torch.ones(3)).sum() == 6
    assert len(ran) == 1
