"""What lab 05-01 pins: what recording does and does not do, what a replay reads, what it costs."""

from __future__ import annotations

import numpy as np
import pytest

from labkit import same

OPS = (lambda x: x + 1.0, lambda x: x * 2.0, lambda x: x - 3.0)


def cost(lab, call, *args) -> int:
    lab.LaunchCounter.reset()
    call(*args)
    return lab.LaunchCounter.n


def values(array) -> list:
    return np.asarray(array).tolist()


# --- eager, and the tape --------------------------------------------------------------------------


def test_eager_pays_one_launch_per_op(lab):
    lab.LaunchCounter.reset()
    got = lab.run_eager(OPS, np.ones(4))
    same(
        (values(got), lab.LaunchCounter.n),
        ([1.0] * 4, 3),
        "((1 + 1) x 2) - 3 = 1, and three ops are three launches.",
    )
    x = np.ones(2)
    lab.LaunchCounter.reset()
    same((lab.run_eager([], x) is x, lab.LaunchCounter.n), (True, 0), "no ops: x, no launch.")


def test_recording_writes_nothing(lab):
    ran = []
    tape, x, y = lab.Tape(), np.array([1.0, 2.0]), np.zeros(2)

    def op(a):
        ran.append(a)
        return a * 10.0

    launches = cost(lab, tape.record, op, x, y)
    same(
        (len(tape.kernels), launches, len(ran), values(y)),
        (1, 0, 0, [0.0, 0.0]),
        "(kernels on the tape, launches, times the op ran, destination): recording stores the "
        "kernel and runs nothing, as a stream under capture does.",
    )


def test_replay_walks_the_tape(lab):
    tape, x, y, z = lab.Tape(), np.array([1.0, 2.0]), np.zeros(2), np.zeros(2)
    tape.record(lambda a: a + 1.0, x, y)
    tape.record(lambda a: a * 10.0, y, z)
    launches = cost(lab, tape.replay)
    same(
        (values(y), values(z), launches),
        ([2.0, 3.0], [20.0, 30.0], 1),
        "(first destination, second destination, launches): every kernel runs from its buffer "
        "into its buffer, and all of it was submitted once.",
    )
    x[:] = 4.0
    same(values(z), [20.0, 30.0], "a new input changes nothing before the next replay.")
    tape.replay()
    same(values(z), [50.0, 50.0], "the tape reads the buffer's contents of now, not of then.")


def test_capture_records_without_output(lab):
    runner = lab.GraphRunner(OPS)
    lab.LaunchCounter.reset()
    entry, result = runner.capture(np.full(4, 5.0))
    same(values(result), [9.0] * 4, "the warm-up really runs: ((5 + 1) x 2) - 3 = 9.")
    same(
        values(entry.output),
        [0.0] * 4,
        "the capture does not: its output buffer holds zeros until a replay. Upstream's own test "
        "asserts exactly that.",
    )
    same(
        (lab.LaunchCounter.n, len(entry.tape.kernels), entry.num_ops, entry.shape),
        (3, 3, 3, (4,)),
        "(launches of the warm-up, kernels on the tape, num_ops, shape).",
    )
    entry.tape.replay()
    same(values(entry.output), [9.0] * 4, "after one replay the output is there.")


def test_kernels_are_chained_through_buffers(lab):
    same_shape = [lambda x: x, lambda x: x + 0.0, lambda x: x * 1.0]
    runner = lab.GraphRunner([lambda x: x[::2], *same_shape, lambda x: x > 2.0])
    entry, _ = runner.capture(np.arange(6.0))
    kernels = entry.tape.kernels
    buffers = [entry.static_input, *(dst for _, _, dst in kernels)]
    for i, (_, src, _) in enumerate(kernels):
        assert src is buffers[i], (
            f"kernel {i} must read {'the static input' if i == 0 else f'what kernel {i - 1} wrote'}"
            ", the very array; a copy of it would never change again"
        )
    assert entry.output is buffers[-1], "the output is the buffer of the last kernel"
    same(
        [(b.shape, b.dtype.name) for b in buffers],
        [((6,), "float64"), *[((3,), "float64")] * 4, ((3,), "bool")],
        "shape and dtype of the static input and of each buffer, as the warm-up found them.",
    )
    for i, one in enumerate(buffers):
        for j in range(i):
            assert not np.shares_memory(one, buffers[j]), (
                f"buffers {j} and {i} share memory: op {i - 1} returned a view of its input or "
                "the input itself, or a buffer was used again; each op has one of its own"
            )


