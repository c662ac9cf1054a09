"""One question, asked once."""

import pytest

from tests.analysis.advice.asked import QUESTION, asked


@pytest.fixture(scope="session")
def advice():
    return asked(*QUESTION)
