"""Records with different code, torch or device are not compared unless --mix names the difference."""

import pytest

from analysis import report
from analysis.answers.provenance import origin_lines
from analysis.cells.cells import Cells
from analysis.cells.equivalence import loss_comparisons
from analysis.read.archive import read_archive
from tests.support.records import make_record, write_sweep

HERE = {
    "device_name": "NVIDIA H100 80GB HBM3",
    "packages": {"torch": "2.13.0"},
    "git_commit": "a" * 40,
    "sources": "b" * 12,
}
OTHER = {
    "code": HERE | {"git_commit": "c" * 40},
    "torch": HERE | {"packages": {"torch": "2.12.0"}},
    "device": HERE | {"device_name": "NVIDIA H200"},
}
NAMED = {"code": "code aaaaaaa-bbbbbb", "torch": "torch 2.13.0", "device": "NVIDIA H100 80GB HBM3"}


def archive_of(folder, records):
    return read_archive([write_sweep(folder, records)], {})


@pytest.mark.parametrize("kind", OTHER)
def test_series_and_speed_ups_keep_origins_apart(tmp_path, kind):
    ulysses = [make_record(environment=each, repeat=at) for at, each in enumerate((HERE, OTHER[kind]))]
    records = [make_record(config={"strategy": "local"}, environment=OTHER[kind]), *ulysses]
    archive = archive_of(tmp_path, records)
    apart, together = (Cells.of_records(each.frame) for each in (archive, archive.with_equal_origins([kind])))
    rows = apart.frame[apart.frame["strategy"] == "ulysses"]
    assert rows["repeats"].tolist() == [1, 1]
    assert sorted(rows["speed_up"].notna()) == [False, True]
    assert any(NAMED[kind] in name for name in apart.names)
    row = together.frame[together.frame["strategy"] == "ulysses"].iloc[0]
    assert (row["repeats"], row["speed_up"] > 0) == (2, True)


def test_trainings_with_different_torch_are_not_compared(tmp_path):
    losses = {"loss": [5.0, 4.0], "grad_norm": [1.0, 1.0]}
    trainings = [
        make_record(
            experiment="loss_equivalence", role=role, losses=losses, environment=environment, repeat=at,
            config={"seed": 0, "layout": f"{number}"},
        )
        for at, environment in enumerate((HERE, OTHER["torch"]))
        for number, role in enumerate(("reference", "cell"))
    ]  # fmt: skip
    archive = archive_of(tmp_path, trainings)
    found = loss_comparisons(archive)
    assert [each.name.partition("torch=")[2] for each in found] == ["2.13.0", "2.12.0"]
    assert len(loss_comparisons(archive.with_equal_origins(["torch"]))) == 1


@pytest.mark.usefixtures("without_figures")
def test_origin_lines_and_mix_in_the_report(tmp_path, capsys):
    old = [
        make_record(environment=OTHER["code"]),
        make_record(environment=OTHER["code"], config={"batch": 2}),
    ]
    folder = write_sweep(tmp_path, [*old, make_record(environment=HERE)])
    archive = read_archive([folder], {})
    apart, left_out = origin_lines(archive, archive.frame, ())
    assert "made with 2 versions of code (aaaaaaa-bbbbbb, ccccccc-bbbbbb)" in apart
    assert "analysis.report --mix code compares them" in apart
    assert report.main([str(folder), "--mix", "code"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    together = "These count as equal because of --mix: code aaaaaaa-bbbbbb and ccccccc-bbbbbb."
    assert left_out == "Left out: 1 earlier record of cells that ran again (1 with other code)."
    for text in (said, (folder / "report.html").read_text()):
        assert together in text
        assert left_out in text


LEFT_OUT = {
    "with other torch": {"environment": OTHER["torch"]},
    "failed or interrupted": {"status": "crashed", "environment": OTHER["code"]},
    "duplicated": {"environment": HERE},
}


@pytest.mark.parametrize("why", LEFT_OUT)
def test_last_record_of_a_cell_that_ran_again_counts(tmp_path, why):
    before, after = make_record(**LEFT_OUT[why], wall_s=1.0), make_record(environment=HERE, wall_s=2.0)
    archive = archive_of(tmp_path, [before, after])
    assert archive.frame["wall_s"].tolist() == [archive.record(0).wall_s] == [2.0]
    assert archive.left_out == {why: 1}
