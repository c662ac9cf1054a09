"""What is compiled once is compiled for one environment, and nobody waits for the dead."""

import os

import pytest

from bench.cell.compile_cache import VARIABLE, is_held, settle_extensions


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    (tmp_path / "an_operator").mkdir()
    return tmp_path / "an_operator"


def test_a_lock_that_nobody_holds_is_removed(folder):
    (folder / "lock").touch()
    (folder / "operator.so").touch()
    settle_extensions()
    assert [path.name for path in folder.iterdir()] == ["operator.so"]


def test_a_lock_that_somebody_holds_stays(folder):
    held = os.open(folder / "lock", os.O_CREAT | os.O_EXCL)
    try:
        assert is_held(folder / "lock")
        settle_extensions()
        assert (folder / "lock").exists()
    finally:
        os.close(held)


def test_a_lock_that_somebody_holds_stays_under_whatever_name_its_folder_has(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("folder")
    monkeypatch.setenv(VARIABLE, str(tmp_path / "link"))
    held = os.open(tmp_path / "folder" / "lock", os.O_CREAT | os.O_EXCL)
    try:
        settle_extensions()
        assert (tmp_path / "folder" / "lock").exists()
    finally:
        os.close(held)


def test_a_lock_that_was_taken_while_we_looked_stays(folder, monkeypatch):
    lock = folder / "lock"
    lock.touch()

    def is_held_no_longer(_):
        lock.unlink()
        lock.touch()
        return False

    monkeypatch.setattr("bench.cell.compile_cache.is_held", is_held_no_longer)
    settle_extensions()
    assert lock.exists()


def test_each_environment_has_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = set()
    for prefix in ("/one", "/other"):
        monkeypatch.delenv(VARIABLE, raising=False)
        monkeypatch.setattr("sys.prefix", prefix)
        settle_extensions()
        found.add(os.environ[VARIABLE])
    assert len(found) == 2
    assert all(each.startswith(str(tmp_path)) for each in found)


def test_a_folder_that_the_user_names_is_kept(folder):
    settle_extensions()
    assert os.environ[VARIABLE] == str(folder.parent)
