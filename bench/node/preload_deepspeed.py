"""What the fork server imports of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank. Its Ulysses
takes 65 ms.
"""

from bench.node.optional_import import try_to_import

for _module in ("zero.muon.muon_optimizer", "sequence_parallel.ulysses_sp"):
    try_to_import(f"deepspeed.runtime.{_module}")
