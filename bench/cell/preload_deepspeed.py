"""What the fork server imports of DeepSpeed, where a cell of the plan needs it.

ZeRO's first optimizer check imports Muon, and with it torch's whole compiler: seconds per rank.
"""

import deepspeed.runtime.zero.muon.muon_optimizer

__all__ = ["deepspeed"]
