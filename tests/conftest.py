"""One fork server for the whole session, as a sweep has one."""

import pytest

from bench.cell.launcher import Launcher


@pytest.fixture(scope="session")
def launcher():
    server = Launcher()
    server.warm()
    return server
