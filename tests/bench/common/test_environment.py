"""What counts as the code of a cell: every source of `bench/`, and the figures for predictions."""

from bench.common.environment import digest_of


def test_an_edit_a_new_module_and_one_that_is_moved_count(tmp_path):
    hardware, module = tmp_path / "conf" / "hardware" / "h100.yaml", tmp_path / "bench" / "cell" / "run.py"
    for path in (hardware, module):
        path.parent.mkdir(parents=True)
        path.write_text("a = 1")
    found = [digest_of(tmp_path)]
    for change in (
        lambda: hardware.write_text("b = 2"),
        lambda: module.write_text("c = 3"),
        lambda: module.with_name("new.py").touch(),
        lambda: module.rename(tmp_path / "bench" / "run.py"),
    ):
        change()
        found.append(digest_of(tmp_path))
    assert len({*found}) == 5
