"""What the real engine does with the plugins of lab 17-03: recorded, for a learner's file too.

    course engine run -m conformance.plugins FILE.jsonl.gz [LAB_FILE]

The package is found as an installed one is, by the entry points in a folder on the path; nothing of
the engine's environment is changed. One server shows the platform, the logits processor, the
logger, the resolver and the operator; one engine for embeddings shows the processor of requests;
and `IrOp.dispatch` is asked on every case of `priorities`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import gzip
import itertools
import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from conformance import recording, serve_stream
from conformance.real_engine import MODEL, ROOT, provenance
from labkit import processes
from labkit.plugins import put_on_path

LAB = ROOT / "phase-17-hardware-backends-and-plugins" / "labs" / "lab-03-ten-line-plugins"
KEPT = LAB / "recordings" / "plugins.jsonl.gz"
COMMAND = "course engine run -m conformance.plugins FILE"
PROMPT = "The KV cache is"
LETTER = ord("e")
TEXTS = ["The KV cache is divided into blocks.", "The KV cache holds blocks.", "zzzz 99"]
FLAGS = (
    "--max-model-len 256 --enforce-eager --dtype float32 --gpu-memory-utilization 0.1 "
    "--served-model-name byte-llama --no-use-tqdm-on-load --max-num-seqs 8 --enable-lora "
    "--max-loras 3 --max-cpu-loras 4 --max-lora-rank 8 "
    "--worker-extension-cls conformance.features.lora.worker.NoPinning "
    '--ir-op-priority {"rms_norm":["course"]}'
)


# ---------------------------------------------------------------------- one server


def bodies() -> list[dict[str, Any]]:
    """Requests that come together: every second is kept from a letter, all end apart."""
    prompts = [PROMPT, "The scheduler", "A request waits until", "Blocks are freed"] * 3
    made = []
    for number, prompt in enumerate(prompts):
        body = {"model": "byte-llama", "prompt": prompt, "temperature": 0, "ignore_eos": True,
                "max_tokens": 12 + 7 * (number % 4)}  # fmt: skip
        made.append(body | ({"vllm_xargs": {"without": LETTER}} if number % 2 else {}))
    return made


def ask(url: str, body: dict[str, Any]) -> dict[str, Any]:
    """A completion's text, or the status that refuses it."""
    post = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(post, timeout=300) as answer:
            return {"text": json.loads(answer.read())["choices"][0]["text"]}
    except urllib.error.HTTPError as error:
        return {"status": error.code}


def served(notes: Path) -> dict[str, Any]:
    """Everything that one server shows."""
    import subprocess

    port = serve_stream.free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(MODEL)]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS.split()]
    environment = {
        **os.environ, "COURSE_DEVICE": "1", "COURSE_NOTES": str(notes),
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    }  # fmt: skip
    server = subprocess.Popen(command, env=environment)
    try:
        serve_stream.wait_for(server, url)
        batch = bodies()
        with concurrent.futures.ThreadPoolExecutor(len(batch)) as pool:
            texts = [answer["text"] for answer in pool.map(lambda body: ask(url, body), batch)]
        plain = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        adapted = {name: ask(url, {**plain, "model": name}) for name in ("shout", "nothing")}
        with urllib.request.urlopen(f"{url}/metrics", timeout=60) as answer:
            metrics = answer.read().decode()
    finally:
        serve_stream.end(server)
    block_size = metrics.partition("vllm:cache_config_info{")[2].partition('block_size="')[2]
    return {
        "bodies": batch, "texts": texts, "adapted": adapted, "notes": lines(notes / "notes.jsonl"),
        "stats": lines(notes / "stats.jsonl"), "block_size": int(block_size.partition('"')[0]),
    }  # fmt: skip


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


# ---------------------------------------------------------------------- offline


