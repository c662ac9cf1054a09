"""docs/claims.md says what the claims and the cost model give, and the tolerances that are applied."""

import re

from analysis.published import metrics
from analysis.published.bearings import SENTENCES, bearings
from analysis.published.model import CostModel
from analysis.published.opinion import Verdict
from analysis.published.registry import read_registry
from bench.environment import REPOSITORY

PAGE = " ".join((REPOSITORY / "docs" / "claims.md").read_text().split())
ROWS = {
    "speeds": "tokens_per_s", "peak memory": "peak_mem_gb", "ratios of speeds": "speedup",
    "payload bytes": "comm_bytes",
}  # fmt: skip


def test_the_page_has_every_sentence_as_it_is_computed_and_a_sweep_s_those_of_its_claims():
    registry, model = read_registry(), CostModel()
    sentences = bearings(registry, model, SENTENCES)
    assert len(sentences) == 4
    assert [each for each in sentences if each not in PAGE] == []
    assert bearings(registry, model, {"alst", "comm-shares"}) == sentences[-1:]


def test_the_page_has_the_tolerances_and_the_verdicts():
    for row, name in ROWS.items():
        found = re.search(rf"\| {row}[^|]*\| (\d+) % \|", PAGE)
        assert found is not None, row
        assert int(found[1]) == round(100 * metrics.METRIC_TABLE[name].tolerance)
    assert f"{metrics.LEAST_MEMORY_SHARE:.1%}".replace("%", " %") in PAGE
    assert all(f"| `{verdict}` |" in PAGE for verdict in Verdict)
    assert metrics.FURTHER == 1.5
