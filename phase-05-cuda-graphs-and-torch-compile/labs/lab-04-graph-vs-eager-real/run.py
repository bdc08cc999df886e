"""Graphs against eager on a real vLLM 0.22.1: predict the captures, time the decode step, compare.

    course gpu run 05-04
    python run.py --model facebook/opt-125m --bandwidth 300e9       L4; checks the weights' floor
    python run.py --arms A B --batches 1 8 --repeats 5
    python run.py --max-num-seqs 1024 --batches 512 513             around the top rung
    python run.py --file starter.py                                 your functions
    python run.py --pretend                                         no GPU: an invented engine

Every arm is a process of its own. For each batch it generates once to warm up, then `--repeats`
times `--short` and `--long` tokens per request; a decode step is the difference over the number of
tokens. A last process counts graphs and padding. Needs vllm==0.22.1 and a CUDA GPU.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
READ_BYTES = {"facebook/opt-125m": 2 * 123_664_896}
"""Weights that a decode step reads, in float16: layers, final norm, output head. See the README."""


# --- one engine, in a process of its own ----------------------------------------------------------


def one_arm(lab: ModuleType, arguments: argparse.Namespace) -> None:
    """Start an engine, time it or count its graphs, print the result."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    more: dict[str, Any] = dict(lab.ARMS[arguments.one])
    if arguments.count:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the counter is read in this process
        more |= {"cudagraph_metrics": True, "disable_log_stats": False}
    begun = time.monotonic()
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    llm = LLM(
        model=arguments.model,
        gpu_memory_utilization=arguments.util,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        enable_prefix_caching=False,
        **more,
    )
    processes.tell(f"started in {time.monotonic() - begun:.0f} s")

    def seconds(batch: int, tokens: int) -> float:
        prompts = [{"prompt_token_ids": [5 + n % 90, *range(5, 20)]} for n in range(batch)]
        # Nothing may end early, and no text is wanted.
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - start

    timings: dict[int, list[list[float]]] = {}
    for batch in arguments.batches:
        seconds(batch, arguments.short)
        if not arguments.count:
            timings[batch] = [
                [seconds(batch, arguments.short), seconds(batch, arguments.long)]
                for _ in range(arguments.repeats)
            ]
            processes.tell(f"batch {batch} timed")
    config = llm.llm_engine.vllm_config
    result = {
        "device": current_platform.get_device_name(),
        "mode": config.compilation_config.cudagraph_mode.name,
        "sizes": config.compilation_config.cudagraph_capture_sizes,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "layers": config.model_config.get_num_layers(config.parallel_config),
        "timings": timings,
    }
    if arguments.count:
        from vllm.compilation.counter import compilation_counter

        llm.llm_engine.do_log_stats()  # the padding table, now
        result["graphs"] = compilation_counter.num_cudagraph_captured
    processes.answer(result)


def start(arguments: argparse.Namespace, arm: str, *more: str) -> tuple[dict[str, Any], str]:
    """Run `one_arm` in a process of its own; its result and everything it said."""
    command = [__file__, "--one", arm, "--model", arguments.model, *more]
    for name in ("max_model_len", "max_num_seqs", "short", "long", "repeats", "util", "file"):
        command += [f"--{name.replace('_', '-')}", str(getattr(arguments, name))]
    command += ["--batches", *map(str, arguments.batches)]
    env = dict(os.environ)
    if arguments.pretend:
        env["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(HERE / "pretend"), env.get("PYTHONPATH")])
        )
    ran = processes.start(command, env=env)
    return ran.needed(), ran.text  # with the carriage returns of progress bars


# --- all arms -------------------------------------------------------------------------------------


def compare_captures(lab: ModuleType, result: dict[str, Any], said: str) -> None:
    """Expected bars and the bars of the log."""
    expected = lab.expected_passes(result["mode"], result["sizes"], result["max_num_seqs"])
    bars = lab.parse_progress(said)
    for label, mode, rungs in expected:
        print(f"  expected ({label}, {mode}) {rungs}")
    for bar in bars:
        print(f"  log says ({bar.label}, {bar.mode}) {bar.done}/{bar.total}")
    if [(label, mode, rungs) for label, mode, rungs in expected] != [
        (bar.label, bar.mode, bar.total) for bar in bars
    ]:
        print("  DIFFERS: has the backend changed the mode? Look for a warning in the log.")
    startup = lab.read_startup(said)
    print("  " + ", ".join(f"{name}={value}" for name, value in startup._asdict().items()))


