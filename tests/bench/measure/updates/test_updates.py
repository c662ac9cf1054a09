"""The updates pass merges the ranks' shards into a section, and its gate names the first fault."""

import re

import torch

from bench.measure import PASSES
from bench.measure.facts import RankReport
from bench.measure.updates.rank import CHUNK, digest
from tests.support.cells import make_cell

CELL = make_cell("strategy=ulysses", "cluster.world_size=2")
FACTS = PASSES["updates"]


def rank(shard_index, digests, unmoved=(), not_finite=()):
    return FACTS.part_type(
        shard_index=shard_index, digests=digests, unmoved=[*unmoved], not_finite=[*not_finite]
    )


def merged(*ranks):
    cell = make_cell("strategy=ulysses", f"cluster.world_size={len(ranks)}")
    return FACTS.merge([RankReport({"updates": part}, {}) for part in ranks], cell)


def test_equal_replicas_that_changed_pass_and_are_counted():
    section = merged(rank(0, {"a": "1", "b": "2"}), rank(0, {"a": "1", "b": "2"}))
    assert (section.shards, section.replicas) == (4, 4)
    assert FACTS.gate(CELL, section) is None
    assert [check.what for check in FACTS.checks(CELL, section)] == [
        "every shard of the parameters", "replicas",
    ]  # fmt: skip


def test_unchanged_shard_is_named_with_its_ranks():
    """Different shards are not compared as replicas."""
    section = merged(rank(0, {"a": "1"}), rank(1, {"a": "2", "b": "3"}, unmoved=["b"]))
    assert (section.shards, section.replicas, section.unequal, section.unmoved) == (3, 0, {}, {"b": [1]})
    assert re.match("updates: an optimizer step .* b .* on rank 1$", FACTS.gate(CELL, section))
    assert len(FACTS.checks(CELL, section)) == 1


def test_replicas_are_compared_shard_by_shard():
    ranks = [
        rank(shard, {"a": str(shard), "b": digest_of_b})
        for shard, digest_of_b in ((0, "x"), (1, "y"), (0, "x"), (1, "z"))
    ]
    section = merged(*ranks)
    assert (section.replicas, section.unequal) == (8, {"b": [1, 3]})
    assert re.match("updates: replicas of b .* on ranks 1, 3$", FACTS.gate(CELL, section))


def test_not_finite_number_is_named_before_its_consequences():
    """A nan does not change, so that it counts as unmoved, and it differs from the other replica."""
    section = merged(rank(0, {"a": "1"}), rank(0, {"a": "2"}, unmoved=["a"], not_finite=["a"]))
    assert re.match("updates: numbers of a .* not finite on rank 1$", FACTS.gate(CELL, section))


def test_digest_depends_on_every_bit_and_its_place():
    values = torch.arange(2 * CHUNK + 3, dtype=torch.float32)
    changed, swapped = values.clone(), values.clone()
    changed[CHUNK] = torch.nextafter(changed[CHUNK], torch.tensor(torch.inf))
    swapped[[1, CHUNK + 1]] = swapped[[CHUNK + 1, 1]]
    assert len({digest(values), digest(changed), digest(swapped)}) == 3
    assert digest(values) == digest(values.clone())
