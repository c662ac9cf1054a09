"""What strangers may have written: words, folders, files and names are data, and nothing in them runs."""

import ast
import re
import sys

import pytest

import run_sweep
from bench.config import ConfigError
from bench.environment import REPOSITORY
from bench.node.rank_files import LOG_TAIL_BYTES, tail_of
from bench.request.hardware import calibrated_facts
from bench.sweep.resume import read_plan
from tests.command import typed_here

SOURCES = [
    path
    for root in ("bench", "analysis", "hydra_plugins", "ulysses_ring_bench")
    for path in sorted((REPOSITORY / root).rglob("*.py"))
] + [REPOSITORY / "run_sweep.py"]
RUNS_FILES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
"""Modules whose loading runs what a file says."""
RUNS_WORDS = {"instantiate", "eval", "exec", "system", "popen", "getoutput", "getstatusoutput"}
"""Calls that make code of words."""
OTHERS = ("shell", "yaml", "torch.load", "allow_pickle", "trust_remote_code", "from_pretrained")
PERHAPS = re.compile("|".join([*RUNS_FILES, *RUNS_WORDS, *OTHERS]))
"""In every module that could have such a call."""
SAFE_LOADERS = {"SAFE_LOADER", "_Loader", "CSafeLoader", "SafeLoader"}


def called(node):
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def last_name(node):
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def keyword(node, name):
    return next((each.value for each in node.keywords if each.arg == name), None)


def flaws_of_call(node):
    name, owner = called(node), last_name(getattr(node.func, "value", None))
    loader = node.args[1] if len(node.args) > 1 else keyword(node, "Loader")
    shell, trust, local = (keyword(node, key) for key in ("shell", "trust_remote_code", "local_files_only"))
    found = {
        "runs words": name in RUNS_WORDS,
        "loads YAML with its tags": owner == "yaml"
        and name in ("load", "load_all", "unsafe_load", "full_load")
        and last_name(loader) not in SAFE_LOADERS,
        "loads a pickle": (owner == "torch" and name == "load") or keyword(node, "allow_pickle") is not None,
        "asks a shell": shell is not None,
        "trusts remote code": trust is not None and getattr(trust, "value", None) is not False,
        "may download": name == "from_pretrained" and getattr(local, "value", None) is not True,
    }
    return [what for what, is_wrong in found.items() if is_wrong]


def flaws(path, text):
    """Every place of a module that would run what somebody else wrote, as `file:line: what`."""
    for node in ast.walk(ast.parse(text)):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found = ["imports a module that runs files" for name in names if name.split(".")[0] in RUNS_FILES]
        found += flaws_of_call(node) if isinstance(node, ast.Call) else []
        yield from (f"{path}:{node.lineno}: {what}" for what in found)


def test_no_code_of_ours_runs_what_somebody_else_wrote():
    texts = {path.relative_to(REPOSITORY).as_posix(): path.read_text() for path in SOURCES}
    asked = {path: text for path, text in texts.items() if PERHAPS.search(text)}  # reading all takes a second
    assert [each for path, text in asked.items() for each in flaws(path, text)] == []


FLAWED = {
    "hydra.utils.instantiate(config)": "runs words",
    "os.system(word)": "runs words",
    "subprocess.run(word, shell=True)": "asks a shell",
    "yaml.load(text, yaml.Loader)": "loads YAML with its tags",
    "torch.load(path)": "loads a pickle",
    "AutoModel.from_pretrained(name)": "may download",
    "AutoModel.from_pretrained(name, local_files_only=True, trust_remote_code=flag)": "trusts remote code",
    "import pickle": "imports a module that runs files",
}


@pytest.mark.parametrize("line", FLAWED)
def test_such_code_would_be_found(line):
    assert PERHAPS.search(line)
    assert [*flaws("x.py", line)] == [f"x.py:1: {FLAWED[line]}"]


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
    "--config-dir=/tmp",
    "strategy=../../tmp/x",
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


TAGGED = "argv: !!python/object/apply:os.system ['touch ran']\ncells: []\ncalibrated: 1\n"


def test_a_folder_s_yaml_names_no_code(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(TAGGED)
    with pytest.raises(ConfigError, match="is no sweep's plan"):
        read_plan(tmp_path)
    with pytest.raises(ConfigError, match="cannot be read"):
        calibrated_facts(str(tmp_path / "config.yaml"))
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
