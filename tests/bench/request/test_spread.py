"""What nobody named needs no package that is optional."""

from bench.request.questions import spread
from bench.strategies import STRATEGIES
from tests.cells import FOUR_H100, make_raw

QUESTION = ("model=qwen3_8b", "hardware=h100_80gb", "seq_len=8k", "cluster.world_size=4", "mode=predict")


def test_a_strategy_of_an_optional_package_is_taken_only_where_it_is_named():
    raw = make_raw(*QUESTION)
    taken = {cell.strategy for cell in spread(raw, {}, FOUR_H100)}
    assert taken == {name for name, facts in STRATEGIES.items() if not facts.is_optional}
    named = {cell.strategy for cell in spread(raw, {"strategy": ["yunchang_ring"]}, FOUR_H100)}
    assert named == {"yunchang_ring"}
