"""A GPU's trace read a second time, by nothing of ours: one sweep over the times at which anything changes.

It takes a file as it is, whole, and knows no ranks, calls, launches or parts.
"""

import gzip
import json
from collections import Counter
from itertools import pairwise

COPIES = ("gpu_memcpy", "gpu_memset")


def class_of(event):
    """What a device event is; None of one that is on no device."""
    if event.get("ph") != "X" or event.get("cat") not in ("kernel", *COPIES):
        return None
    if event["cat"] in COPIES:
        return "copies"
    return "communication" if event["name"].startswith("nccl") else "compute"


def second_reading(path):
    """Milliseconds in which the device was busy, computed, communicated, did so exposed, and only copied."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        events = json.load(file)["traceEvents"]
    changes = []
    for event in events:
        name = class_of(event)
        if name is not None:
            changes += [(event["ts"], name, 1), (event["ts"] + event["dur"], name, -1)]
    running, totals = Counter(), Counter()
    for (time, name, change), (until, *_) in pairwise(sorted(changes)):
        running[name] += change
        on = {name for name, count in running.items() if count}
        for what, is_so in {
            "busy": bool(on),
            "compute": "compute" in on,
            "communication": "communication" in on,
            "exposed": "communication" in on and "compute" not in on,
            "copies": on == {"copies"},
        }.items():
            totals[what] += (until - time) / 1e3 if is_so else 0.0
    return dict(totals)
