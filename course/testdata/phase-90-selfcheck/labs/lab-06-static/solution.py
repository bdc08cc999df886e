"""Count the blocks a sequence needs."""


def num_blocks(num_tokens: int, block_size: int = 16) -> int:
    """Blocks of `block_size` slots that hold `num_tokens` tokens, rounded up."""
    return -(-num_tokens // block_size)
