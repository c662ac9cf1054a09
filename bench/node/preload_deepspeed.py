"""What the fork server imports of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank. Its Ulysses
takes 65 ms.
"""

import gc

from bench.node.optional_import import try_to_import

gc.disable()  # until `preload` has imported the rest

MODULES = ("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.runtime.sequence_parallel.ulysses_sp")

all(try_to_import(module) for module in MODULES)  # one that hangs is waited for once