# --- the runner: cost -----------------------------------------------------------------------------


def test_capture_then_replay_is_one_launch(lab):
    runner = lab.GraphRunner(OPS)
    got = [cost(lab, runner, np.ones(n)) for n in (4, 4, 8, 8, 4)]
    same(
        (got, runner.num_captured),
        ([3, 1, 3, 1, 1], 2),
        "shapes (4,), (4,), (8,), (8,), (4,): three launches when a shape is new, one when it "
        "was seen; two graphs are held.",
    )


def test_graphs_win_when_overhead_dominates(lab):
    runner, x = lab.GraphRunner(OPS), np.ones(4)
    eager = cost(lab, lambda: [lab.run_eager(OPS, x) for _ in range(100)])
    graph = cost(lab, lambda: [runner(x) for _ in range(100)])
    same((eager, graph), (300, 102), "100 calls of 3 ops: 100 x 3 eager, 3 + 99 with a graph.")


# --- the runner: values ---------------------------------------------------------------------------


def test_first_call_is_valid(lab):
    got = lab.GraphRunner(OPS)(np.full(4, 5.0))
    same(
        values(got),
        [9.0] * 4,
        "capture leaves zeros, but a caller wants a result: the warm-up has it.",
    )


def test_static_buffer_reflects_new_input(lab):
    runner = lab.GraphRunner([lambda x: x * 10.0])
    first = values(runner(np.array([1.0])))
    second = values(runner(np.array([5.0])))
    same((first, second), ([10.0], [50.0]), "x 10 on 1, then on 5.")


def test_replay_output_matches_eager(lab):
    rng = np.random.default_rng(0)
    ops = [lambda x: x @ x.T, lambda x: np.maximum(x, 0.0), lambda x: x - x.mean(axis=0)]
    runner = lab.GraphRunner(ops)
    for rows in (2, 3, 2, 2, 3, 5, 2):
        x = rng.standard_normal((rows, 4))
        expected = lab.run_eager(ops, x)
        got = np.array(runner(x))
        assert np.array_equal(got, expected), (
            f"input of shape {x.shape}: a graph computes what eager computes.\n"
            f"expected {expected}\ncame     {got}"
        )


def test_new_shape_triggers_recapture(lab):
    runner = lab.GraphRunner(OPS)
    for shape in ((4,), (8,), (2, 2), (4, 1), (1, 4)):
        got = runner(np.full(shape, 5.0))
        same((got.shape, set(got.ravel().tolist())), (shape, {9.0}), f"input of shape {shape}.")
    same(
        sorted(runner.graphs),
        [(1, 4), (2, 2), (4,), (4, 1), (8,)],
        "one graph per shape, and all are kept: (4,), (2, 2), (4, 1) and (1, 4) have equal sizes.",
    )


# --- the runner: buffers --------------------------------------------------------------------------


def test_static_buffer_identity_survives_replay(lab):
    runner = lab.GraphRunner(OPS)
    runner(np.ones(4))
    entry = runner.graphs[(4,)]
    buffer, pointer = entry.static_input, entry.static_input.ctypes.data
    x = np.arange(4.0)
    runner(x)
    assert runner.graphs[(4,)] is entry, "a replay must not capture again"
    assert entry.static_input is buffer and entry.static_input.ctypes.data == pointer, (
        "the static input is another array after a replay. The graph reads the address it was "
        "recorded with; copy into the buffer, do not rebind its name"
    )
    same(values(buffer), values(x), "the buffer holds the new input.")


def test_rebinding_returns_stale_data(lab):
    runner = lab.GraphRunner([lambda x: x * 10.0])
    runner(np.array([1.0]))
    entry = runner.graphs[(1,)]
    recorded = entry.static_input
    entry.static_input = np.array([7.0])
    entry.tape.replay()
    same(
        values(entry.output),
        [10.0],
        "the name was bound to [7]; the tape still reads the recorded buffer, which holds 1. On a "
        "GPU this is the silent bug: no error, old data.",
    )
    recorded[:] = 7.0
    entry.tape.replay()
    same(values(entry.output), [70.0], "writing into the recorded buffer is what works.")


