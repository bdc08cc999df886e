"""What this lab pins: nothing."""


def test_rounds_up(lab):
    came = lab.num_blocks(17, 16)
    print(came)
