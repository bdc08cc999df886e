"""Greedy texts of the shipped models on several ranks of the real engine: recorded, compared.

    course engine run -m conformance.record ranks-tp2     # or ranks-one, ranks-pp2, ranks-dp2, ...
    python -m conformance.texts distributed                          # compare: any machine

`tp2` and `pp2` are two processes of one engine, `dp2` two engines behind `vllm serve`. Each rank of
the first two also says what it holds: every parameter's shape and sum. `dp2` answers one question
more: with eight long requests on rank 0, where do eight short ones go?
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from conformance import recording, serve_stream
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import glossary_prompts, provenance
from mini_vllm import LLM, SamplingParams

KEPT = RECORDINGS / "engine"
NUM_PROMPTS, MAX_TOKENS = 64, 32
LONG, SHORT, NUM_EACH = 120, 2, 8
"""Output tokens of a long and of a short request, and how many there are of each."""

RUNS: dict[str, dict[str, Any]] = {
    "one": {"model": "byte-llama"},
    "tp2": {"model": "byte-llama", "tensor_parallel_size": 2},
    "pp2": {"model": "byte-llama", "pipeline_parallel_size": 2},
    "dp2": {"model": "byte-llama", "data_parallel_size": 2},
    "moe-one": {"model": "byte-moe"},
    "moe-tp2": {"model": "byte-moe", "tensor_parallel_size": 2},
}


def prompts() -> list[list[int]]:
    """The same for every run."""
    return glossary_prompts(NUM_PROMPTS, 60, 83)


def recorded(run: str) -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy: one line."""
    from conformance.features.moe.texts import for_processors

    os.environ |= {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1", "TORCH_COMPILE_DISABLE": "1",
    }  # fmt: skip
    options = dict(RUNS[run])
    model = ROOT / "models" / options.pop("model")
    line = {"upstream": recording.UPSTREAM, "machine": provenance("float32"), "run": run}
    with tempfile.TemporaryDirectory() as home:
        folder = for_processors(model, Path(home)) if "moe" in model.name else model
        answer = _served if "data_parallel_size" in options else _offline
        yield line | {"prompts": prompts()} | answer(folder, options)


def _offline(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of one engine, and what each of its ranks holds."""
    import vllm

    llm = vllm.LLM(
        model=str(folder), dtype="float32", seed=0, max_model_len=256, max_num_seqs=64,
        enforce_eager=True, gpu_memory_utilization=0.3,
        worker_extension_cls="conformance.features.distributed.worker.RankReport", **options,
    )  # fmt: skip
    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    batch: Any = [{"prompt_token_ids": prompt} for prompt in prompts()]
    outputs = [list(r.outputs[0].token_ids) for r in llm.generate(batch, params)]
    return {"outputs": outputs, "ranks": llm.collective_rpc("report")}


def _served(folder: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    """Texts of a server with several engines, and which of them took what."""
    port = serve_stream.free_port()
    url = f"http://127.0.0.1:{port}"
    flags = f"--host 127.0.0.1 --port {port} --max-model-len 256 --enforce-eager --dtype float32"
    flags += f" --gpu-memory-utilization 0.1 --served-model-name {folder.name} --max-num-seqs 64"
    flags += "".join(f" --{key.replace('_', '-')} {value}" for key, value in options.items())
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder)]
    server = subprocess.Popen([*command, *flags.split()])
    try:
        serve_stream.wait_for(server, url)
        client = _Client(url, folder.name)
        return {"outputs": client.all(prompts(), MAX_TOKENS)} | client.experiment()
    finally:
        serve_stream.end(server)


class _Client:
    """Asks a server, several requests at a time."""

    def __init__(self, url: str, model: str) -> None:
        self.url, self.model = url, model

    def ask(self, prompt: Sequence[int], max_tokens: int, rank: int | None = None) -> list[int]:
        """The tokens of one answer."""
        body = {
            "model": self.model, "prompt": list(prompt), "max_tokens": max_tokens,
            "temperature": 0, "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        headers = {"Content-Type": "application/json"}
        if rank is not None:
            headers["X-data-parallel-rank"] = str(rank)
        post = urllib.request.Request(
            f"{self.url}/v1/completions", json.dumps(body).encode(), headers
        )
        with urllib.request.urlopen(post, timeout=300) as answer:
            return json.load(answer)["choices"][0]["token_ids"]

    def all(self, asked: Sequence[Sequence[int]], max_tokens: int) -> list[list[int]]:
        """The answers to prompts that are sent together."""
        with concurrent.futures.ThreadPoolExecutor(len(asked)) as pool:
            return list(pool.map(lambda prompt: self.ask(prompt, max_tokens), asked))

    def ended(self) -> list[int]:
        """Requests that each engine has ended, by its own counter."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60) as answer:
            text = answer.read().decode()
        counts: dict[int, int] = {}
        for found in re.finditer(r"vllm:request_success_total{([^}]*)} ([0-9.e+]+)", text):
            engine = int(found[1].split('engine="')[1].split('"')[0])
            counts[engine] = counts.get(engine, 0) + int(float(found[2]))
        return [counts[engine] for engine in sorted(counts)]

    def experiment(self) -> dict[str, Any]:
        """`before`, `short` and `long`: requests each engine had ended before anything, after
        `NUM_EACH` short ones that came while rank 0 was busy, and after its long ones."""
        asked = prompts()[: 2 * NUM_EACH]
        before = self.ended()
        with concurrent.futures.ThreadPoolExecutor(2 * NUM_EACH) as pool:
            busy = [pool.submit(self.ask, prompt, LONG, 0) for prompt in asked[:NUM_EACH]]
            time.sleep(0.5)  # several publications' worth: who publishes has done it
            for prompt in asked[NUM_EACH:]:
                self.ask(prompt, SHORT)
            short, still = self.ended(), not any(future.done() for future in busy)
            for future in busy:
                future.result()
        return {"before": before, "short": short, "long": self.ended(), "rank_0_was_busy": still}


# ---------------------------------------------------------------------- on any machine


def kept(run: str, folder: Path = KEPT) -> dict[str, Any]:
    """One recording: "machine", "prompts", "outputs", and "ranks" or the counters of `dp2`."""
    (found,) = recording.lines(folder / f"ranks-{run}.jsonl.gz")
    return found


def mini(run: str) -> list[list[int]]:
    """What the mini engine answers, one rank, to the recorded prompts."""
    model = ROOT / "models" / RUNS[run]["model"]
    llm = LLM(model, num_blocks=1200, max_num_seqs=64, max_num_batched_tokens=512)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    results = llm.generate(kept(run)["prompts"], params)
    return [list(result.outputs[0].token_ids) for result in results]


def main() -> int:
    """Compare every recorded run with the mini engine; returns the exit status."""
    failed = 0
    for run in RUNS:
        if not (KEPT / f"ranks-{run}.jsonl.gz").is_file():
            print(f"{run}: not recorded")
            continue
        pairs = zip(kept(run)["outputs"], mini(run), strict=True)
        count = sum(theirs != ours for theirs, ours in pairs)
        print(f"{run}: {NUM_PROMPTS} texts, {count} differ")
        failed += count
    return 1 if failed else 0
