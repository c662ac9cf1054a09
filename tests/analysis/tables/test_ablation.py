"""The table of what each switch saves."""

from analysis.tables.ablation import HEADINGS, NO_SAVING, ablation_rows
from tests.analysis.records import CPU, make_record

MIB = 2**20
BASE = {"checkpointing": False, "tiled_mlp": False, "offload.activations": False, "offload.optimizer": False}
ON = {
    "plain": ({}, 100, 90),
    "checkpointing": ({"checkpointing": True}, 60, 50),
    "tiled MLP": ({"checkpointing": True, "tiled_mlp": True}, 40, 40),
    "activation offload": ({"checkpointing": True, "offload.activations": True}, 61, 50),
    "both": ({"checkpointing": True, "offload.activations": True, "tiled_mlp": True}, 41, 40),
}


def rows(cells_of, experiment="alst_ablation", **config):
    records = [
        make_record(
            config=BASE | switches | config | {"experiment": experiment},
            experiment=experiment,
            memory={
                "peak_allocated_bytes": [peak * MIB] * 2,
                "offloaded_activation_bytes": [7 * MIB] * 2 if "offload.activations" in switches else None,
            },
            analytic={"needed_bytes": needed * MIB},
        )
        for switches, peak, needed in ON.values()
    ]
    return [dict(zip(HEADINGS, row, strict=True)) for row in ablation_rows(cells_of(records))]


def test_each_row_stands_beside_the_one_that_lacks_what_it_adds(cells_of):
    _, second, *_, both = found = rows(cells_of)
    assert [row["adds"] for row in found] == [
        "", "checkpointing", "activation offload", "tiled MLP", "tiled MLP",
    ]  # fmt: skip
    assert second["saves"] == second["by the formula"] == "40.0 MiB"
    assert (both["saves"], both["by the formula"], both["measured / formula"]) == (
        "20.0 MiB", "10.0 MiB", "200.0 %",
    )  # fmt: skip


def test_on_a_cpu_offloading_moves_bytes_and_saves_none(cells_of):
    on_gpu, on_cpu = (
        next(row for row in rows(cells_of, **config) if row["adds"] == "activation offload")
        for config in ({}, CPU)
    )
    assert (on_gpu["saves"], on_cpu["saves"]) == ("-1.0 MiB", NO_SAVING)
    assert on_gpu["moved per step"] == on_cpu["moved per step"] == "7.0 MiB"
    assert on_cpu["by the formula"] == on_cpu["measured / formula"] == ""


def test_other_cells_have_no_such_table(cells_of):
    assert rows(cells_of, experiment="none") == []