def embedded() -> dict[str, Any]:
    """The processor of whole requests, beside the embeddings themselves."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm

    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=256, max_num_seqs=8,
        enforce_eager=True, gpu_memory_utilization=0.1, use_tqdm_on_load=False,
        runner="pooling", convert="embed", io_processor_plugin="course_cosines",
    )  # fmt: skip
    prompt: Any = {"data": {"texts": TEXTS}}
    (found,) = llm.encode(prompt, pooling_task="plugin", use_tqdm=False)
    refused = ""
    with contextlib.suppress(RuntimeError):
        try:
            llm.encode({"data": {"texts": ["one"]}}, pooling_task="plugin", use_tqdm=False)
        except ValueError as error:
            refused = str(error)
    return {"texts": TEXTS, "cosines": found.outputs, "refused": refused}


def priorities() -> Iterator[tuple[list[str], dict[str, tuple[bool, bool | None]]]]:
    """Orders of two providers and native, each supported or not, for these arguments or all."""
    kinds = list(itertools.product((True, False), (True, False, None)))
    for a, b in itertools.product(kinds, kinds):
        for order in ([], ["a"], ["a", "b"], ["b", "a"], ["a", "b", "native"], ["native", "a"]):
            yield order, {"a": a, "b": b, "native": (True, None)}


def dispatched() -> list[dict[str, Any]]:
    """What vLLM IR keeps of each priority, and which provider serves."""
    import torch
    from vllm.ir.op import IrOp, IrOpImpl

    def native(x: Any) -> Any:
        return x.clone()

    native.__annotations__ = {"x": torch.Tensor, "return": torch.Tensor}  # its schema, as types
    op = IrOp("course_twin", native)
    x, found = torch.zeros(2), []
    for order, kinds in priorities():
        for name in ("a", "b"):
            op.impls.pop(name, None)
            supported, takes = kinds[name]
            answer = None if takes is None else _one_parameter(takes)
            op.impls[name] = IrOpImpl(op, name, native, supported, answer)
        with op.set_priority(order):
            found.append({"priority": order, "impls": kinds, "kept": op.get_priority(),
                          "serves": op.dispatch(x).provider})  # fmt: skip
    return found


def booked(seed: int, steps: int = 30) -> list[dict[str, Any]]:
    """Random changes of a batch, and the rows that vLLM's own bookkeeping then means."""
    import random

    from vllm import SamplingParams
    from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality
    from vllm.v1.sample.logits_processor.builtin import process_dict_updates

    rng, found = random.Random(seed), []
    meant: dict[int, int] = {}
    live: list[int] = []
    for _ in range(steps):
        removed = [row for row in list(live) if rng.random() < 0.2]
        live = [row for row in live if row not in removed]
        free = [row for row in range(8) if row not in live]
        added = []
        for row in free[: rng.choice((0, 0, 1, 2))]:
            others: tuple[dict[str, int] | None, ...] = (None, {})
            asks = rng.random() < 0.5
            wants = {"without": rng.randrange(256)} if asks else rng.choice(others)
            added.append([row, wants])
            live.append(row)
        taken = {row for row, _ in added}  # the engine never names a row in both
        removed = [row for row in removed if row not in taken]
        moved = []
        while live and (holes := [row for row in range(max(live)) if row not in live]):
            moved.append([max(live), holes[0], "UNIDIRECTIONAL"])
            live[live.index(max(live))] = holes[0]
        if len(live) > 1 and rng.random() < 0.5:
            a, b = rng.sample(live, 2)
            moved.append([a, b, "SWAP"])
        line = {"removed": removed, "added": added, "moved": moved}
        update = BatchUpdate(
            len(live), removed, [(r, SamplingParams(extra_args=w), None, []) for r, w in added],
            [(a, b, MoveDirectionality[how]) for a, b, how in moved],
        )  # fmt: skip
        process_dict_updates(meant, update, lambda p, *_: (p.extra_args or {}).get("without"))
        rows = sorted([row, token] for row, token in meant.items())
        found.append({"update": line, "rows": rows, "size": len(live)})
    return found


def _one_parameter(answer: bool) -> Any:
    def supports(x: Any) -> bool:
        return answer

    return supports


def main(arguments: list[str]) -> int:
    """Record everything into a file."""
    if not arguments or len(arguments) > 2:
        raise SystemExit(f"usage: {COMMAND} [LAB_FILE]")
    if len(arguments) == 2:
        os.environ["COURSE_PLUGINS"] = str(Path(arguments[1]).resolve())
    with tempfile.TemporaryDirectory() as folder:
        put_on_path(LAB / "plugin", Path(folder) / "site", ROOT)
        (Path(folder) / "notes").mkdir()
        server = served(Path(folder) / "notes")
        os.environ["COURSE_NOTES"] = str(Path(folder) / "notes")
        found = {
            "upstream": recording.UPSTREAM, "served": server, "embedded": embedded(),
            "dispatched": dispatched(), "booked": [booked(seed) for seed in range(12)],
            "machine": provenance("float32") | {"command": COMMAND},
        }  # fmt: skip
    with gzip.GzipFile(arguments[0], "wb", mtime=0) as file:
        file.write(json.dumps(found).encode() + b"\n")
    processes.answer({"texts": server["texts"]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
