"""Progress bars of packages in rank processes."""

from __future__ import annotations

import threading


def use_thread_lock() -> None:
    """Give tqdm a lock of this process, before a package shows a progress bar.

    By default tqdm creates a semaphore for all processes. A rank that ends by `os._exit` would leave it
    behind, and Python would warn of leaked semaphores at the end of the sweep.
    """
    from tqdm import tqdm

    tqdm.set_lock(threading.RLock())
