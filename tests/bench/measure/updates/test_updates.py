"""What ranks say of their shards becomes one section, and its gate names the first thing that is wrong."""

import torch

from bench.measure import PASSES
from bench.measure.facts import RankReport
from bench.measure.updates.rank import CHUNK, digest
from tests.support.cells import make_cell

CELL = make_cell("strategy=ulysses", "cluster.world_size=2")
FACTS = PASSES["updates"]


def rank(shard_index, digests, unmoved=(), not_finite=()):
    return FACTS.part(shard_index=shard_index, digests=digests, unmoved=[*unmoved], not_finite=[*not_finite])


def merged(*ranks):
    cell = make_cell("strategy=ulysses", f"cluster.world_size={len(ranks)}")
    return FACTS.merge([RankReport({"updates": each}, {}) for each in ranks], cell)


def test_equal_replicas_that_moved_are_right_and_counted():
    section = merged(rank(0, {"a": "1", "b": "2"}), rank(0, {"a": "1", "b": "2"}))
    assert (section.shards, section.replicas) == (4, 4)
    assert FACTS.gate(CELL, section) is None
    assert [check.what for check in FACTS.checks(CELL, section)] == [
        "every shard of the parameters", "replicas",
    ]  # fmt: skip


def test_different_shards_are_no_replicas_and_one_that_stayed_as_it_was_is_named_with_its_ranks():
    section = merged(rank(0, {"a": "1"}), rank(1, {"a": "2", "b": "3"}, unmoved=["b"]))
    assert (section.shards, section.replicas, section.unequal, section.unmoved) == (3, 0, {}, {"b": [1]})
    assert FACTS.gate(CELL, section) == "updates: an optimizer step left b as it was on rank 1"
    assert len(FACTS.checks(CELL, section)) == 1


def test_replicas_are_compared_shard_by_shard():
    ranks = [
        rank(shard, {"a": str(shard), "b": own}) for shard, own in ((0, "x"), (1, "y"), (0, "x"), (1, "z"))
    ]
    section = merged(*ranks)
    assert (section.replicas, section.unequal) == (8, {"b": [1, 3]})
    assert FACTS.gate(CELL, section) == "updates: replicas of b differ on ranks 1, 3"


def test_a_number_that_is_not_finite_is_named_before_what_follows_from_it():
    """Nan stays nan, bit by bit, and so it looks unmoved; and the other replica's is another nan."""
    section = merged(rank(0, {"a": "1"}), rank(0, {"a": "2"}, unmoved=["a"], not_finite=["a"]))
    assert FACTS.gate(CELL, section) == "updates: numbers of a are not finite on rank 1"


def test_a_digest_tells_any_other_bit_and_any_other_place():
    values = torch.arange(2 * CHUNK + 3, dtype=torch.float32)
    moved, swapped = values.clone(), values.clone()
    moved[CHUNK] = torch.nextafter(moved[CHUNK], torch.tensor(torch.inf))
    swapped[[1, CHUNK + 1]] = swapped[[CHUNK + 1, 1]]
    assert len({digest(values), digest(moved), digest(swapped)}) == 3
    assert digest(values) == digest(values.clone())