def test_capture_does_not_alias_caller(lab):
    runner = lab.GraphRunner(OPS)
    x = np.ones(4)
    runner(x)
    entry = runner.graphs[(4,)]
    assert not np.shares_memory(entry.static_input, x), (
        "the static input is the caller's array. The next replay would write into the caller's "
        "data, and the caller into the graph's"
    )
    x[:] = 100.0
    entry.tape.replay()
    same(values(entry.output), [1.0] * 4, "the caller changed its own array after the call.")


def test_ops_read_from_static_buffer(lab):
    seen = []

    def first(x):
        seen.append(x.ctypes.data)
        return x + 1.0

    runner = lab.GraphRunner([first])
    for value in (1.0, 2.0, 3.0):
        runner(np.full(4, value))
    pointer = runner.graphs[(4,)].static_input.ctypes.data
    same(
        [address == pointer for address in seen],
        [True] * 3,
        "whether the first op read the static input, on the warm-up and on two replays.",
    )


def test_input_not_mutated(lab):
    runner = lab.GraphRunner(OPS)
    inputs = [np.full(4, value) for value in (1.0, 2.0, 3.0)]
    for x in inputs:
        runner(x)
    same(
        [values(x) for x in inputs],
        [[1.0] * 4, [2.0] * 4, [3.0] * 4],
        "the arrays that the caller passed to three calls, after the last of them.",
    )


def test_output_buffer_is_reused(lab):
    runner = lab.GraphRunner(OPS)
    first = runner(np.ones(4))
    kept = first.copy()
    second = runner(np.full(4, 5.0))
    assert first is second is runner.graphs[(4,)].output, (
        "every call of one shape returns the graph's own output buffer, not a new array"
    )
    same(
        (values(first), values(kept)),
        ([9.0] * 4, [1.0] * 4),
        "(the first result, a copy of it) after the second call: who keeps a result must copy it "
        "before the next replay.",
    )


def test_shapes_have_buffers_of_their_own(lab):
    runner = lab.GraphRunner(OPS)
    small = runner(np.ones(4))
    runner(np.full(8, 5.0))
    same(values(small), [1.0] * 4, "the result for (4,) after a call with (8,).")
    runner(np.full(8, 7.0))
    same(values(small), [1.0] * 4, "and after a replay of (8,).")


def test_dtype_mismatch_raises(lab):
    runner = lab.GraphRunner([lambda x: x * 2])
    same(values(runner(np.array([1, 2]))), [2, 4], "captured for int64.")
    entry = runner.graphs[(2,)]
    try:
        got = runner(np.array([1.5, 2.5]))
    except TypeError:
        got = None
    if got is not None:
        pytest.fail(
            "a graph captured for int64 got float64: the buffer cannot hold 1.5, and the key does "
            f"not look at the dtype. Expected TypeError, came {values(got)}",
            pytrace=False,
        )
    assert runner.graphs.get((2,)) is entry, "the refused call must leave the graph where it was"
    entry.tape.replay()
    same(values(entry.output), [2, 4], "the refused call wrote nothing into the static input.")
    same(values(runner(np.array([5, 6]))), [10, 12], "the refused call left the graph usable.")


def test_dtypes_of_the_same_kind_are_copied(lab):
    for captured, given in ((np.int64, np.int32), (np.float32, np.float64), (np.float64, np.int64)):
        runner = lab.GraphRunner([lambda x: x * 2])
        runner(np.array([1, 2], dtype=captured))
        try:
            got = runner(np.array([3, 4], dtype=given))
        except TypeError as error:
            pytest.fail(
                f"captured for {captured.__name__}, called with {given.__name__}: numpy's rule "
                f"'same_kind' allows that copy; came {error!r}",
                pytrace=False,
            )
        same(
            (values(got), got.dtype.name, runner.num_captured),
            ([6, 8], np.dtype(captured).name, 1),
            f"captured for {captured.__name__}, called with {given.__name__}: (values, dtype, "
            "graphs). The input is copied into the buffer that is there.",
        )
