"""What strangers may have written: words, folders, files and names are data, and nothing in them runs."""

import re
import sys

import pytest

import run_sweep
from bench.common.environment import REPOSITORY
from bench.config import ConfigError
from bench.plan.stored import read_plan
from bench.run.node.job import LOG_TAIL_BYTES, tail_of
from tests.support.command import typed_here

SOURCES = [
    path
    for root in ("bench", "analysis", "hydra_plugins", "ulysses_ring_bench")
    for path in sorted((REPOSITORY / root).rglob("*.py"))
] + [REPOSITORY / "run_sweep.py"]
RUNS_WHAT_IT_READS = re.compile(
    r"\b(instantiate|allow_pickle|cloudpickle|joblib)\b|trust_remote_code=(?!False)"
    r"|from_pretrained\((?!.*local_files_only=True)"
)
"""What ruff does not know; its rules on security (S) hold pickles, shells, `eval` and YAML's tags."""


def test_no_code_of_ours_runs_or_downloads_what_somebody_else_wrote():
    assert [path.name for path in SOURCES if RUNS_WHAT_IT_READS.search(path.read_text())] == []


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """The one line that a command says instead of running."""

    def run_line(*words, **variables):
        monkeypatch.setattr(run_sweep, "run_plan", lambda *_, **__: pytest.fail("a cell would run"))
        done = typed_here(tmp_path, *words, **variables)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        return done.stderr

    return run_line


TARGETS = (
    "+strategy._target_=os.system",
    "++model._target_=builtins.eval",
    "+hydra.callbacks.a._target_=os.system",
    "hydra.searchpath=[file:///tmp]",
)


@pytest.mark.parametrize("word", TARGETS)
def test_no_word_names_code_another_configuration_or_a_file_outside(refused, tmp_path, word):
    refused(word)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access"])
def test_a_secret_of_the_environment_gets_into_no_cell_and_no_message(refused, name):
    said = refused("env.NCCL_DEBUG=${oc.env:" + name + "}", "strategy=local", **{name: "hunter2"})
    assert f"{name} may be a secret" in said
    assert "hunter2" not in said


TAGGED = "argv: !!python/object/apply:os.system ['touch ran']\ncells: []\n"


def test_a_folder_s_yaml_names_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(TAGGED)
    with pytest.raises(ConfigError, match="is no sweep's plan"):
        read_plan(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_folder_is_no_place_that_code_or_choices_are_read_from(refused, tmp_path):
    """A results folder that a command is started in: neither its modules nor its conf/ count."""
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text("name: local\n")
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "mine.py").write_text("open('ran', 'w')\n")
    refused("strategy=mine")
    assert str(tmp_path) not in sys.path
    assert not (tmp_path / "ran").exists()


def test_of_a_log_only_the_end_is_read(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(2**40)  # a hole: no disk holds as much, and no memory
        file.seek(0, 2)
        file.write(b"the end")
    assert tail_of(path).endswith("the end")
    assert len(tail_of(path)) == LOG_TAIL_BYTES
