"""What crossed the network between nodes: the table and its sentences."""

from analysis.answers.node_traffic import node_traffic_lines
from analysis.tables.node_traffic import SHORT_HEADINGS, node_traffic_rows
from tests.analysis.records import FAILED, make_record, make_timing

MIB = 2**20
ON_NODES = {"cluster": "nodes", "cluster.nodes": 2, "cluster.world_size": 4, "sp_degree": 4}
LEFT = {"ulysses": 4, "usp, ulysses inner": 3, "usp, ring inner": 1}
"""MiB of attention that leave a node."""


def crossed(name, network="1gbit", step_ms=100.0, length=8192, **config):
    strategy, _, inner = name.partition(", ")
    placed = {"strategy.inner": inner.split()[0]} if inner else {}
    left = {"attention": LEFT[name] * MIB, "gradients": MIB // 2, "parameters": MIB // 2}
    return make_record(
        config={
            **ON_NODES,
            "strategy": strategy,
            "seq_len": length,
            "cluster.network": network,
            **placed,
            **config,
        },
        timing=make_timing([[step_ms] * 8] * 4, length),
        analytic={"node_payload_bytes": left},
    )


def test_the_table_has_a_row_for_each_cell_that_sent_between_nodes(cells_of):
    alone = make_record(config={"cluster.nodes": 1})
    failed = crossed("usp, ring inner", length=16384) | {"status": "killed", "reason": "lost a node"} | FAILED
    rows = node_traffic_rows(cells_of([crossed("ulysses", step_ms=419.4304), alone, failed]))
    assert [dict(zip(SHORT_HEADINGS, row, strict=True)) for row in rows] == [
        {"strategy": "ulysses", "length": "8k", "nodes": "2 x 2", "network": "1gbit", "attention": "4.0 MiB",
         "rest": "1.0 MiB", "step ms": "419", "rate": "100 Mb/s"},
    ]  # fmt: skip


def test_where_every_cell_ran_on_one_node_there_is_neither_table_nor_sentence(cells_of):
    cells = cells_of([make_record(config={"cluster.nodes": 1}), make_record(config={"strategy": "ring"})])
    assert (node_traffic_rows(cells), node_traffic_lines(cells)) == ([], [])


def test_sweeps_over_several_networks_are_series_of_their_own_and_one_sentence(cells_of):
    cells = cells_of([crossed(name, network) for network in ("100mbit", "1gbit") for name in LEFT])
    assert {series.label for series in cells.series} == {
        f"{name}, {network}{inner}"
        for network in ("100mbit", "1gbit")
        for name, inner in (("ulysses", ""), ("usp", ", ulysses inner"), ("usp", ", ring inner"))
    }
    assert {row[0] for row in node_traffic_rows(cells)} == {*LEFT}
    (line,) = node_traffic_lines(cells)
    assert line == (
        "Over the slow link at 8k on 2 nodes of 2 ranks: least leaves a node with usp, ring inner, 2.0 MiB a"
        " step (50.0 % of it attention's), most with ulysses, 5.0 MiB, 2.50 times as much."
    )


def test_the_sentence_is_of_the_longest_length_and_says_what_all_that_it_compares_have_in_common(cells_of):
    heads = {"model.num_heads": 16}, {"model.num_heads": 4}
    records = [
        crossed(name, length=length, **each) for each in heads for length in (4096, 8192) for name in LEFT
    ]
    lines = node_traffic_lines(cells_of(records))
    assert [line.partition(" on 2")[0] for line in lines] == [
        f"Over the slow link at 8k, model.num_heads={number}" for number in (16, 4)
    ]
    assert all("least leaves a node with usp, ring inner, 2.0 MiB" in line for line in lines)
