"""What the fork server imports of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank. Its Ulysses
takes 65 ms. As in `preload`, a rank that needs what cannot be imported says in its record what is wrong.
"""

import gc
from contextlib import suppress

gc.disable()  # until `preload` has imported the rest

with suppress(BaseException):
    import deepspeed.runtime.sequence_parallel.ulysses_sp
    import deepspeed.runtime.zero.muon.muon_optimizer

__all__ = ["deepspeed"]
