"""Import in the fork server, once, the modules that every rank needs.

Import errors are ignored here. The rank imports the module again and reports the error in its record, whereas
a fork server that ended would report nothing.

These imports must run no tensor operation, or the ranks would hang in OpenMP, and must not touch CUDA, not
even through NVML: the driver does not survive a fork.
"""

import gc
from contextlib import suppress

gc.disable()  # collecting garbage, of which there is none yet, would take a sixth of the time

with suppress(BaseException):
    import deepspeed.runtime.sequence_parallel.ulysses_sp

    # ZeRO imports this module in its first optimizer check, and with it torch's compiler: seconds per rank.
    import deepspeed.runtime.zero.muon.muon_optimizer

with suppress(BaseException):
    import numpy.ma  # numpy's first `unique` would import it
    import torch.profiler
    import transformers.models.llama.modeling_llama
    import transformers.models.qwen2.modeling_qwen2
    import transformers.models.qwen3.modeling_qwen3

    import bench.run.node.worker
    from bench.measure import PASSES, load_pass_class
    from bench.measure.workloads import WORKLOADS, load_workload_class
    from bench.strategies import STRATEGIES
    from bench.training.engines import ENGINE_FACTS, engine_code

    for _name in PASSES:
        load_pass_class(_name)
    for _name in WORKLOADS:
        load_workload_class(_name)
    for _name in ENGINE_FACTS:
        engine_code(_name)
    len(STRATEGIES)  # finds the packages that have strategies, once for all ranks, and imports none of them

# Objects made by imports live for ever. Frozen, they are skipped when a rank collects the list of its live
# tensors, which saves milliseconds.
gc.collect()
gc.freeze()
gc.enable()

__all__ = ["STRATEGIES", "bench", "deepspeed", "numpy", "torch", "transformers"]
