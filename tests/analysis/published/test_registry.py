import copy
import re

import pytest
import yaml

from analysis.published.metrics import METRIC_TABLE
from analysis.published.registry import CLAIMS_FILE, METRICS, read_registry
from analysis.tables.equivalence import PUBLISHED
from bench.config import ConfigError

CONTENT = yaml.load(CLAIMS_FILE.read_bytes(), Loader=yaml.CSafeLoader)
FEW = ("hf-ulysses-oom-128k", "flexsp-a2a-share-ds-sp64")


@pytest.fixture
def read(tmp_path):
    """A registry of two claims, the first with these values in place of its own, as it is read."""

    def read_with(*, patterns=(), claims=FEW, **values):
        few = [copy.deepcopy(claim) for name in claims for claim in CONTENT["claims"] if claim["id"] == name]
        for path, value in values.items():
            section, _, name = path.rpartition("__")
            (few[0][section] if section else few[0])[name] = value
        rules = [{"claims": [*patterns], "field": "seq_len", "why": "a test"}] if patterns else []
        path = tmp_path / "claims.yaml"
        path.write_text(yaml.safe_dump({"claims": few, "read_as": [], "open": rules}))
        return read_registry(path)

    return read_with


def test_every_metric_of_the_registry_is_judged():
    assert METRIC_TABLE.keys() == {*METRICS}


@pytest.mark.parametrize(
    ("path", "value", "field"),
    [
        ("metric", "tokens_per_week", "metric"),
        ("hardware__memory_gb", 0, "hardware.memory_gb"),
        ("colour", "red", "colour"),
    ],
)
def test_a_bad_claim_is_named_with_its_field(read, path, value, field):
    with pytest.raises(ConfigError) as refused:
        read(**{path: value})
    line = str(refused.value)
    assert "hf-ulysses-oom-128k" in line
    assert field in line
    assert "\n" not in line


def test_an_id_given_twice_and_a_pattern_without_claims_are_refused(read):
    with pytest.raises(ConfigError, match="2 claims have this id"):
        read(id=FEW[1])
    with pytest.raises(ConfigError, match=re.escape("hg-*: names no claim")):
        read(patterns=["hg-*"])
    assert read(patterns=["hf-*"]).left_open(FEW[0])


@pytest.mark.parametrize("content", ["claims: [", "claims: {}", ""])
def test_a_file_that_is_no_registry_is_one_line(tmp_path, content):
    path = tmp_path / "claims.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match="no registry of claims") as refused:
        read_registry(path)
    assert "\n" not in str(refused.value)


def test_the_losses_in_the_report_are_those_of_the_registry():
    claimed = {claim.id: float(claim.value) for claim in read_registry().claims}
    kinds = ("trainer", "sft-logged", "sft-nll")
    for kind, (_, mean, most) in zip(kinds, PUBLISHED, strict=True):
        assert float(mean) == claimed[f"hf-ulysses-losseq-{kind}-mean"]
        assert float(most) == claimed[f"hf-ulysses-losseq-{kind}-max"]
