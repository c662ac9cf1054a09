"""Words, folders, files and names of other people are data, and nothing in them runs."""

import re
import sys

import pytest

import run_sweep
from bench.common.environment import REPOSITORY
from bench.config import ConfigError
from bench.plan.stored import read_plan
from bench.run.node.job import LOG_TAIL_BYTES, read_log_tail
from tests.support.command import run_command_here

SOURCES = [
    path
    for root in ("bench", "analysis", "hydra_plugins", "ulysses_ring_bench")
    for path in sorted((REPOSITORY / root).rglob("*.py"))
] + [REPOSITORY / "run_sweep.py"]
RUNS_WHAT_IT_READS = re.compile(
    r"\b(instantiate|allow_pickle|cloudpickle|joblib)\b|trust_remote_code=(?!False)"
    r"|from_pretrained\((?!.*local_files_only=True)"
)
"""Calls that run foreign code and that ruff's security rules (S) do not find."""


def test_sources_run_and_download_no_foreign_code():
    assert [path.name for path in SOURCES if RUNS_WHAT_IT_READS.search(path.read_text())] == []


@pytest.fixture
def refused(tmp_path, monkeypatch):
    """Return a function that runs a command and returns the line with which it is refused."""

    def run_line(*words, **variables):
        monkeypatch.setattr(run_sweep, "run_plan", lambda *_, **__: pytest.fail("a cell would run"))
        done = run_command_here(tmp_path, *words, **variables)
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
def test_words_cannot_name_code_or_other_configurations(refused, tmp_path, word):
    refused(word)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["HF_TOKEN", "aws_secret_access"])
def test_secret_environment_variable_is_refused_without_value(refused, name):
    message = refused("env.NCCL_DEBUG=${oc.env:" + name + "}", "strategy=local", **{name: "hunter2"})
    assert f"{name} may be a secret" in message
    assert "hunter2" not in message


TAGGED = "argv: !!python/object/apply:os.system ['touch ran']\ncells: []\n"


def test_stored_plan_with_a_yaml_tag_is_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(TAGGED)
    with pytest.raises(ConfigError, match="is not the plan of a sweep"):
        read_plan(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_working_folder_provides_no_code_and_no_choices(refused, tmp_path):
    """A command ignores the modules and the conf/ of the folder that it is started in."""
    (tmp_path / "conf" / "strategy").mkdir(parents=True)
    (tmp_path / "conf" / "strategy" / "mine.yaml").write_text("name: local\n")
    (tmp_path / "hydra_plugins").mkdir()
    (tmp_path / "hydra_plugins" / "mine.py").write_text("open('ran', 'w')\n")
    refused("strategy=mine")
    assert str(tmp_path) not in sys.path
    assert not (tmp_path / "ran").exists()


def test_tail_of_reads_only_the_end_of_a_log(tmp_path):
    path = tmp_path / "log"
    with path.open("wb") as file:
        file.truncate(2**40)  # a sparse file, larger than any disk or memory
        file.seek(0, 2)
        file.write(b"the end")
    assert read_log_tail(path).endswith("the end")
    assert len(read_log_tail(path)) == LOG_TAIL_BYTES
