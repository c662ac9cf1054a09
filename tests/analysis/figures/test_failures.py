from analysis.figures.failures import _text_place
from analysis.figures.style import x_limits


def test_a_text_of_a_run_across_the_axes_stands_between_its_glyphs():
    lengths = [1024, 2048, 16384]
    limits = x_limits(lengths)
    assert _text_place(lengths, "predicted_out", limits) == (2048, False)
    assert _text_place(lengths[-1:], "predicted_out", limits) == (16384, True)
    assert _text_place(lengths[:1], "predicted_out", limits) == (1024, False)
    assert _text_place(lengths[:2], "predicted_out", limits) == (2048, False)
