"""One model on one rank, two ranks and two stages of a real vLLM 0.22.1: who holds and says what.

    course gpu run 10-02                       the shipped model, two GPUs
    course gpu run 10-02 --cpu                 vLLM's CPU build, two processes
    python run.py --model facebook/opt-1.3b    hf download facebook/opt-1.3b first
    python run.py --predict                    what must come, without vLLM

Each engine is a process of its own and ends before the next one starts. Needs vllm==0.22.1; without
it the run says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
MODEL = HERE.parents[2] / "models" / "byte-llama"
PROMPTS = ["The scheduler", "A block is", "Distributed inference means", "def f(x):"]
TOKENS = 32
KV_GIB = 1
"""Memory for KV of each rank on a processor, given to vLLM outright."""
SAYS = (
    "is assigned as DP rank", "Model loading took", "Available KV cache memory", "KV cache size",
    "Maximum concurrency", "all-reduce backends", "is using nccl", "KV cache on node",
)  # fmt: skip


# --- one engine, in a process of its own ----------------------------------------------------------


def one_engine(arguments: argparse.Namespace) -> None:
    """Start an engine of so many ranks, ask each rank what it holds, serve the prompts."""
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if arguments.broken:
        os.environ["SHARD_REPORT_BREAK"] = "1"  # the processes of the ranks inherit it
    llm = LLM(
        model=arguments.model,
        dtype="float32" if cpu else "float16",
        tensor_parallel_size=arguments.tp,
        pipeline_parallel_size=arguments.pp,
        disable_custom_all_reduce=arguments.plain,
        enforce_eager=cpu,
        max_model_len=256 if arguments.model == str(MODEL) else None,
        gpu_memory_utilization=arguments.util,
        worker_extension_cls="shard_report.Report",
    )
    processes.tell(f"the engine of {arguments.tp * arguments.pp} is up")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    times = []
    for _ in range(0 if cpu else 3):  # the first call above was the warm-up
        began = time.perf_counter()
        llm.generate(PROMPTS[:1], params, use_tqdm=False)
        times.append(round(1000 * (time.perf_counter() - began) / TOKENS, 3))
    ranks = llm.collective_rpc("shard_report")
    texts = [list(output.outputs[0].token_ids) for output in outputs]
    processes.answer({"ranks": ranks, "texts": texts, "ms_per_token": times})


def launch(
    arguments: argparse.Namespace, tp: int, *more: str
) -> tuple[processes.Ran, dict[str, Any]]:
    """An engine of `tp` ranks: everything it printed, and its answer."""
    print(f"=== tensor_parallel_size={tp} {' '.join(more)}: starting an engine", flush=True)
    env = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }
    if versions.on_cpu():
        env |= {"VLLM_CPU_KVCACHE_SPACE": str(KV_GIB), "OMP_NUM_THREADS": "1"}
        env |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1"}
    command = [__file__, "--tp", str(tp), "--model", arguments.model, "--util", str(arguments.util)]
    ran = processes.start([*command, *more], show=SAYS, env=env)
    return ran, ran.needed()


# --- what must come -------------------------------------------------------------------------------


def verdict(name: str, want: Any, came: Any) -> bool:
    """One line for an expectation; whether it holds."""
    print(f"{'as predicted' if want == came else 'NOT AS PREDICTED'}: {name}: {came}")
    if want != came:
        print(f"    expected {want}")
    return bool(want == came)


def predicted(lab: ModuleType, config: dict[str, Any], tp: int, dtype_bytes: int) -> dict[str, Any]:
    """Bytes of one rank, and its shapes in the first layer where the model is a Llama."""
    opt = config["model_type"] == "opt"
    weights = lab.opt_weight_bytes_per_rank if opt else lab.llama_weight_bytes_per_rank
    return {
        "weight_bytes": weights(config, tp, dtype_bytes),
        "kv_bytes_per_token": lab.kv_bytes_per_token_per_rank(config, tp, dtype_bytes),
    }


def common(one: list[int], other: list[int]) -> int:
    """Tokens until two texts part."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(one), len(other)))


