"""Nine settings of a real server under 64 clients: six fit the cost of a step, three are predicted.

    course engine run phase-18-performance-engineering/experiments/held_out.py --measure mine
    python phase-18-performance-engineering/experiments/held_out.py --judge mine

`--measure` needs vllm==0.22.1 on a processor. Each setting is a server of its own, recorded by
`vllm-flight-recorder`, under a closed loop of 64 clients; the run is repeated. The model has the
shape below and random weights: the shipped one is so small that the server would spend its time on
the front end. `--judge` needs no vLLM: it fits the six, simulates the three, and puts the error
beside the spread of the server's own repeats. Which three are held out was written down before
anything was measured.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from math import log
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SHAPE = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64,
}  # fmt: skip
SETTINGS = [
    {"max_num_batched_tokens": budget, "max_num_seqs": seqs}
    for budget in (128, 256, 512)
    for seqs in (16, 32, 64)
]
HELD_OUT = [
    {"max_num_batched_tokens": 128, "max_num_seqs": 64},
    {"max_num_batched_tokens": 256, "max_num_seqs": 32},
    {"max_num_batched_tokens": 512, "max_num_seqs": 16},
]
FIXED = {"num_blocks": 2048, "block_size": 16, "max_model_len": 512}
CLIENTS, REQUESTS, REPEATS, WARM = 64, 144, 3, 64
RAMP = 0.05
"""Seconds between the first requests of two clients."""
KEPT_STEPS = 500
"""Timed steps kept per fitted setting, drawn by a seed."""


def workload(repeat: int) -> list[tuple[int, int]]:
    """Prompt and output lengths of one repetition: the same for every setting."""
    draw = random.Random(1000 + repeat)
    return [
        (round(draw.triangular(32, 256, 96)), round(draw.triangular(8, 64, 24)))
        for _ in range(REQUESTS)
    ]


# ------------------------------------------------------------------ the server and its clients


async def clients(port: int, repeat: int, count: int = REQUESTS) -> list[dict[str, Any]]:
    """Each request's times at the client, on `time.perf_counter`'s clock, in order of sending."""
    import aiohttp

    work = list(enumerate(workload(repeat)))[:count]
    work.reverse()
    found: list[dict[str, Any]] = []
    url = f"http://127.0.0.1:{port}/v1/completions"

    async def one(session: Any, number: int, prompt: int, output: int) -> None:
        draw = random.Random(number + 10_000 * repeat)
        name = f"{repeat}-{number}"
        body = {
            "model": "served", "prompt": [draw.randrange(256) for _ in range(prompt)],
            "max_tokens": output, "temperature": 0, "ignore_eos": True, "stream": True,
        }  # fmt: skip
        row: dict[str, Any] = {"id": name, "prompt": prompt, "output": output, "chunks": []}
        row["sent"], row["sent_wall"] = time.perf_counter(), time.time()
        async with session.post(url, json=body, headers={"X-Request-Id": name}) as answer:
            answer.raise_for_status()
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    row["chunks"].append(time.perf_counter())
        found.append(row)

    async def client(session: Any, place: int) -> None:
        await asyncio.sleep(place * RAMP)
        while work:
            number, (prompt, output) = work.pop()
            await one(session, number, prompt, output)

    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        await asyncio.gather(*(client(session, place) for place in range(CLIENTS)))
    return sorted(found, key=lambda row: row["sent"])


def one_setting(setting: dict[str, int], folder: Path) -> list[list[dict[str, Any]]]:
    """Start a server, run every repetition, and end it; the recording lies in `folder`."""
    sys.path.insert(0, str(ROOT))
    from conformance import serve_stream

    port = serve_stream.free_port()
    flags = (
        f"serve {ROOT / 'models' / 'byte-llama'} --host 127.0.0.1 --port {port} "
        f"--served-model-name served --dtype float32 --enforce-eager --load-format dummy "
        f"--max-model-len {FIXED['max_model_len']} --block-size {FIXED['block_size']} "
        f"--num-gpu-blocks-override {FIXED['num_blocks']} --no-enable-prefix-caching "
        f"--max-num-batched-tokens {setting['max_num_batched_tokens']} "
        f"--max-num-seqs {setting['max_num_seqs']} "
        "--scheduler-cls vllm_flight_recorder.Recording --disable-uvicorn-access-log "
        "--enable-request-id-headers"
    ).split()
    flags += ["--hf-overrides", json.dumps(SHAPE)]
    env = os.environ | {
        "PYTHONPATH": str(ROOT / "vllm-flight-recorder"),
        "VLLM_FLIGHT_RECORDER_DIR": str(folder), "TORCH_COMPILE_DISABLE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1",
    }  # fmt: skip
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *flags]
    with (folder / "server.log").open("w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=subprocess.STDOUT)
        try:
            serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
            asyncio.run(clients(port, REPEATS, WARM))  # warms up, and is not kept
            return [asyncio.run(clients(port, repeat)) for repeat in range(REPEATS)]
        finally:
            serve_stream.end(server)


def measure(out: Path) -> None:
    """Every setting in a random order; one file for all."""
    sys.path.insert(0, str(ROOT))
    from mini_vllm.simulate.cost import FEATURES
    from mini_vllm.simulate.steps import read_steps

    out.mkdir(parents=True, exist_ok=True)
    order = list(SETTINGS)
    random.Random(18).shuffle(order)
    rows = []
    for setting in order:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            began = time.monotonic()
            repeats = one_setting(setting, folder)
            (folder / "server.log").unlink()
            timed = read_steps(folder)
            row = {"setting": setting, "host": timed.host, "source": timed.source}
            row |= ways(folder, repeats)
            row["repeats"] = [seen(each) for each in repeats]
            if setting not in HELD_OUT:
                steps = timed.steps
                chosen = random.Random(1).sample(steps, min(KEPT_STEPS, len(steps)))
                row["steps"] = [
                    [*(getattr(work, feature) for feature in FEATURES), round(seconds, 7)]
                    for work, seconds in chosen
                ]
            rows.append(row)
            took = time.monotonic() - began
            print(f"{setting}: {len(timed.steps)} steps, {took:.0f} s", flush=True)
    rows.sort(key=lambda row: SETTINGS.index(row["setting"]))
    found = {"processor": processor(), "vllm": "0.22.1", "features": FEATURES, "rows": rows}
    text = json.dumps(found, separators=(",", ":"))
    with gzip.GzipFile(out / "held-out.json.gz", "wb", mtime=0) as file:
        file.write(text.encode())


def processor() -> str:
    """As the machine names it, with the number that may be used."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), "?")
    return f"{len(os.sched_getaffinity(0))} x {name}"


