"""The digest of sources covers every module of `bench/` and the hardware files."""

from bench.common.environment import tree_digest


def test_tree_digest_changes_with_edits_new_and_moved_modules(tmp_path):
    hardware, module = tmp_path / "conf" / "hardware" / "h100.yaml", tmp_path / "bench" / "cell" / "run.py"
    for path in (hardware, module):
        path.parent.mkdir(parents=True)
        path.write_text("a = 1")
    digests = [tree_digest(tmp_path)]
    for change in (
        lambda: hardware.write_text("b = 2"),
        lambda: module.write_text("c = 3"),
        lambda: module.with_name("new.py").touch(),
        lambda: module.rename(tmp_path / "bench" / "run.py"),
    ):
        change()
        digests.append(tree_digest(tmp_path))
    assert len({*digests}) == 5
