"""What the fork server imports once, so that no rank has to; last in its list, as it ends with `gc.freeze`.

`Launcher` puts packages that only some cells need before this module. What cannot be imported is imported
again by the ranks, whose records say what is wrong with it: a server that ended would say nothing.
"""

import gc
from contextlib import suppress

gc.disable()  # there is no garbage yet: to search for it would take a sixth of the time

with suppress(BaseException):
    import bench.node.preloaded

# What imports made lives for ever. Frozen, it is skipped when a rank looks for its tensors: milliseconds.
gc.collect()
gc.freeze()
gc.enable()

__all__ = ["bench"]
