"""What this lab pins."""


def test_rounds_up(lab):
    came = lab.num_blocks(17, 16)
    assert came == 2, f"17 tokens need a second block of 16: expected 2, came {came}"


def test_measured(lab, record_property):
    blocks = lab.num_blocks(100, 16)
    record_property("measured.blocks", blocks)
    record_property("measured.shares", 100 / (blocks * 16) if blocks else 0)
    record_property("measured.waste", "at the end")
    assert blocks == 7, f"100 tokens need seven blocks of 16: expected 7, came {blocks}"
