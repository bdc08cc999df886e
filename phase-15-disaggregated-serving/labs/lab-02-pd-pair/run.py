"""Two real vLLM 0.22.1 with NIXL, your proxy between them, and the counters that prove the move.

    course gpu run 15-02                          two GPUs
    course gpu run 15-02 -- --one-gpu             both on one, 40 % of its memory each
    course gpu run 15-02 --cpu -- --beside FOLDER two servers on vLLM's CPU build
    course gpu run 15-02 -- --model Qwen/Qwen2.5-0.5B-Instruct
    python run.py --predict                       what must come, without vLLM

Both servers listen on this machine only and end with the run. Needs vllm==0.22.1 and nixl>=1.1.0,
which vLLM does not install; without them the run says so and ends. FOLDER holds packages that stand
beside the installed ones: `pip install --no-deps --target FOLDER nixl==1.5.1 nixl-cu12==1.5.1
nixl-cu13==1.5.1` (the last two hold NIXL itself, which reads host memory without a GPU, too). It
measures two legs on one machine: the topology, and not the wire.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from types import ModuleType
from typing import Any

from conformance import serve_stream
from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
SHIPPED = HERE.parents[2] / "models" / "byte-llama"
BLOCK = 16
LENGTHS = (40, 400, 1000)
"""Prompt tokens of the shipped model, which has one per byte."""
LAST = 200
"""Prompt tokens of the request that comes when P is gone."""
LEASE_S = 30.0
"""How long P keeps blocks that nobody reads, by default."""
EXPIRED = "vllm:nixl_num_kv_expired_reqs_total"
SOURCE = "vllm:prompt_tokens_by_source_total"
ON_CPU = {
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}  # fmt: skip
"""Two servers on one processor: a GiB of K and V each, and a thread each."""
SHOW = (
    "Creating v1 connector", "NIXL compatibility check", "KV Transfer metrics",
    "External prefix cache hit rate", "Releasing expired KV blocks", "hash mismatch",
)  # fmt: skip
"""What of the servers' logs is worth reading."""


