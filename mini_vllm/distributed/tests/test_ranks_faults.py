"""A rank that dies, fails or hangs is named; the others end; nothing is left of any of them."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.distributed.autopsy import RankError
from mini_vllm.distributed.pool import RankPool
from mini_vllm.distributed.transport import SEGMENT_PREFIX
from mini_vllm.plan import SchedulerOutput
from mini_vllm.tests.ranks_support import (
    DENSE,
    KNOBS,
    PROMPTS,
    RandomSource,
    alone,
    answer,
    fail,
    pool,
    ranked,
    running,
)

LONGEST_S = 20.0
"""How long is waited for an end: that it comes is tested, and a busy machine may take its time."""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


def all_end(pids: list[int]) -> bool:
    deadline = time.monotonic() + LONGEST_S
    while any(map(is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.01)
    return not any(map(is_alive, pids))


def segments(pid: int) -> list[str]:
    """The shared memory of the ranks that a process has started, as far as it has a name."""
    return [name for name in os.listdir("/dev/shm") if name.startswith(f"{SEGMENT_PREFIX}-{pid}-")]


both = pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("sockets", marks=pytest.mark.slow)]
)
pytestmark = pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs /proc and /dev/shm")


@pytest.mark.parametrize("how", ["raises", pytest.param("exits", marks=pytest.mark.slow)])
def test_a_rank_that_ends_in_a_step_is_named_and_takes_the_others_with_it(how):
    with running(lambda: RankPool(3, timeout_s=30.0)) as ranks:
        pids = ranks.pids
        with pytest.raises(RankError, match="rank 2") as raised:
            ranks.rpc("run", fail, 2, how)
        assert raised.value.rank == 2
        assert ("ZeroDivisionError" if how == "raises" else "exit code 3") in str(raised.value)
        assert all_end(pids)
        with pytest.raises(RankError, match="rank 2"):
            ranks.rpc("comm_stats")


@pytest.mark.slow
@both
def test_a_rank_that_hangs_past_the_deadline_is_named(transport):
    with running(lambda: RankPool(3, transport, timeout_s=0.3)) as ranks:
        pids = ranks.pids
        with pytest.raises(RankError, match="rank 1 does not respond"):
            ranks.rpc("run", fail, 1, "hangs")
        assert all_end(pids)


@pytest.mark.slow
@both
def test_a_rank_killed_in_the_middle_of_a_step_is_named(transport):
    """The signal is sent when the plan is made, and arrives before or while it runs."""
    engine = LLMEngine(
        RandomSource(DENSE), tensor_parallel_size=2,
        rank_transport=transport, **KNOBS,
    )  # fmt: skip
    pids = engine.feature("distributed").pool.pids
    steps = 0

    def kill(plan: SchedulerOutput) -> None:
        nonlocal steps
        steps += 1
        if steps == 5:
            os.kill(pids[1], signal.SIGKILL)

    engine.observers.append(kill)
    with pytest.raises(RankError, match=rf"rank 1 \(pid {pids[1]}\) was killed by SIGKILL"):
        engine.generate(PROMPTS, SamplingParams(max_tokens=30, ignore_eos=True))
    assert all_end(pids)
    assert not engine.has_unfinished_requests()


@pytest.mark.slow
def test_a_rank_that_does_not_read_is_named_though_nobody_waits_for_it():
    with running(lambda: RankPool(1, timeout_s=0.3)) as ranks:
        os.kill(ranks.pids[0], signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 0 does not take what it is told"):
            ranks.rpc("run", len, bytes(1 << 22))
        assert all_end(ranks.pids)


@pytest.mark.slow
def test_a_rank_killed_between_two_steps_ends_the_others_without_being_asked():
    with running(lambda: RankPool(3)) as ranks:
        pids = ranks.pids
        os.kill(pids[0], signal.SIGKILL)
        assert all_end(pids)
        with pytest.raises(RankError, match="rank 0"):
            ranks.rpc("comm_stats")


@pytest.mark.slow
def test_an_engine_that_is_closed_leaves_no_process_and_no_memory():
    with LLM(RandomSource(DENSE), tensor_parallel_size=2, dtype="float64") as llm:
        pids = llm.llm_engine.feature("distributed").pool.pids
        assert not segments(os.getpid()), "the segment has no name once all have attached"
        llm.close()
    assert all_end(pids) and not segments(os.getpid())


@pytest.mark.slow
def test_an_engine_that_is_forgotten_leaves_no_process_and_no_memory():
    forgotten = LLMEngine(RandomSource(DENSE), tensor_parallel_size=2)
    pids = forgotten.feature("distributed").pool.pids
    del forgotten
    gc.collect()
    assert all_end(pids) and not segments(os.getpid())


SCRIPT = """
import sys
from mini_vllm import LLM, SamplingParams
from mini_vllm.tests.ranks_support import DENSE, PROMPTS, RandomSource