def time_arms(lab: ModuleType, arguments: argparse.Namespace) -> dict[str, dict[int, float]]:
    """Run every arm; arm to batch to median milliseconds of a step."""
    steps: dict[str, dict[int, float]] = {}
    for arm in arguments.arms:
        print(f"=== arm {arm}: {lab.ARMS[arm] or 'the default'}", flush=True)
        result, said = start(arguments, arm)
        if not steps:
            print(f"  {result['device']}, {result['layers']} layers, {arguments.model}")
        compare_captures(lab, result, said)
        steps[arm] = {}
        for batch, pairs in result["timings"].items():
            samples = [lab.step_ms(*pair, arguments.short, arguments.long) for pair in pairs]
            spread = lab.summarize(samples)
            steps[arm][int(batch)] = spread.median
            print(
                f"  batch {batch:>4}  step {spread.median:8.4f} ms  ({spread.low:.4f} to "
                f"{spread.high:.4f})  {int(batch) / spread.median * 1e3:10.1f} tokens/s"
            )
    return steps


def read_bytes(arguments: argparse.Namespace) -> int | None:
    """Bytes of weights that a step reads: given, known, or all of a small local folder's."""
    if arguments.read_bytes:
        return arguments.read_bytes
    if arguments.model in READ_BYTES:
        return READ_BYTES[arguments.model]
    files = list(Path(arguments.model).glob("*.safetensors"))
    header = 0
    for file in files:
        with file.open("rb") as stream:
            header += 8 + int.from_bytes(stream.read(8), "little")
    return sum(file.stat().st_size for file in files) - header if files else None


def conclude(
    lab: ModuleType, arguments: argparse.Namespace, steps: dict[str, dict[int, float]]
) -> None:
    """Effects, the plateau, and the floor."""
    print("=== effects: step without / step with")
    for name, of_batch in lab.ratios(steps).items():
        words = "  ".join(f"{batch}: {value:.2f}" for batch, value in of_batch.items())
        print(f"  {name:<20} {words}")
    for arm, of_arm in steps.items():
        print(f"  arm {arm} takes as long at batches {lab.plateau(of_arm)} as at the smallest")
    num_bytes = read_bytes(arguments)
    if arguments.bandwidth and num_bytes:
        floor = lab.bandwidth_floor_ms(num_bytes, arguments.bandwidth)
        print(f"  floor: {num_bytes:,} bytes at {arguments.bandwidth:.3g} B/s are {floor:.4f} ms")
        for arm, batch in lab.flag_impossible(steps, floor):
            print(f"  IMPOSSIBLE from memory: arm {arm}, batch {batch}; do its weights fit the L2?")
    else:
        print("  floor: not checked (give --bandwidth from the data sheet, --read-bytes if asked)")


def count(lab: ModuleType, arguments: argparse.Namespace) -> None:
    """Graphs and padding of arm B, in a process that reports both."""
    print("=== arm B again: graphs and padding", flush=True)
    result, said = start(arguments, "B", "--count")
    expected = lab.num_graphs(lab.parse_progress(said), result["layers"])
    print(f"  {result['graphs']} graphs captured, {expected} behind the bars")
    rows = lab.parse_padding(said)
    for row in rows:
        print(f"  {row.tokens} tokens ran as {row.padded}, {row.mode}, {row.steps} steps")
    print(f"  padding: {lab.padding_share(rows):.1%} of the real rows")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Graphs against eager on a real vLLM.")
    parser.add_argument("--model", default=str(MODEL))
    parser.add_argument("--arms", nargs="+", choices="ABCDE", default=list("ABCDE"))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 33])
    parser.add_argument("--short", type=int, default=64, help="tokens of the shorter runs")
    parser.add_argument("--long", type=int, default=192, help="tokens of the longer runs")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--util", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--bandwidth", type=float, help="bytes/s of the device's memory")
    parser.add_argument("--read-bytes", type=int, help="weights that a step reads")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--pretend", action="store_true", help="an invented engine, no GPU")
    parser.add_argument("--one", metavar="ARM", help="one engine, in this process")
    parser.add_argument("--count", action="store_true", help="with --one: graphs, not times")
    arguments = parser.parse_args(argv)
    lab = load_module(Path(arguments.file).resolve())
    if arguments.one:
        return one_arm(lab, arguments)
    if not arguments.pretend:
        versions.need_vllm("--pretend")
    steps = time_arms(lab, arguments)
    conclude(lab, arguments, steps)
    count(lab, arguments)


if __name__ == "__main__":
    main()
