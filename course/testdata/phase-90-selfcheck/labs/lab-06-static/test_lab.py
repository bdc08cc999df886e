"""What this lab pins."""


def test_rounds_up(lab):
    assert lab.num_blocks(17, 16) == 2


def test_without_hints(lab):
    assert lab.num_blocks(16, 16) == 1, "sixteen tokens fill one block exactly"
