"""What pyproject.toml cannot say: a wheel holds one folder, `ulysses_ring_bench`, and everything else in it.

An editable install leaves everything where it is.
"""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

FOLDER = "ulysses_ring_bench"


class BuildInOneFolder(build_py):
    """Copies the files as setuptools does, then moves them."""

    def run(self) -> None:
        """Setuptools' own step, and ours after it."""
        built = Path(self.build_lib)
        if not self.editable_mode:
            shutil.rmtree(built, ignore_errors=True)  # an earlier build may have left other files
        super().run()
        if not self.editable_mode:
            for path in [*built.iterdir()]:
                if path.name != FOLDER:
                    path.rename(built / FOLDER / path.name)


setup(cmdclass={"build_py": BuildInOneFolder})
