"""What a call of an implementation takes, beside what others left behind."""

import threading
import time

import torch

from bench.compare_implementations.turns import PEAKS, SETTLE_S


def test_buffers_that_a_library_lets_go_of_a_moment_later_are_not_taken_from_a_calls_memory():
    kept = [torch.empty(2**20, dtype=torch.uint8)]

    def call():
        time.sleep(SETTLE_S)
        return torch.empty(2**18, dtype=torch.uint8).zero_()

    threading.Timer(SETTLE_S / 2, kept.clear).start()
    assert PEAKS["cpu"](call) == 2**18
