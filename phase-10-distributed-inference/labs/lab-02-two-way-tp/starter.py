"""Lab 10-02: two ranks, one engine: what each holds, what its log says, and how they add up.

Arithmetic first, then two processes on your own machine, then a real engine. What holds:

- W1: a rank has its share of what is cut and all of what is not.
- W2: what the engine keeps for KV is its share of the memory less everything else, in whole blocks.
- W3: a value that a log does not have is None, and what one rank said is nobody else's.
- W4: lock-step: nobody reads before all have written, or writes before all have read.

Sources: `vllm/model_executor/models/opt.py:151` `OPTDecoderLayer.__init__`,
`vllm/model_executor/layers/vocab_parallel_embedding.py:192` `VocabParallelEmbedding`,
`vllm/v1/core/kv_cache_utils.py:1709` `_report_kv_cache_config`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

Config = Mapping[str, Any]
"""A config.json of Hugging Face."""
VOCAB_PADDING = 64
"""A vocabulary is padded to a multiple of this many rows, whatever the number of ranks (given)."""


class Stored(Protocol):
    """A weight in a file, as `harness.py` has it (given)."""

    shape: tuple[int, int]

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows start to stop - 1, read into memory."""

    def columns(self, start: int, stop: int) -> np.ndarray:
        """Columns start to stop - 1, read into memory."""


@dataclass(slots=True)
class StartUp:
    """What a start-up log says (given). What it does not say stays None or empty."""

    world_size: int | None = None
    pids: dict[int, int] = field(default_factory=dict)
    """Process of each tensor-parallel rank."""
    loaded_gib: dict[int, float] = field(default_factory=dict)
    """Weights, by the rank that said so."""
    available_gib: dict[int, float] = field(default_factory=dict)
    """Memory for KV, by the rank that said so."""
    kv_tokens: int | None = None
    concurrency: float | None = None
    backends: list[str] | None = None
    """All-reduce, in the order in which they are tried."""
    nccl: str | None = None


def share(size: int, tp: int, what: str) -> int:
    """size / tp, which must be whole; a ValueError otherwise (given)."""
    if tp < 1 or size % tp:
        raise ValueError(f"tp={tp}: {what} ({size}) must be divisible by it")
    return size // tp


def opt_weight_bytes_per_rank(config: Config, tp: int, dtype_bytes: int = 2) -> int:
    """Bytes of an OPT on one rank, in the family that has its norms before its layers (W1).

    A layer has q, k, v and fc1, column-parallel with biases; out and fc2, row-parallel with biases;
    and two norms, each a weight and a bias. Before the layers: a table of tokens, cut between ranks
    by rows, and one of positions, `max_position_embeddings` + 2 rows, not cut. After them: one norm
    more. The head is the table of tokens.

    A trace: opt-1.3b, 2 bytes: 2,631,647,232 on one rank, 1,320,321,024 on each of two.

    Raises:
        ValueError: heads, ffn_dim or the padded vocabulary are not divisible by tp.
    """
    raise NotImplementedError


def llama_weight_bytes_per_rank(config: Config, tp: int, dtype_bytes: int = 2) -> int:
    """Bytes of a Llama without biases on one rank (W1).

    A layer has q, k and v, by whole heads; o; gate, up and down; and two norms of a weight each.
    Before the layers the table of tokens, after them a norm, and a head of its own unless
    `tie_word_embeddings`.

    Raises:
        ValueError: heads, intermediate_size or the padded vocabulary are not divisible by tp, or
            KV heads and tp not one by the other.
    """
    raise NotImplementedError


def kv_bytes_per_token_per_rank(config: Config, tp: int, dtype_bytes: int = 2) -> int:
    """Bytes of K and V that a rank keeps for one token, in all layers (W1).

    A trace: opt-1.3b, 2 bytes: 196,608 on one rank, 98,304 on each of two. With 8 KV heads 16 ranks
    keep as much each as 8 do.

    Raises:
        ValueError: as above, of heads.
    """
    raise NotImplementedError


def plan_blocks(
    total_bytes: float,
    utilization: float,
    fixed_bytes: float,
    weight_bytes: float,
    kv_bytes_per_token: int,
    block_size: int = 16,
) -> int:
    """Blocks of KV that each rank has (W2). Every rank has as many; they are not added up.

    Args:
        total_bytes: of one device.
        utilization: share of the device that the engine may take, with everything it needs.
        fixed_bytes: what it needs besides weights and KV.
        weight_bytes, kv_bytes_per_token: of one rank.

    Raises:
        ValueError: a utilization that is not above 0 and at most 1; or nothing is left for KV.
    """
    raise NotImplementedError


def claim_fits(
    num_blocks: int, kv_bytes_per_token: int, block_size: int, free_bytes: float
) -> bool:
    """Whether so many blocks fit into a rank's memory: what a published log may be asked.

    A trace: 28,500 blocks of 16 tokens of 98,304 bytes are 41.7 GiB, which a card of 24 GB has not
    printed.
    """
    raise NotImplementedError


def parse_log(text: str) -> StartUp:
    """What the log of a start says of ranks and memory (W3).

    The pinned version writes (with `(Worker_TP1 pid=52) INFO 11-23 05:43:37 [file.py:9] ` before):

    - rank 0 in world size 2 is assigned as DP rank 0, ...
    - Model loading took 1.23 GiB memory and 2.534512 seconds
    - Available KV cache memory: 15.86 GiB
    - GPU KV cache size: 173,040 tokens
    - Maximum concurrency for 2,048 tokens per request: 84.49x
    - Using ['CUSTOM', 'PYNCCL'] all-reduce backends (in dispatch order) for group 'tp:0' out of ...
    - vLLM is using nccl==2.27.5

    Processes write into one another's lines: of several prefixes in front of a message the last one
    is its own. A log may hold several starts, each beginning with "Initializing a V1 LLM engine":
    the last one counts. An engine of one rank names no TP rank: what it says is rank 0's.

    Returns:
        What was said; nothing is concluded from it for another rank.
    """
    raise NotImplementedError


def load_shard(w1: Stored, w2: Stored, rank: int, world: int) -> tuple[np.ndarray, np.ndarray]:
    """What one process reads of an MLP's two weights: [hidden, in] and [out, hidden] (W1).

    Returns:
        Its shards, column-parallel and row-parallel. Nothing else is read.

    Raises:
        ValueError: hidden is not divisible by world.
    """
    raise NotImplementedError


def rank_mlp(
    x: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    all_reduce: Callable[[np.ndarray], np.ndarray],
) -> np.ndarray:
    """One step of one rank: relu(x up^T) down^T, added up over all ranks.

    Args:
        x: [n, in].
        up, down: this rank's shards.
        all_reduce: hands over this rank's addend and gives the sum; asked once.

    Returns:
        [n, out].
    """
    raise NotImplementedError


def shared_all_reduce(
    part: np.ndarray, slots: np.ndarray, rank: int, barrier: Callable[[], None]
) -> np.ndarray:
    """Add up what all ranks have, through memory that all of them see (W4).

    All ranks get the same bits. When it returns, every rank has read, and the slots may be written
    again.

    Args:
        part: this rank's addend.
        slots: [world, *part.shape], shared; a rank writes its own and reads all.
        barrier: returns when every rank has called it as often as this one.

    Returns:
        The sum, in an array of its own.
    """
    raise NotImplementedError
