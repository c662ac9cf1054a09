"""What the fork server imports of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank.
"""

from bench.node.optional_import import try_to_import

try_to_import("deepspeed.runtime.zero.muon.muon_optimizer")
