"""CUDA graphs in miniature: launches G1, buffer identity G2, values G3, and trace T16."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm.cudagraph import GraphRunner, LaunchCounter, PiecewiseGraphRunner, Tape, run_eager
from mini_vllm.tests.support import for_all

OPS = (
    lambda x: x + 1.0,
    lambda x: x * 2.0,
    lambda x: np.maximum(x, 0.0),
    lambda x: x - x.mean(axis=-1, keepdims=True),
    lambda x: x,
)


def launches(run, *args) -> int:
    LaunchCounter.reset()
    run(*args)
    return LaunchCounter.n


def calls(st):
    """Random op lists and random inputs of few shapes, so that shapes come back."""
    shape = st.tuples(st.integers(1, 3), st.sampled_from([2, 4]))
    value = st.integers(-5, 5)
    return st.tuples(
        st.lists(st.integers(0, len(OPS) - 1), min_size=1, max_size=5),
        st.lists(st.tuples(shape, value), min_size=1, max_size=8),
    )


def inputs(made: list) -> list[np.ndarray]:
    return [
        np.arange(rows * columns, dtype=np.float64).reshape(rows, columns) + value
        for (rows, columns), value in made
    ]


@pytest.mark.slow
@for_all(calls, max_examples=100)
def test_g1_eager_costs_n_launches_capture_n_and_replay_one(made):
    ops = [OPS[i] for i in made[0]]
    runner, seen = GraphRunner(ops), set()
    for x in inputs(made[1]):
        assert launches(run_eager, ops, x) == len(ops)
        assert launches(runner, x) == (1 if x.shape in seen else len(ops))
        seen.add(x.shape)
    assert runner.num_captured == len(seen)


@pytest.mark.slow
@for_all(calls, max_examples=100)
def test_g2_the_captured_buffers_keep_their_identity(made):
    runner = GraphRunner([OPS[i] for i in made[0]])
    buffers: dict[tuple[int, ...], tuple[int, int]] = {}
    for x in inputs(made[1]):
        before = x.copy()
        out = runner(x)
        entry = runner.graphs[x.shape]
        assert out is entry.output
        assert entry.static_input is not x
        assert not np.shares_memory(entry.static_input, entry.output)
        held = id(entry.static_input), id(entry.output)
        assert buffers.setdefault(x.shape, held) == held
        assert np.array_equal(x, before), "the caller's array was changed"


@pytest.mark.slow
@for_all(calls, max_examples=100)
def test_g3_replayed_values_equal_eager_ones(made):
    ops = [OPS[i] for i in made[0]]
    runner = GraphRunner(ops)
    piecewise = PiecewiseGraphRunner(ops, lambda i: i % 2 == 0)
    laddered = GraphRunner(ops, capture_sizes=[1, 2, 4])
    for x in inputs(made[1]):
        expected = run_eager(ops, x)
        assert np.array_equal(runner(x), expected)
        assert np.array_equal(piecewise(x), expected)
        assert np.array_equal(laddered(x), expected)


def test_t16_one_hundred_calls_cost_300_launches_eager_and_102_with_a_graph():
    ops, x = OPS[:3], np.ones(4)
    assert launches(lambda: [run_eager(ops, x) for _ in range(100)]) == 300
    runner = GraphRunner(ops)
    assert launches(lambda: [runner(x) for _ in range(100)]) == 3 + 99


def test_t16_a_replay_computes_from_the_new_values():
    runner = GraphRunner([lambda x: x * 10.0])
    first = runner(np.array([1.0]))
    assert first.tolist() == [10.0]
    assert runner(np.array([5.0])).tolist() == [50.0]
    assert first.tolist() == [50.0], "the output buffer is the graph's own, overwritten by a replay"


def test_t16_graphs_are_counted_by_shape_by_segment_and_by_ladder():
    runner = GraphRunner(OPS[:3])
    runner(np.ones(4))
    runner(np.ones(8))
    assert runner.num_captured == 2
    assert PiecewiseGraphRunner(OPS[:3], lambda i: i != 1).num_graphs == 2
    ladder = GraphRunner(OPS[:3], capture_sizes=[1, 2, 4, 8])
    for batch in range(1, 9):
        assert ladder(np.ones((batch, 2))).shape == (batch, 2)
    assert ladder.num_captured == 4


def test_a_batch_above_the_ladder_runs_eagerly_and_a_size_below_one_is_refused():
    ladder = GraphRunner(OPS[:3], capture_sizes=[2, 4])
    assert launches(ladder, np.ones((5, 2))) == 3
    assert ladder.num_captured == 0
    with pytest.raises(ValueError, match=r"capture_sizes=\[0, 4\]: need sizes of at least 1"):
        GraphRunner(OPS[:3], capture_sizes=[0, 4])


def test_recording_computes_nothing_and_a_replay_all_of_it_for_one_launch():
    x, y, z = np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    tape = Tape()
    LaunchCounter.reset()
    tape.record(lambda a: a + 1.0, x, y)
    tape.record(lambda a: a * 10.0, y, z)
    assert (LaunchCounter.n, y.tolist(), z.tolist()) == (0, [0.0, 0.0], [0.0, 0.0])
    tape.replay()
    assert (LaunchCounter.n, y.tolist(), z.tolist()) == (1, [2.0, 3.0], [20.0, 30.0])
    x[:] = 4.0
    assert z.tolist() == [20.0, 30.0], "nothing runs before the replay"
    tape.replay()
    assert z.tolist() == [50.0, 50.0]


def test_a_rebound_input_is_not_seen_and_an_earlier_result_changes_under_your_hands():
    runner = GraphRunner([lambda x: x * 10.0])
    first = runner(np.array([1.0]))
    entry = runner.graphs[(1,)]
    entry.static_input = np.array([7.0])
    entry.tape.replay()
    assert entry.output.tolist() == [10.0], "the tape reads the buffer it was recorded with"
    assert first is entry.output
    runner.graphs[(1,)].tape.kernels[0][1][:] = 3.0
    entry.tape.replay()
    assert first.tolist() == [30.0]


def test_every_kernel_writes_to_a_buffer_of_its_own():
    runner = GraphRunner([lambda x: x, lambda x: x[::-1], lambda x: x.sum(keepdims=True)])
    runner(np.array([1.0, 2.0]))
    tape = runner.graphs[(2,)].tape
    buffers = [tape.kernels[0][1], *(dst for _, _, dst in tape.kernels)]
    assert [buffer.shape for buffer in buffers] == [(2,), (2,), (2,), (1,)]
    for i, one in enumerate(buffers):
        assert not any(np.shares_memory(one, other) for other in buffers[:i])
    assert runner(np.array([3.0, 4.0])).tolist() == [7.0]


def test_no_ops_are_a_graph_that_copies():
    runner = GraphRunner([])
    assert launches(runner, np.array([1, 2])) == 0
    assert launches(runner, np.array([3, 4])) == 1
    assert runner(np.array([5, 6])).tolist() == [5, 6]
