"""Capture sizes: which batch sizes get a CUDA graph, and what rounding up to them costs.

Every function is pure. Upstream builds the list in `vllm/config/vllm.py:1597`
`VllmConfig._set_cudagraph_sizes` and rounds up in `vllm/v1/cudagraph_dispatcher.py:76`
`CudagraphDispatcher._compute_bs_to_padded_graph_size`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence


def max_capture_size(
    max_num_seqs: int, decode_query_len: int = 1, max_num_batched_tokens: int = 8192
) -> int:
    """The largest size to capture, in tokens, when the user chose none.

    Twice the tokens of a full decode batch, at most 512, and never more than a step can hold.

    Args:
        max_num_seqs: requests that may run at once.
        decode_query_len: tokens of one decoding request; 1 + drafts with speculative decoding.
        max_num_batched_tokens: the token budget of a step.
    """
    return min(max_num_batched_tokens, max_num_seqs * decode_query_len * 2, 512)


def default_capture_sizes(
    max_size: int, max_num_batched_tokens: int | None = None, performance_mode: str = "balanced"
) -> list[int]:
    """The default ladder up to `max_size` tokens, ascending, without repeats.

    1, 2 and 4; then multiples of 8 below 256; from 256 on, multiples of 16. With
    `performance_mode="interactivity"`, every size from 1 to 32 instead of 1, 2 and 4. A
    `max_num_batched_tokens` of at most `max_size` is a rung too: it is the largest step there is.

    Raises:
        ValueError: max_size is below 1.
    """
    if max_size < 1:
        raise ValueError(f"max_size={max_size}: need at least 1")
    if performance_mode == "interactivity":
        sizes = set(range(1, min(max_size, 32) + 1))
    else:
        sizes = {size for size in (1, 2, 4) if size <= max_size}
    sizes.update(range(8, min(max_size + 1, 256), 8))
    sizes.update(range(256, max_size + 1, 16))
    if max_num_batched_tokens is not None and max_num_batched_tokens <= max_size:
        sizes.add(max_num_batched_tokens)
    return sorted(sizes)


def decode_capture_sizes(
    sizes: Sequence[int], max_num_seqs: int, decode_query_len: int = 1
) -> list[int]:
    """The rungs that also get a graph for uniform decode batches, in the given order.

    Such a batch holds at least one request and at most `max_num_seqs`, `decode_query_len` tokens
    each; a rung outside that range could never be filled.
    """
    top = max_num_seqs * decode_query_len
    return [size for size in sizes if decode_query_len <= size <= top]


def select_capture_size(batch: int, sizes: Sequence[int]) -> int | None:
    """The smallest rung that holds `batch` tokens; None above the top, where no graph is used.

    Args:
        batch: tokens in the step.
        sizes: capture sizes, in any order.

    Raises:
        ValueError: batch is below 1.
    """
    if batch < 1:
        raise ValueError(f"batch={batch}: need at least 1")
    rungs = sorted(sizes)
    place = bisect_left(rungs, batch)
    return rungs[place] if place < len(rungs) else None


def padded_tokens(batch: int, sizes: Sequence[int]) -> int:
    """Rows added to reach the rung: 0 on a rung, and 0 above the top, where nothing is padded."""
    rung = select_capture_size(batch, sizes)
    return 0 if rung is None else rung - batch


def trace_waste(trace: Iterable[int], sizes: Sequence[int]) -> int:
    """Rows of padding over all steps of `trace`, the tokens of each step."""
    return sum(padded_tokens(batch, sizes) for batch in trace)


def waste_histogram(
    trace: Iterable[int], sizes: Sequence[int]
) -> dict[int | None, tuple[int, int]]:
    """Per rung that was used: (steps that ran on it, rows of padding in them).

    Steps above the top are counted under None. It answers where the padding is, which a total
    does not. Upstream prints such a table with `--cudagraph-metrics`.
    """
    rows: dict[int | None, tuple[int, int]] = {}
    for batch in trace:
        rung = select_capture_size(batch, sizes)
        steps, padding = rows.get(rung, (0, 0))
        rows[rung] = (steps + 1, padding + padded_tokens(batch, sizes))
    return rows


def num_graphs(sizes: Sequence[int], decode_sizes: Sequence[int], num_layers: int) -> int:
    """Graphs held under FULL_AND_PIECEWISE.

    Each rung of `sizes` has one piecewise graph before, between and after the attentions of
    `num_layers` layers; each of `decode_sizes` has one full graph.
    """
    return len(sizes) * (num_layers + 1) + len(decode_sizes)


def optimal_sizes(histogram: Mapping[int, int], k: int) -> list[int]:
    """At most `k` rungs that pad the least, for a known distribution of batch sizes.

    Every batch of the histogram must fit on some rung. Rungs are ascending, each an observed size.
    A hundred different sizes and twenty rungs take well under a second.

    Args:
        histogram: tokens in a step -> how many steps had them; counts of at least 1.
        k: capture sizes to choose.

    Raises:
        ValueError: the histogram is empty, or k is below 1.
    """
    if not histogram:
        raise ValueError("histogram is empty: no step to choose sizes for")
    if k < 1:
        raise ValueError(f"k={k}: need at least 1")
    values = sorted(histogram)
    steps, tokens = [0], [0]  # of all batches before values[i]
    for value in values:
        steps.append(steps[-1] + histogram[value])
        tokens.append(tokens[-1] + histogram[value] * value)

    def padding(first: int, last: int) -> int:
        """Rows added when values[first..last] all run on values[last]."""
        filled = values[last] * (steps[last + 1] - steps[first])
        return filled - (tokens[last + 1] - tokens[first])

    # best[j]: (padding, rungs) for values[0..j] with the rungs used so far, the last at values[j]
    best = [(padding(0, j), [values[j]]) for j in range(len(values))]
    for _ in range(min(k, len(values)) - 1):
        best = [
            min(
                [best[j]]
                + [(best[i][0] + padding(i + 1, j), [*best[i][1], values[j]]) for i in range(j)]
            )
            for j in range(len(values))
        ]
    return best[-1][1]