def told(lab: ModuleType, ran: processes.Ran, came: dict[str, Any], want: dict[str, Any]) -> bool:
    """What the log says and what the ranks say, against what was predicted."""
    log, ranks = lab.parse_log(ran.text), came["ranks"]
    print("parsed:", log)
    right = verdict("ranks", list(range(len(ranks))), [each["rank"] for each in ranks])
    right &= verdict("processes", len(ranks), len({each["pid"] for each in ranks}))
    if len(ranks) > 1:
        pids = {each["rank"]: each["pid"] for each in ranks}
        right &= verdict("pids of the log are those of the ranks", True, log.pids == pids)
    for each in ranks:
        for name, value in want.items():
            right &= verdict(f"rank {each['rank']}, {name}", value, each[name])
    if versions.on_cpu():
        tokens = KV_GIB * 2**30 // want["kv_bytes_per_token"]
        right &= verdict(f"KV tokens of {KV_GIB} GiB a rank", tokens, log.kv_tokens)
    for name, shape in ranks[0]["shapes"].items():
        print(f"  rank 0 holds {name} {shape}")
    if came["ms_per_token"]:
        print(f"  ms per token, one request, three times: {came['ms_per_token']}")
    return right


def stages(arguments: argparse.Namespace, lab: ModuleType, config: dict[str, Any]) -> Any:
    """The other way to cut: two stages of half of the layers each. Whether it holds, and texts."""
    ran, came = launch(arguments, 1, "--pp", "2")
    layers, log = list(range(config["num_hidden_layers"])), lab.parse_log(ran.text)
    half = (len(layers) + 1) // 2  # the last stage never has more
    want = [layers[:half], layers[half:]]
    right = verdict("layers of each stage", want, [each["layers"] for each in came["ranks"]])
    if versions.on_cpu():
        whole = lab.kv_bytes_per_token_per_rank(config, 1, 4)
        tokens = KV_GIB * 2**30 * len(layers) // (whole * half)
        right &= verdict(f"KV tokens of {KV_GIB} GiB a stage", tokens, log.kv_tokens)
    return right, came["texts"]


def mini_texts() -> list[list[int]]:
    """What the mini engine says, in float32, on one rank."""
    from mini_vllm import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    outputs = LLM("byte-llama", dtype="float32").generate(PROMPTS, params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def compare(arguments: argparse.Namespace, lab: ModuleType, config: dict[str, Any]) -> bool:
    """Start both engines, one after the other."""
    cpu = versions.on_cpu()
    right, texts = True, {}
    for tp in (1, 2):
        ran, came = launch(arguments, tp)
        texts[tp] = came["texts"]
        right &= told(lab, ran, came, predicted(lab, config, tp, 4 if cpu else 2))
    lengths = [common(a, b) for a, b in zip(texts[1], texts[2], strict=True)]
    print(f"tokens that both engines agree on, of {TOKENS}: {lengths}")
    held, staged = stages(arguments, lab, config)
    right &= held
    if cpu:
        mini = mini_texts()
        right &= verdict("two ranks say what the mini engine says", True, texts[2] == mini)
        right &= verdict("two stages say what the mini engine says", True, staged == mini)
        _, broken = launch(arguments, 2, "--broken")
        name = "they still do when both hold the KV head of rank 0"
        right &= verdict(name, False, broken["texts"] == mini)
    else:
        _, plain = launch(arguments, 2, "--plain")
        print(f"  ms per token without the custom all-reduce: {plain['ms_per_token']}")
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="One rank and two on a real vLLM.")
    parser.add_argument("--model", default=str(MODEL), help="a Llama without biases, or an OPT")
    parser.add_argument("--util", type=float, default=0.5, help="share of a GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="say what must come, and end")
    parser.add_argument("--tp", type=int, help="one engine, in this process")
    parser.add_argument("--pp", type=int, default=1, help="its pipeline stages")
    parser.add_argument("--plain", action="store_true", help="without the custom all-reduce")
    parser.add_argument("--broken", action="store_true", help="a control: KV heads cut wrongly")
    arguments = parser.parse_args()
    if arguments.tp is not None:
        one_engine(arguments)
        return 0
    lab = load_module(Path(arguments.file))
    folder = Path(arguments.model)
    if not (folder / "config.json").is_file():
        versions.need_vllm("the shipped model")
        from huggingface_hub import hf_hub_download

        folder = Path(hf_hub_download(arguments.model, "config.json")).parent
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    for tp in (1, 2):
        for dtype_bytes in (2, 4):
            plan = predicted(lab, config, tp, dtype_bytes)
            print(f"predicted, {tp} ranks, {dtype_bytes} bytes a number: {plan}")
    if arguments.predict:
        return 0
    versions.need_vllm("--predict, or the tests")
    if not versions.on_cpu():
        import torch

        if torch.cuda.device_count() < 2:
            raise SystemExit("two ranks need two GPUs; with one: course gpu run 10-02 --cpu")
    right = compare(arguments, lab, config)
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
