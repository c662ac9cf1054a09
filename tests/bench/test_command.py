"""The command that goes on is the one that was given, with what has to change."""

from pathlib import Path

import pytest

from bench.command import again_command

GIVEN = ["run_sweep.py", "-m", "seq_len=1k,2k"]


def test_it_resumes_the_folder_of_the_sweep():
    said = again_command(GIVEN, Path("a folder"))
    assert said == "python run_sweep.py -m seq_len=1k,2k resume=true 'sweep_dir=a folder'"


@pytest.mark.parametrize("own", ["measure.repeats=2", "++measure.repeats=auto", "resume=true", "sweep_dir=x"])
def test_what_is_said_anew_stands_once(own):
    said = again_command([*GIVEN, own], Path("out"), "measure.repeats=6")
    assert said == "python run_sweep.py -m seq_len=1k,2k measure.repeats=6 resume=true sweep_dir=out"
