"""What `vllm-flight-recorder` costs a step of the real engine, measured in pairs.

    course engine run -m conformance.flight_cost [WAVES]

Two engines in this process serve the same 64 requests, one with the recorder. Once all of them
decode, the engines take one step each in turn, and each begins every other pair. Printed are the
medians of a step and of the pairs' differences, with the interval that holds the latter in 95 of
100 such runs. Then the recording engine goes on alone, with clocks around the recorder's own code.
That is less noisy than a difference of two steps where other work shares the machine, and says
nothing of caches that the recorder fills or of memory that it leaves.
"""

from __future__ import annotations

import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conformance.real_engine import MODEL, ROOT, provenance
from labkit import processes

RUNNING, SEED = 64, 17
WAVES, STEPS = 4, 380
"""STEPS: pairs of a wave, in which 64 requests begin, decode, and are aborted."""
RECORDER = ROOT / "vllm-flight-recorder"
COMMAND = "course engine run -m conformance.flight_cost"


def engine(**more: Any) -> Any:
    """The real engine, with its core in this process and its model in another."""
    import vllm

    return vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=512, block_size=16,
        max_num_seqs=RUNNING, max_num_batched_tokens=8192, num_gpu_blocks_override=2100,
        enforce_eager=True, use_tqdm_on_load=False, gpu_memory_utilization=0.1, **more,
    )  # fmt: skip


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


def begin(llm: Any, wave: int) -> list[str]:
    """Have 64 requests decode; their ids."""
    import vllm

    draw, names = random.Random(SEED + wave), []
    for number in range(RUNNING):
        prompt: Any = {"prompt_token_ids": [draw.randrange(256) for _ in range(32 + number)]}
        params = vllm.SamplingParams(temperature=0.0, max_tokens=512, ignore_eos=True)
        names.append(f"{wave}-{number}")
        llm.llm_engine.add_request(names[-1], prompt, params)
    for _ in range(8):
        llm.llm_engine.step()
    counts = scheduler_of(llm).get_request_counts()
    assert counts == (RUNNING, 0), f"running and waiting: {counts}; need {RUNNING} and 0"
    return names


def seconds(call: Callable[[], Any]) -> float:
    """How long a call takes."""
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def in_pairs(plain: Any, recording: Any, wave: int) -> list[tuple[float, float]]:
    """Seconds of a step without the recorder and with it, of one wave."""
    found = []
    names = [(llm, begin(llm, wave)) for llm in (plain, recording)]
    for number in range(STEPS):
        if number % 2:
            with_it = seconds(recording.llm_engine.step)
            found.append((seconds(plain.llm_engine.step), with_it))
        else:
            without = seconds(plain.llm_engine.step)
            found.append((without, seconds(recording.llm_engine.step)))
    for llm, theirs in names:
        llm.llm_engine.abort_request(theirs)
    return found


def own_code(recording: Any, wave: int) -> list[tuple[float, float, float]]:
    """Seconds of a step, those of the recorder in it, and its seconds of the processor."""
    flight = scheduler_of(recording).flight
    note, spent = flight.note, [0.0, 0.0]

    def timed(*arguments: Any) -> Any:
        began, busy = time.perf_counter(), time.thread_time()
        result = note(*arguments)
        spent[1] += time.thread_time() - busy
        spent[0] += time.perf_counter() - began
        return result

    begin(recording, wave)
    flight.note = timed
    found = []
    for _ in range(STEPS):
        spent[:] = [0.0, 0.0]
        whole = seconds(recording.llm_engine.step)
        found.append((whole, spent[0], spent[1]))
    assert flight.is_on, "the recorder has stopped"
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Of the median, at 95 %, by order statistics."""
    ordered, half = sorted(values), 0.98 * len(values) ** 0.5
    return ordered[int(len(values) / 2 - half)], ordered[int(len(values) / 2 + half)]


def main(arguments: Sequence[str]) -> int:
    """Print what `labkit.processes.Ran.result` reads, and the same in words."""
    waves = int(arguments[0]) if arguments else WAVES
    if waves < 1:
        raise SystemExit(f"WAVES={waves}: need at least 1")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_DISABLE_REQUEST_ID_RANDOMIZATION"] = "1"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.path.insert(0, str(RECORDER))
    path = os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(RECORDER), *([path] if path else [])])
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_FLIGHT_RECORDER_DIR"] = folder
        plain, recording = engine(), engine(scheduler_cls="vllm_flight_recorder.Recording")
        load = os.getloadavg()[0]
        pairs = [pair for wave in range(waves) for pair in in_pairs(plain, recording, wave)]
        own = own_code(recording, waves)
        for llm in (plain, recording):
            llm.llm_engine.engine_core.shutdown()
        size = sum(file.stat().st_size for file in Path(folder).iterdir())
    step = statistics.median(without for without, _ in pairs)
    differences = [with_it - without for without, with_it in pairs]
    difference, (low, high) = statistics.median(differences), interval(differences)
    whole, spent, busy = (statistics.median(column) for column in zip(*own, strict=True))
    mean = statistics.mean(each for _, _, each in own)
    print(f"{RUNNING} running, {len(pairs)} pairs: a step takes {step * 1e3:.2f} ms (median)")
    print(
        f"with the recorder {difference * 1e6:+.0f} us ({low * 1e6:+.0f} to {high * 1e6:+.0f}), "
        f"{difference / step:+.2%} ({low / step:+.2%} to {high / step:+.2%})"
    )
    print(
        f"the recorder's own code: {spent * 1e6:.0f} us of {whole * 1e3:.2f} ms, "
        f"{spent / whole:.2%}; {busy * 1e6:.0f} us of a processor (mean {mean * 1e6:.0f})"
    )
    processes.answer({
        "running": RUNNING, "pairs": len(pairs), "step_ms": step * 1e3,
        "difference_us": difference * 1e6, "interval_us": [low * 1e6, high * 1e6],
        "own_us": spent * 1e6, "own_step_ms": whole * 1e3, "own_busy_us": busy * 1e6,
        "own_busy_mean_us": mean * 1e6, "bytes": size, "load": load, "cores": os.cpu_count(),
        **provenance("float32"), "command": f"{COMMAND} {waves}",
    })  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
