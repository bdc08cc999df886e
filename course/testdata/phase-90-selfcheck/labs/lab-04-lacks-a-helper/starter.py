"""Count the blocks a sequence needs."""


SMALLEST = _rounded_up(1, 16)


def num_blocks(num_tokens: int, block_size: int) -> int:
    """Blocks of `block_size` slots that hold `num_tokens` tokens, rounded up."""
    raise NotImplementedError
