"""Memory that no tensor explains."""

import numpy as np

from tests.support.faults.classes.tampering import replace_attention

NUMBERS = 25 * 2**20
"""Numbers of 8 bytes in the arrays, 200 MiB."""


def fill_an_array_before_building(job):
    np.ones(NUMBERS)


def fill_an_array_in_every_call(job):
    def attention(plain, self, q, k, v, causal):
        np.ones(NUMBERS)
        return plain(self, q, k, v, causal=causal)

    replace_attention(job, attention)
