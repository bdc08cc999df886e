"""A real `vllm serve` under `vllm bench serve`: rates, a cache that is reset, one that is not.

    course gpu run 18-02                       vLLM 0.22.1 on a GPU, the shipped model
    course gpu run 18-02 --cpu                 vLLM's CPU build: the same commands, small numbers
    course gpu run 18-02 -- --model Qwen/Qwen2.5-0.5B-Instruct --rates 4 8 16 --num-prompts 1000 \
        --input-len 512 --output-len 128
    python run.py --predict                    what arithmetic says, without vLLM

The server is a process of its own, listens on this machine only, and ends with the run. `--keep
FOLDER` keeps each run's JSON, without texts. Needs vllm==0.22.1; without it the run says so.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import serve_stream
from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[2] / "models" / "byte-llama"
BLOCK = 16
VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
OWN = ("generated_texts", "model_id", "tokenizer_id", "date", "label", "errors")
"""Of a saved run, what is left out: texts, and what says where it was made."""
COUNTERS = ("vllm:prefix_cache_hits", "vllm:prefix_cache_queries", "vllm:num_preemptions")


def ask(port: int, path: str, method: str = "GET") -> str:
    """An answer of the server as text."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def counters(port: int) -> dict[str, float]:
    """Of `/metrics`, the sum over the labels of each."""
    text = ask(port, "/metrics")
    return {
        name: sum(
            float(line.rsplit(" ", 1)[1])
            for line in text.splitlines()
            if line.startswith(f"{name}_total{{")
        )
        for name in COUNTERS
    }