def metrics(port: int, name: str) -> dict[str, float]:
    """The lines of one metric of a server: values by labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines()]
    return {line[0]: float(line[1]) for line in lines if line[0].startswith(f"{name}{{")}


def sources(port: int) -> dict[str, float]:
    """Prompt tokens of a server by where they came from."""
    found = metrics(port, SOURCE).items()
    return {labels.split('source="', 1)[1].split('"', 1)[0]: value for labels, value in found}


def until_expired(lab: ModuleType, port: int, url: str) -> float:
    """Seconds until P gives up a prompt that no decoder asks for; -1 if it has not by then."""
    b"".join(lab.post(url, lab.prefill_body(asked(LAST, 99)), "nobody"))
    began = time.perf_counter()
    while (seconds := time.perf_counter() - began) < 3 * LEASE_S:
        if sum(metrics(port, EXPIRED).values()):
            return seconds
        time.sleep(1)
    return -1.0


def serve(arguments: argparse.Namespace, number: int, port: int) -> subprocess.Popen[bytes]:
    """One engine; the two of one machine need a side channel each."""
    gpu = "0" if arguments.one_gpu else str(number)
    env = {**os.environ, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(serve_stream.free_port())}
    connector = {
        "kv_connector": "NixlConnector", "kv_role": "kv_both",
        "kv_load_failure_policy": arguments.policy,
    }  # fmt: skip
    flags = f"--host 127.0.0.1 --port {port} --served-model-name served --block-size {BLOCK} "
    if versions.on_cpu():
        env |= ON_CPU
        connector["kv_buffer_device"] = "cpu"  # whose memory NIXL reads; "cuda" by default
        flags += "--enforce-eager --dtype float32"
    else:
        env["CUDA_VISIBLE_DEVICES"] = gpu
        flags += f"--gpu-memory-utilization {0.4 if arguments.one_gpu else 0.8}"
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", arguments.model]
    command += [*flags.split(), "--kv-transfer-config", json.dumps(connector)]
    return subprocess.Popen(command, env=env)


def asked(length: int, number: int) -> dict[str, Any]:
    """A completion of a prompt that no other begins like."""
    prompt = f"{number:04d} " + "the scheduler plans a step and " * (1 + length // 31)
    return {
        "model": "served", "prompt": prompt[:length], "max_tokens": 16, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip


def drive(arguments: argparse.Namespace) -> None:
    """Start both engines, send each prompt through the proxy and to a plain engine, count."""
    lab = load_module(Path(arguments.file))
    ports = [serve_stream.free_port() for _ in range(2)]
    servers = [serve(arguments, number, port) for number, port in enumerate(ports)]
    urls = [f"http://127.0.0.1:{port}/v1/completions" for port in ports]
    rows = []
    try:
        for server, port in zip(servers, ports, strict=True):
            serve_stream.wait_for(server, f"http://127.0.0.1:{port}")
        processes.tell("both servers are up")
        for number, length in enumerate(LENGTHS):
            before, began = sources(ports[1]), time.perf_counter()
            came = json.loads(b"".join(lab.route(asked(length, number), *urls)))
            seconds = time.perf_counter() - began
            after = sources(ports[1])
            plain = json.loads(b"".join(lab.post(urls[0], asked(length, number), "plain")))
            rows.append({
                "length": length, "prompt_tokens": came["usage"]["prompt_tokens"],
                "sources": {k: v - before.get(k, 0.0) for k, v in after.items()},
                "same_text": came["choices"][0]["text"] == plain["choices"][0]["text"],
                "seconds": seconds,
            })  # fmt: skip
        time.sleep(12)  # the servers print their statistics every ten seconds
        expired = until_expired(lab, ports[0], urls[0])
        serve_stream.end(servers[0])
        processes.tell("P has ended")
        before = sources(ports[1])
        came = json.loads(b"".join(lab.route(asked(LAST, len(LENGTHS)), *urls)))
        alone = {
            "prompt_tokens": came["usage"]["prompt_tokens"],
            "sources": {k: v - before.get(k, 0.0) for k, v in sources(ports[1]).items()},
        }
    finally:
        for server in servers:
            serve_stream.end(server)
    processes.answer({
        "rows": rows, "without P": alone, "expired": expired, "nixl": versions.version("nixl"),
    })  # fmt: skip


def bytes_per_token(model: str) -> int | None:
    """K and V of a token, in the type that `serve` asks for; None for a model that is not here."""
    if not (path := Path(model, "config.json")).is_file():
        return None
    config = json.loads(path.read_text(encoding="utf-8"))
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_key_value_heads"] * head_dim
    return int(2 * config["num_hidden_layers"] * heads * (4 if versions.on_cpu() else 2))


def judge(lab: ModuleType, ran: processes.Ran, model: str) -> bool:
    """What came beside what must."""
    right, came = True, ran.needed()
    print(json.dumps({"nixl": came["nixl"]}))
    for row in came["rows"]:
        tokens, of = row["prompt_tokens"], row["sources"]
        # Noted when the load is asked for: the token that is computed again counts as moved.
        moved, local = of.get("external_kv_transfer", 0.0), of.get("local_compute", 0.0)
        holds = (moved, local) == (tokens, 0.0)
        right &= holds
        print(f"{'as predicted' if holds else 'NOT AS PREDICTED'}: {tokens} tokens: {of}")
        print(f"    the same text as one engine's: {row['same_text']}; {row['seconds']:.3f} s")
    holds = LEASE_S <= came["expired"] < LEASE_S + 10
    right &= holds
    verdict = "as predicted" if holds else "NOT AS PREDICTED"
    print(f"{verdict}: a prompt that nobody reads is let go after {came['expired']:.0f} s")
    of, tokens = came["without P"]["sources"], came["without P"]["prompt_tokens"]
    holds = (of.get("external_kv_transfer", 0.0), of.get("local_compute", 0.0)) == (0.0, tokens)
    right &= holds
    print(f"{'as predicted' if holds else 'NOT AS PREDICTED'}: {tokens} tokens without P: {of}")
    said = [parsed for line in ran.lines if (parsed := lab.parse_transfer_line(line))]
    count = sum(parsed["Num successful transfers"] for parsed in said)
    mib = sum(p["Num successful transfers"] * p["Avg MB per transfer"] for p in said)
    if size := bytes_per_token(model):
        sent = [lab.blocks_and_bytes(row["prompt_tokens"], BLOCK, size)[1] for row in came["rows"]]
        wanted = sum(sent) / 2**20
        holds = count == len(sent) and abs(mib - wanted) < 0.001 * count
        right &= holds
        print(f"{'as predicted' if holds else 'NOT AS PREDICTED'}: {count:g} transfers of "
              f"{mib:.3f} MiB in all; {wanted:.3f} from blocks and bytes")  # fmt: skip
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="A prefill and a decode engine, and your proxy.")
    parser.add_argument("--model", default=str(SHIPPED))
    parser.add_argument("--one-gpu", action="store_true", help="both engines on GPU 0")
    parser.add_argument("--policy", default="fail", choices=("fail", "recompute"))
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--beside", help="a folder with packages; see the module")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--drive", action="store_true", help="the servers, in this process")
    arguments = parser.parse_args()
    if arguments.drive:
        drive(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    if arguments.predict:
        for tokens, per_token, name in (
            (2031, 12_288, "Qwen2.5-0.5B"), (2031, 131_072, "an 8B with 8 KV heads"),
        ):  # fmt: skip
            blocks, size = lab.blocks_and_bytes(tokens, BLOCK, per_token)
            read, computed = lab.decode_leg(tokens, 0, BLOCK)
            print(
                f"{name}, {tokens} tokens: {blocks} blocks, {size:,} bytes ({size / 2**20:.2f} "
                f"MiB); D reads {read} blocks and computes {computed} token of the prompt"
            )
        return 0
    versions.need_vllm("--predict, or the tests")
    env = dict(os.environ)
    if arguments.beside:
        folders = [str(Path(arguments.beside).resolve()), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    elif importlib.util.find_spec("nixl") is None:
        raise SystemExit('needs nixl, which vLLM does not install: pip install "nixl>=1.1.0"')
    print("starting two servers", flush=True)
    command = [__file__, "--drive", "--model", arguments.model, "--file", arguments.file]
    command += ["--policy", arguments.policy, *["--one-gpu"] * arguments.one_gpu]
    right = judge(lab, processes.start(command, show=SHOW, env=env), arguments.model)
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