llm = LLM(RandomSource(DENSE), tensor_parallel_size=2, rank_transport=sys.argv[2])
engine = llm.llm_engine

def begun(plan):
    engine.observers.clear()
    print(*engine.feature("distributed").pool.pids, flush=True)
    if sys.argv[1] == "raise":
        raise SystemExit("as a script with a bug would")

engine.observers.append(begun)
try:
    while True:
        llm.generate(PROMPTS, SamplingParams(max_tokens=400, ignore_eos=True))
except KeyboardInterrupt:
    text = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=3, ignore_eos=True))
    print("interrupted", len(text[0].outputs[0].token_ids), flush=True)
"""


def script(tmp_path: Path, how: str, transport: str = "shared_memory") -> subprocess.Popen:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    environment = {**os.environ, "PYTHONPATH": os.getcwd(), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(path), how, transport],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        start_new_session=True,
    )  # fmt: skip


@pytest.mark.slow
@both
def test_when_the_engines_process_is_killed_the_ranks_end_by_themselves(tmp_path, transport):
    process = script(tmp_path, "kill", transport)
    pids = [int(pid) for pid in process.stdout.readline().split()]
    assert len(pids) == 2 and all(map(is_alive, pids))
    process.kill()
    process.communicate()
    assert all_end(pids) and not segments(process.pid)


@pytest.mark.slow
def test_a_script_that_ends_with_an_error_ends_its_ranks(tmp_path):
    process = script(tmp_path, "raise")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 1
    assert all_end([int(pid) for pid in out.split()])


@pytest.mark.slow
def test_ctrl_c_stops_the_step_and_the_ranks_serve_on(tmp_path, usual_signals):
    """The terminal sends it to the whole group of processes; the ranks leave it to the engine."""
    process = script(tmp_path, "interrupt")
    pids = [int(pid) for pid in process.stdout.readline().split()]
    out, err = "", ""
    for _ in range(4):  # Python drops one that arrives while it runs a finalizer
        os.killpg(process.pid, signal.SIGINT)
        try:
            out, err = process.communicate(timeout=45)
            break
        except subprocess.TimeoutExpired:
            continue
    else:
        os.killpg(process.pid, signal.SIGKILL)
    assert out.split() == ["interrupted", "3"], err
    assert process.returncode == 0 and all_end(pids)


@pytest.mark.slow
def test_a_script_needs_no_guard_and_runs_once(tmp_path):
    path = tmp_path / "unguarded.py"
    path.write_text(
        "from mini_vllm import LLM\n"
        "print('begun', flush=True)\n"
        "llm = LLM('byte-llama', tensor_parallel_size=2)\n"
        "print(len(llm.generate('a')[0].outputs[0].token_ids))\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, env=environment, timeout=60
    )
    assert (ended.stdout.split(), ended.stderr) == (["begun", "16"], "")


@pytest.mark.slow
def test_after_a_step_that_was_interrupted_the_answers_are_those_of_a_fresh_engine():
    """Results that were under way when the step was given up do not reach later steps."""
    engine = ranked(RandomSource(DENSE), pipeline_parallel_size=4)

    class Stop(Exception):
        pass

    steps = 0

    def stop(plan: SchedulerOutput) -> None:
        nonlocal steps
        steps += 1
        if steps == 7:
            raise Stop

    engine.observers.append(stop)
    with pytest.raises(Stop):
        engine.generate(PROMPTS, SamplingParams(max_tokens=9, ignore_eos=True))
    engine.observers.clear()
    assert answer(engine).tokens == alone(RandomSource(DENSE)).tokens


@pytest.mark.slow
def test_aborted_requests_leave_batches_in_flight_that_harm_nobody():
    engine = ranked(RandomSource(DENSE), pipeline_parallel_size=4)
    params = SamplingParams(max_tokens=9, temperature=1.0, ignore_eos=True)
    for round_ in range(3):
        ids = [engine.add_request(prompt, params) for prompt in PROMPTS]
        for _ in range(2 + round_):
            engine.step()
        for request_id in ids:
            engine.abort_request(request_id)
    assert answer(engine).tokens == alone(RandomSource(DENSE)).tokens


@pytest.mark.slow
def test_a_pool_serves_one_engine_after_the_other():
    for _ in range(2):
        for size in (1, 2, 4):
            assert answer(ranked(RandomSource(DENSE), tensor_parallel_size=size)).tokens
    assert pool().is_alive
