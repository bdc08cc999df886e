"""Lab 10-04: a model cut between its layers: what a pipeline wastes, and when it wastes nothing.

A stage is some layers on some ranks; a microbatch goes through stages 0, 1, 2 ... and takes a tick
in each. What holds:

- P1: a stage has one microbatch at a time.
- P2: a microbatch is in stage s only after stage s - 1.
- P3: a stage that could work does: whoever waits longest goes first.
- P4: a burst of m microbatches fills and drains the pipe; a loop, where a batch comes back for its
  next token, does neither.
- P5: layers are split as the pin splits them.

Sources: `vllm/distributed/utils.py:95` `get_pp_indices`,
`vllm/v1/executor/multiproc_executor.py:475` `MultiprocExecutor.max_concurrent_batches`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

Grid = list[list[int | None]]
"""By stage, then by tick: the microbatch that is in it, or None."""


def check_counts(**counts: int) -> None:
    """A ValueError for a count below 1 (given)."""
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name}={count}: need at least 1")


def pipeline_total_ticks(num_stages: int, num_microbatches: int) -> int:
    """Ticks from the first microbatch's start to the last one's end, all waiting at the start.

    A trace: 4 stages, 4 microbatches: 7.

    Raises:
        ValueError: a count below 1.
    """
    check_counts(num_stages=num_stages, num_microbatches=num_microbatches)
    return num_stages + num_microbatches - 1


def bubble_fraction(num_stages: int, num_microbatches: int) -> float:
    """Share of stages times ticks in which a stage has nothing to do, in such a burst.

    A trace: 4 stages, 4 microbatches: 12 of 28 cells, 0.43.

    Raises:
        ValueError: a count below 1.
    """
    return (num_stages - 1) / pipeline_total_ticks(num_stages, num_microbatches)


def _play(num_stages: int, num_batches: int, ticks: int | None) -> Grid:
    """Run batches by the rules; with `ticks` they come back to stage 0 until then."""
    check_counts(num_stages=num_stages, num_batches=num_batches)
    waiting: list[deque[int]] = [deque() for _ in range(num_stages)]
    waiting[0].extend(range(num_batches))
    grid: Grid = [[] for _ in range(num_stages)]
    while any(waiting) if ticks is None else len(grid[0]) < ticks:
        moves = []
        for stage, queue in enumerate(waiting):
            batch = queue.popleft() if queue else None
            grid[stage].append(batch)
            if batch is not None:
                moves.append((stage + 1, batch))
        for stage, batch in moves:
            if stage < num_stages:
                waiting[stage].append(batch)
            elif ticks is not None:
                waiting[0].append(batch)
    return grid


def simulate_schedule(num_stages: int, num_microbatches: int) -> Grid:
    """A burst, tick by tick, played by the rules P1 to P3.

    A trace: 2 stages, 3 microbatches: [[0, 1, 2, None], [None, 0, 1, 2]].

    Returns:
        A row for each stage, of as many ticks as the burst takes.

    Raises:
        ValueError: a count below 1.
    """
    return _play(num_stages, num_microbatches, None)


def min_microbatches_for_bubble(num_stages: int, max_bubble: float) -> int:
    """The smallest number of microbatches whose `bubble_fraction` is at most `max_bubble`.

    A trace: 8 stages, 0.1: 63, since 7 / 70 is 0.1 and 7 / 69 is more. One stage: 1.

    It is found in a few operations, however large it is.

    Raises:
        ValueError: stages below 1; a `max_bubble` of 0 or less with more than one stage.
    """
    check_counts(num_stages=num_stages)
    if num_stages == 1:
        return 1
    if max_bubble <= 0:
        raise ValueError(f"max_bubble={max_bubble}: need more than 0; a burst always has a bubble")
    ahead = num_stages - 1
    count = max(1, round(ahead * (1 - max_bubble) / max_bubble))
    while ahead / (ahead + count) > max_bubble:
        count += 1
    while count > 1 and ahead / (ahead + count - 1) <= max_bubble:
        count -= 1
    return count


def unequal_stages(stage_times: Sequence[float], num_microbatches: int) -> tuple[float, float]:
    """A burst through stages that take different times.

    A trace: times 1, 1, 2, 1 and 8 microbatches: it ends after 19, and 47.4 % of the stages' time
    is idle.

    Args:
        stage_times: what a microbatch takes in each stage.

    Returns:
        When the last microbatch has left, and the idle share of all stages until then.

    Raises:
        ValueError: no stage, a time that is not above 0, or a count below 1.
    """
    check_counts(num_microbatches=num_microbatches, stages=len(stage_times))
    if min(stage_times) <= 0:
        raise ValueError(f"stage_times={list(stage_times)}: need times above 0")
    free_at = [0.0] * len(stage_times)
    for _ in range(num_microbatches):
        arrives = 0.0
        for stage, time in enumerate(stage_times):
            arrives = free_at[stage] = max(arrives, free_at[stage]) + time
    busy = num_microbatches * sum(stage_times)
    return free_at[-1], 1 - busy / (len(stage_times) * free_at[-1])


def simulate_loop(num_stages: int, num_batches: int, num_ticks: int) -> Grid:
    """Decoding, tick by tick: a batch that leaves the last stage comes back to the first (P4).

    Its next token needs the one it has just sampled, so it waits for stage 0 from the next tick on.

    A trace: 2 stages, 1 batch, 4 ticks: [[0, None, 0, None], [None, 0, None, 0]].

    Args:
        num_batches: batches in flight, all waiting for stage 0 at the start.

    Returns:
        A row of `num_ticks` for each stage.

    Raises:
        ValueError: a count below 1.
    """
    check_counts(num_ticks=num_ticks)
    return _play(num_stages, num_batches, num_ticks)


def steady_state_utilization(num_stages: int, num_batches: int) -> float:
    """Share of stages times ticks that is used, once a loop has been going on for long.

    A trace: 4 stages: 0.25 with one batch, 0.5 with two, 1.0 with four.

    Raises:
        ValueError: a count below 1.
    """
    check_counts(num_stages=num_stages, num_batches=num_batches)
    return min(1.0, num_batches / num_stages)


def ticks_between_tokens(num_stages: int, num_batches: int) -> int:
    """Ticks from one token of a batch to its next, once a loop has been going on for long.

    Raises:
        ValueError: a count below 1.
    """
    check_counts(num_stages=num_stages, num_batches=num_batches)
    return max(num_stages, num_batches)


def split_layers(
    num_layers: int, num_stages: int, partition: str | None = None
) -> list[tuple[int, int]]:
    """Which layers each stage has, as the pin decides (P5).

    Shares are equal but for one layer. Who gets a layer more: the stages before the last, counted
    backwards. The last has the head of the model already, the first the embedding.

    A trace: 10 layers, 4 stages: (0, 2), (2, 5), (5, 8), (8, 10). With "4,6,6,4" 20 layers are
    (0, 4), (4, 10), (10, 16), (16, 20).

    Args:
        partition: layers of each stage, separated by commas, as VLLM_PP_LAYER_PARTITION holds them.

    Returns:
        For each stage its first layer and the one after its last.

    Raises:
        ValueError: no stage; or a partition that holds something else than whole numbers, not one
            for each stage, or another number of layers in all.
    """
    check_counts(num_stages=num_stages)
    if partition is None:
        share, rest = divmod(num_layers, num_stages)
        counts = [share] * num_stages
        for back in range(2, rest + 2):
            counts[-back] += 1
    else:
        counts = [int(words) for words in partition.split(",")]
        if len(counts) != num_stages:
            raise ValueError(f"partition={partition!r}: need {num_stages} numbers")
        if sum(counts) != num_layers:
            raise ValueError(f"partition={partition!r}: need {num_layers} layers in all")
    starts = [sum(counts[:stage]) for stage in range(num_stages)]
    return [(start, start + count) for start, count in zip(starts, counts, strict=True)]
