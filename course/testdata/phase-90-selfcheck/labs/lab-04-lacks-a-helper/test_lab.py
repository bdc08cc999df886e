"""What this lab pins."""


def test_rounds_up(lab):
    came = lab.num_blocks(17, 16)
    assert came == 2, f"17 tokens need a second block of 16: expected 2, came {came}"
