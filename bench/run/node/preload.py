"""What the fork server imports once, so that no rank has to.

What cannot be imported is imported again by the ranks, whose records say what is wrong with it: a server that
ended would say nothing.

Importing runs no tensor operation, or the ranks would hang in OpenMP. Nor does it touch CUDA, even through
NVML: a driver does not survive a fork.
"""

import gc
from contextlib import suppress

gc.disable()  # there is no garbage yet: to search for it would take a sixth of the time

with suppress(BaseException):
    import deepspeed.runtime.sequence_parallel.ulysses_sp

    # ZeRO's first optimizer check imports it, and with it torch's whole compiler: seconds per rank.
    import deepspeed.runtime.zero.muon.muon_optimizer

with suppress(BaseException):
    import numpy.ma  # with numpy's first `unique`
    import torch.profiler
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3

    import bench.run.node.worker
    from bench.measure import PASSES, rank_code
    from bench.measure.workloads import WORKLOADS, workload_code
    from bench.strategies import STRATEGIES
    from bench.training.engines import ENGINE_FACTS, engine_code

    for _name in PASSES:
        rank_code(_name)
    for _name in WORKLOADS:
        workload_code(_name)
    for _name in ENGINE_FACTS:
        engine_code(_name)
    len(STRATEGIES)  # reads once for all ranks which packages have strategies; imports none of them

# What imports made lives for ever. Frozen, it is skipped when a rank looks for its tensors: milliseconds.
gc.collect()
gc.freeze()
gc.enable()

__all__ = ["STRATEGIES", "bench", "deepspeed", "numpy", "torch", "transformers"]
