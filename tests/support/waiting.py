"""Wait for something that another process does."""

import time


def wait_until(happens, within_s):
    """Return what `happens` returns once that is true; fail if it is not within `within_s` seconds."""
    until_s = time.monotonic() + within_s
    while not (result := happens()):
        assert time.monotonic() < until_s, f"not within {within_s} s"
        time.sleep(0.05)
    return result
