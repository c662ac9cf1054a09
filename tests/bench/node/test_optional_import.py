"""A package that cannot be imported, or takes long, leaves the importing process as it was."""

import sys
import time

import pytest

from bench.node.optional_import import try_to_import

BROKEN = {
    "an error": "raise RuntimeError('CUDA_HOME is not set')",
    "a missing library": "raise OSError('libcudart.so.12: cannot open shared object file')",
    "a syntax": "x = = 1",
    "an exit": "import sys; sys.exit('no device')",
    "what no handler of exceptions catches": "raise BaseException",
}


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Writes a package of two modules, the first of which imports the second."""

    def write(code):
        folder = tmp_path / "optional_package"
        folder.mkdir()
        (folder / "__init__.py").write_text(f"from optional_package import inner\n{code}")
        (folder / "inner.py").touch()
        return "optional_package.inner"

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    for name in ("optional_package", "optional_package.inner"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("why", BROKEN)
def test_a_broken_package_is_as_if_it_had_never_been_imported(package, why):
    assert not try_to_import(package(BROKEN[why]))
    assert not [name for name in sys.modules if name.startswith("optional_package")]


def test_a_slow_package_is_waited_for_no_longer_than_allowed(package, capfd):
    start = time.monotonic()
    assert not try_to_import(package("import time; time.sleep(60)"), within_s=0.2)
    assert time.monotonic() - start < 10
    assert capfd.readouterr().err.startswith("optional_package: took over 0 s to import")


def test_a_package_that_works_is_imported_and_no_alarm_follows(package):
    assert try_to_import(package(""), within_s=0.2)
    assert "optional_package.inner" in sys.modules
    time.sleep(0.3)
