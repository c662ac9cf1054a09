"""Random command lines become a cell or a refusal in one line, and nothing else."""

import contextlib

import pytest
from hydra.errors import HydraException
from hypothesis import given
from hypothesis import strategies as st
from omegaconf.errors import OmegaConfBaseException

from bench.config import Cell, ConfigError
from bench.plan.stored import complete_request
from bench.request.choices import groups
from bench.request.command_line import hydra_arguments
from bench.request.composition import compose_words
from bench.request.hydra_errors import translate_error
from bench.request.legality import refusal
from bench.request.resolve import all_keys, resolve
from tests.support.cells import TWO_CORES, make_raw, raw_with
from tests.support.fuzzing import VALUES, few_and_many, fuzz

GROUPS = {*groups(), "offload"}
"""Keys with keys below them, which a word cannot replace."""
KEYS = sorted(
    {key for key in all_keys() if not key.startswith(("model.", "strategy.")) and key not in GROUPS}
)
TYPED = st.sampled_from([*KEYS, *groups(), "env.A", "hydra.run.dir", "_target_", "model._target_"])
ODD = (
    "8k", "1,2", "[1,2]", "{a:1}", "null", "${seq_len}", "${oc.env:HOME}", "range(1,10)", "glob(*)", "'", '"',
    "1e400", "-1", "auto", "9" * 5000, "choice(a,b)", "\\", "=", "a\nb", "\x00", "${", "../x",
    "!!python/name:os", "[" * 2000 + "]" * 2000, "1k," * 500 + "2k",
)  # fmt: skip
VALUE = st.text(max_size=12) | st.sampled_from(ODD)
WORD = st.text(max_size=15) | st.builds("{}{}={}".format, st.sampled_from(["", "+", "++", "~"]), TYPED, VALUE)


def one_line(message):
    assert message.strip()
    assert len(message.splitlines()) == 1, message


@contextlib.contextmanager
def refused_in_one_line():
    """Check the messages of errors as the command prints them: ours unchanged, Hydra's translated."""
    try:
        yield
    except ConfigError as error:
        one_line(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        one_line(translate_error(error))


@few_and_many()
def test_random_words_are_parsed_or_refused_in_one_line(examples):
    @given(st.lists(WORD, min_size=1, max_size=3), st.booleans())
    def check(words, is_sweep):
        with refused_in_one_line():
            hydra_arguments(complete_request([*(["-m"] if is_sweep else []), *words]))

    fuzz(examples, check)


@few_and_many({"few": 8, "many": 150})
def test_random_word_is_a_cell_or_a_refusal_in_one_line(examples):
    @given(WORD)
    def check(word):
        with refused_in_one_line():
            words = hydra_arguments([word])
            if words[:1] and words[0].startswith("-"):
                return
            assert isinstance(resolve(compose_words(*words), TWO_CORES), Cell)

    fuzz(examples, check)


@few_and_many({"few": 60, "many": 1500})
def test_random_value_is_a_cell_or_a_refusal_in_one_line(examples):
    make_raw()

    @given(st.dictionaries(st.sampled_from(KEYS), VALUES, min_size=1, max_size=2))
    def check(changed):
        with refused_in_one_line():
            cell = resolve(raw_with(changed), TWO_CORES)
            assert cell == Cell.from_flat(cell.flat())
            message = refusal(cell)
            if message is not None:
                one_line(message)

    fuzz(examples, check)


def test_valid_word_is_a_cell():
    """Without this test the others could pass by refusing everything."""
    assert resolve(compose_words(*hydra_arguments(["seq_len=4k"])), TWO_CORES).seq_len == 4096
    with pytest.raises(ConfigError):
        hydra_arguments(["--config-dir=/"])