def ways(folder: Path, repeats: list[list[dict[str, Any]]]) -> dict[str, float]:
    """Medians of the ways that a client sees and the engine does not, in seconds.

    `turnaround` is there and back: from the engine's last token to the client, and from a request
    that a client sends to its arrival at the engine's front end.
    """
    from mini_vllm.observe.flight import Flight, pairs

    arrived, first, numbers = {}, {}, {}
    counts: list[tuple[int, int]] = []
    for line in Flight(folder):
        if "add" in line:
            numbers[line["add"]] = line["id"]
            arrived[line["id"]] = line["at"]
        elif "out" in line:
            counts = pairs(line["said"]) if "said" in line else counts
            for number, _ in counts:
                first.setdefault(numbers[number], line["t"])
    there, back = [], []
    for row in (row for repeat in repeats for row in repeat):
        name = next(each for each in arrived if row["id"] in each.split("cmpl-")[-1][:12])
        there.append(arrived[name] - row["sent_wall"])
        back.append(row["chunks"][0] - first[name])
    return {"there": median(there), "back": median(back)}


def seen(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """What the clients of one repetition saw: TTFT of each request, and the mean gap."""
    gaps = [
        later - earlier
        for row in rows
        for earlier, later in zip(row["chunks"], row["chunks"][1:], strict=False)
    ]
    began = min(row["sent"] for row in rows)
    return {
        "ttft": [round(row["chunks"][0] - row["sent"], 5) for row in rows],
        "itl": fmean(gaps),
        "duration": max(row["chunks"][-1] for row in rows) - began,
        "chunks": sum(len(row["chunks"]) for row in rows),
    }


# ------------------------------------------------------------------ the prediction


def fitted(found: dict[str, Any]) -> Any:
    """The cost of a step, from the six settings that are not held out."""
    from mini_vllm.simulate.cost import StepWork, fit

    steps, hosts = [], []
    for row in found["rows"]:
        if row["setting"] in HELD_OUT:
            continue
        hosts.append(row["host"])
        for *values, seconds in row["steps"]:
            steps.append((StepWork(*values), seconds))
    features = ("tokens", "requests", "prefill_pairs", "decode_context")
    source = f"{found['processor']}, vLLM {found['vllm']}"
    return fit(steps, source, features, host=median(hosts))


def predicted(found: dict[str, Any], cost: Any, setting: dict[str, int]) -> list[dict[str, Any]]:
    """Each repetition of a setting, simulated."""
    from mini_vllm.config import EngineConfig
    from mini_vllm.simulate.simulator import Simulator
    from mini_vllm.simulate.traces import TraceRequest

    known = [row for row in found["rows"] if row["setting"] not in HELD_OUT]
    way = median(row["there"] + row["back"] for row in known)
    config = {**FIXED, **setting, "enable_prefix_caching": False, "async_scheduling": False}
    repeats = []
    for repeat in range(REPEATS):
        trace = [TraceRequest(0.0, prompt, output) for prompt, output in workload(repeat)]
        result = Simulator(EngineConfig.of(config), cost).run(
            trace, concurrency=CLIENTS, turnaround=way, ramp=RAMP
        )
        gaps = sum(g * n for g, n in zip(result.gaps, result.gap_counts, strict=True))
        repeats.append({
            "ttft": [each.ttft + way for each in result.outcomes],
            "itl": gaps / sum(result.gap_counts),
            "duration": result.duration,
        })  # fmt: skip
    return repeats


NAMES = ("ITL mean", "TTFT p50", "TTFT p99", "duration")
T_16 = 2.120
"""Student's t at 97.5 % with 16 degrees of freedom."""


def numbers(repeat: dict[str, Any]) -> list[float]:
    """The four of `NAMES`, in seconds."""
    import numpy as np

    p50, p99 = np.quantile(repeat["ttft"], (0.5, 0.99)).tolist()
    return [repeat["itl"], p50, p99, repeat["duration"]]


def judge(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Per setting: measured and predicted means over repetitions, error, and the repeats' spread.

    The spread is (largest - smallest) / mean of the server's own repetitions.
    """
    cost = fitted(found)
    rows = []
    for row in found["rows"]:
        real = list(zip(*map(numbers, row["repeats"]), strict=True))
        said = list(zip(*map(numbers, predicted(found, cost, row["setting"])), strict=True))
        rows.append({
            "setting": row["setting"],
            "held_out": row["setting"] in HELD_OUT,
            "real": [fmean(each) for each in real],
            "predicted": [fmean(each) for each in said],
            "error": [fmean(p) / fmean(r) - 1 for r, p in zip(real, said, strict=True)],
            "middle": [geometric_mean(each) for each in real],
            "range": [[min(each), max(each)] for each in real],
            "spread": [(max(each) - min(each)) / fmean(each) for each in real],
        })  # fmt: skip
    return rows


def told_apart(found: dict[str, Any]) -> list[float]:
    """Per number of `NAMES`: how far apart the logarithms of two settings' geometric means must be.

    Half of a 95 % interval of their difference. A number is a setting's part, a repetition's part
    (the same requests in every setting) and noise; the noise of all nine settings is pooled, which
    leaves 16 degrees of freedom. Three runs of one setting alone would tell little: three and
    three without any difference between them lie wholly apart in 1 of 10 cases.
    """
    import numpy as np

    runs = np.log([[numbers(each) for each in row["repeats"]] for row in found["rows"]])
    settings, repeats, _ = runs.shape
    noise = runs - runs.mean(0) - runs.mean(1, keepdims=True) + runs.mean((0, 1))
    variance = (noise**2).sum((0, 1)) / ((settings - 1) * (repeats - 1))
    return (T_16 * np.sqrt(2 * variance / repeats)).tolist()


def directions(
    rows: list[dict[str, Any]], apart: list[float] | None = None
) -> tuple[int, int, int]:
    """Pairs of settings that differ in one knob: right, wrong, and too near for the server to tell.

    With `apart` (`told_apart`) too near are two settings whose means lie within it; without, two
    whose repetitions overlap.
    """
    right = wrong = near = 0
    for place, one in enumerate(rows):
        for other in rows[place + 1 :]:
            if sum(one["setting"][k] != other["setting"][k] for k in one["setting"]) != 1:
                continue
            for k in range(len(NAMES)):
                rise = log(other["middle"][k] / one["middle"][k])
                if apart is not None:
                    unclear = abs(rise) < apart[k]
                else:
                    (low, high), (low2, high2) = one["range"][k], other["range"][k]
                    unclear = low2 <= high and low <= high2
                if unclear:
                    near += 1
                elif (rise > 0) == (other["predicted"][k] > one["predicted"][k]):
                    right += 1
                else:
                    wrong += 1
    return right, wrong, near


def table(rows: list[dict[str, Any]], apart: list[float]) -> str:
    """For a reader; `apart` as `told_apart` gives it."""
    lines = [f"{'budget x seqs':<16}" + "".join(f"{name:>26}" for name in NAMES)]
    for row in rows:
        budget, seqs = row["setting"].values()
        cells = [
            f"{1e3 * real:>9,.0f} {error:>+7.1%} ±{spread / 2:>5.1%}"
            for real, error, spread in zip(row["real"], row["error"], row["spread"], strict=True)
        ]
        mark = "*" if row["held_out"] else " "
        lines.append(f"{f'{budget} x {seqs}':<15}{mark}" + "".join(f"{c:>26}" for c in cells))
    right, wrong, near = directions(rows, apart)
    lines.append(
        "measured in ms, error of the prediction, half the spread of 3 repeats; * held out"
    )
    lines.append(
        f"directions: {right} right, {wrong} wrong, {near} too near for the server to tell"
    )
    return "\n".join(lines)


def load(folder: Path) -> dict[str, Any]:
    """What `--measure` kept."""
    with gzip.open(folder / "held-out.json.gz", "rt", encoding="utf-8") as file:
        return json.load(file)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Predict settings of a server that was not fitted."
    )
    parser.add_argument("--measure", type=Path, metavar="FOLDER")
    parser.add_argument("--judge", type=Path, metavar="FOLDER")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
    if arguments.judge:
        sys.path.insert(0, str(ROOT))
        found = load(arguments.judge)
        print(found["processor"], fitted(found).terms, sep="\n")
        print(table(judge(found), told_apart(found)))


if __name__ == "__main__":
    main()
