"""What the fork server imports and finds out once of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank. And the first
process group asks which operators can be compiled here, by compiling and linking one: 0.15 s per rank.
`join_deepspeed` forgets the answer on a GPU, whose operators are others.
"""

import deepspeed.ops
import deepspeed.runtime.zero.muon.muon_optimizer

COMPATIBLE_OPS = deepspeed.ops.__compatible_ops__

__all__ = ["COMPATIBLE_OPS", "deepspeed"]