def bench(arguments: argparse.Namespace, port: int, rate: float, seed: int, file: Path) -> Any:
    """One run of `vllm bench serve`: the JSON that it saved."""
    flags = (
        "bench serve --backend openai --endpoint /v1/completions "
        f"--base-url http://127.0.0.1:{port} --model {arguments.model} "
        "--served-model-name served --dataset-name random "
        f"--random-input-len {arguments.input_len} --random-output-len {arguments.output_len} "
        f"--num-prompts {arguments.num_prompts} --num-warmups 2 --request-rate {rate} "
        f"--seed {seed} --temperature 0 --percentile-metrics ttft,tpot,itl,e2el "
        "--metric-percentiles 50,90,99 "
        f"--goodput ttft:{arguments.ttft} tpot:{arguments.tpot} --disable-tqdm "
        f"--save-result --save-detailed --result-dir {file.parent} --result-filename {file.name}"
    )
    ran = subprocess.run([*VLLM, *flags.split()], capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(ran.stdout[-2000:] + ran.stderr[-3000:])
    found = json.loads(file.read_text(encoding="utf-8"))
    for name in OWN:
        found.pop(name, None)
    return found


def drive(arguments: argparse.Namespace) -> None:
    """Start the server, run every benchmark, give the JSONs and the counters."""
    port = serve_stream.free_port()
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1"}  # the route that resets the cache
    env |= {"TORCH_COMPILE_DISABLE": "1"} if versions.on_cpu() else {}
    flags = (
        f"serve {arguments.model} --host 127.0.0.1 --port {port} --served-model-name served "
        f"--max-model-len {arguments.context} --gpu-memory-utilization {arguments.util} "
        f"--block-size {BLOCK}"
    )
    if versions.on_cpu():
        flags += " --dtype float32 --enforce-eager"
    server = subprocess.Popen([*VLLM, *flags.split()], env=env)
    came: list[dict[str, Any]] = []
    try:
        serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        processes.tell("the server is up")
        plan = [(rate, seed, True) for seed, rate in enumerate(arguments.rates, start=1)]
        plan += [(arguments.rates[-1], len(arguments.rates), False)]
        with tempfile.TemporaryDirectory() as folder:
            for number, (rate, seed, reset) in enumerate(plan):
                if reset:
                    ask(port, "/reset_prefix_cache", "POST")
                before = counters(port)
                found = bench(arguments, port, rate, seed, Path(folder) / f"{number}.json")
                after = counters(port)
                moved = {name: after[name] - before[name] for name in COUNTERS}
                came.append({"rate": rate, "seed": seed, "reset": reset, **moved, "bench": found})
                processes.tell(f"rate {rate:g}, seed {seed}, {'reset' if reset else 'not reset'}")
    finally:
        serve_stream.end(server)
    processes.answer({"runs": came})


def verdict(name: str, holds: bool, came: str) -> bool:
    """One line for an expectation."""
    print(f"{'as predicted' if holds else 'NOT AS PREDICTED'}: {name}: {came}")
    return holds


def judge(lab: ModuleType, arguments: argparse.Namespace, runs: list[dict[str, Any]]) -> bool:
    """Each run through your functions, beside what vLLM's own report says of it."""
    right = True
    slo = {"ttft": arguments.ttft / 1e3, "tpot": arguments.tpot / 1e3}
    points: list[tuple[float, float]] = []
    found: dict[tuple[float, int, bool], float] = {}
    with tempfile.TemporaryDirectory() as folder:
        for number, one in enumerate(runs):
            file = Path(folder) / f"{number}.json"
            file.write_text(json.dumps(one["bench"]), encoding="utf-8")
            if arguments.keep:
                arguments.keep.mkdir(parents=True, exist_ok=True)
                (arguments.keep / f"run-{number}.json").write_text(json.dumps(one["bench"]) + "\n")
            run, theirs = lab.load_run(file), one["bench"]
            row = lab.summarize(run, slo)
            words = f"rate {one['rate']:g}, {'cache reset' if one['reset'] else 'cache kept'}"
            print(
                f"=== {words}: TTFT p50/p99 {row.ttft_p50_ms:.1f}/{row.ttft_p99_ms:.1f} ms, ITL "
                f"p50/p99 {row.itl_p50_ms:.2f}/{row.itl_p99_ms:.2f} ms, output "
                f"{row.output_tps:.1f} tok/s, goodput {row.goodput_rps:.2f} of "
                f"{one['rate']:g} requests/s"
            )
            own = [row.ttft_p99_ms, row.itl_p99_ms, row.tpot_p99_ms, row.output_tps]
            keys = ("p99_ttft_ms", "p99_itl_ms", "p99_tpot_ms", "output_throughput")
            said = [theirs[key] for key in keys]
            near = all(abs(a - b) <= 1e-6 * abs(b) + 1e-3 for a, b in zip(own, said, strict=True))
            right &= verdict("your summary is vLLM's own report", near, str(near))
            offered = one["rate"] * arguments.output_len
            low = (
                arguments.num_prompts
                * arguments.output_len
                / (arguments.num_prompts / one["rate"] + row.e2el_max_s)
            )
            held = low * 0.95 <= row.output_tps <= offered * 1.05
            right &= verdict(
                "output tokens per second are the offered load", held,
                f"{row.output_tps:.1f}, at least {low:.1f}, offered {offered:.1f}",
            )  # fmt: skip
            hits = one["vllm:prefix_cache_hits"] / max(one["vllm:prefix_cache_queries"], 1)
            found[one["rate"], one["seed"], one["reset"]] = hits
            print(f"found in the cache: {hits:.1%}")
            if one["reset"]:
                points.append((one["rate"], row.ttft_p99_ms))
            else:
                most = sum((length - 1) // BLOCK * BLOCK for length in run.input_lens)
                share = most / sum(run.input_lens)
                right &= verdict(
                    f"the same seed again finds at least {0.95 * share:.1%}",
                    hits >= 0.95 * share, f"{hits:.1%}",
                )  # fmt: skip
                before = found.get((one["rate"], one["seed"], True), 0.0)
                right &= verdict(
                    "and a reset takes that away", before < 0.6 * hits, f"{before:.1%} after it"
                )
            print(f"preemptions: {one['vllm:num_preemptions']:.0f}")
    try:
        print("knee (last rate that holds, first that does not):", lab.knee(points, arguments.ttft))
    except ValueError as error:
        print("no knee:", error)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="A benchmark of a real vllm serve.")
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--rates", type=float, nargs="+", default=[2, 4])
    parser.add_argument("--num-prompts", type=int, default=24)
    parser.add_argument("--input-len", type=int, default=96)
    parser.add_argument("--output-len", type=int, default=12)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--ttft", type=float, default=800, help="limit in milliseconds")
    parser.add_argument("--tpot", type=float, default=100, help="limit in milliseconds")
    parser.add_argument("--util", type=float, default=0.1, help="share of the memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--keep", type=Path, help="a folder for the runs' JSON")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--drive", action="store_true", help="the server, in this process")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments)
        return 0
    for rate in arguments.rates:
        span = arguments.num_prompts / rate
        print(
            f"predicted, rate {rate:g}: the last request comes at {span:.1f} s, and below the knee "
            f"{rate * arguments.output_len:g} output tokens per second are offered"
        )
    full = (arguments.input_len - 1) // BLOCK * BLOCK
    print(f"predicted, the same seed again: {full} of {arguments.input_len} tokens are found")
    if arguments.predict:
        return 0
    lab = load_module(Path(arguments.file))
    versions.need_vllm("--predict, or the tests")
    print("starting a server", flush=True)
    names = ("model", "num_prompts", "input_len", "output_len", "context", "ttft", "tpot", "util")
    command = [__file__, "--drive", "--rates", *map(str, arguments.rates)]
    for name in names:
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    env = {**os.environ}
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    runs = processes.start(command, env=env).needed()["runs"]
    right = judge(lab, arguments, runs)
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
