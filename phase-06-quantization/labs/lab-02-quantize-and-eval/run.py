"""One model in three formats on a real vLLM 0.22.1: predict, measure, reconcile.

    course gpu run 06-02
    python run.py --file starter.py                    your predictions
    python run.py --model models/byte-llama --awq none no download; launch-bound, so only to try
    python run.py --predict                            no GPU: predictions, labelled as such

Each configuration is a process of its own, because two engines in one process share the memory
check at start-up. The same float16, memory share and prompts for all. Greedy, warmed up, three
repeats; median, least and most are printed. Then quality: how long greedy outputs agree with the
base model's, and the mean negative log-likelihood of a fixed text. Everything measured is printed
as one JSON line, too.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from pathlib import Path
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
TEXT = HERE.parents[1] / "studies" / "texts" / "prose.txt"
BASE = "Qwen/Qwen2.5-0.5B-Instruct"
AWQ = "Qwen/Qwen2.5-0.5B-Instruct-AWQ"
QUALITY_BATCH = 16
DEVICES = {  # data sheets: HBM bytes/s, dense 16-bit FLOP/s
    "L4": (0.30e12, 121e12),
    "H100": (3.35e12, 989e12),
    "H200": (4.80e12, 989e12),
}
FULL_NAMES = {"NVIDIA L4": "L4", "NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200"}
"""Whole names: an H100 NVL or PCIe has other memory than an H100 SXM."""
QWEN_05B = {
    "hidden": 896, "layers": 24, "heads": 14, "kv_heads": 2, "head_dim": 64, "intermediate": 4864,
    "vocab": 151936, "tied": True, "qkv_bias": True,
}  # fmt: skip
WANTED = ("Model loading took", "KV cache", "Maximum concurrency", "Kernel for", "convertible to",
          "native support for FP8")  # fmt: skip


def prompts(count: int, length: int) -> list[dict[str, list[int]]]:
    """Distinct prompts of small token ids, which every vocabulary has; the same for all formats."""
    rng = random.Random(6)
    return [{"prompt_token_ids": rng.choices(range(5, 200), k=length)} for _ in range(count)]


def shape_of(hf_config: Any) -> dict[str, Any]:
    """`ModelShape` fields from a Hugging Face config."""
    heads = hf_config.num_attention_heads
    return {
        "hidden": hf_config.hidden_size,
        "layers": hf_config.num_hidden_layers,
        "heads": heads,
        "kv_heads": hf_config.num_key_value_heads,
        "head_dim": getattr(hf_config, "head_dim", None) or hf_config.hidden_size // heads,
        "intermediate": hf_config.intermediate_size,
        "vocab": hf_config.vocab_size,
        "tied": bool(hf_config.tie_word_embeddings),
        "qkv_bias": hf_config.model_type == "qwen2"
        or bool(getattr(hf_config, "attention_bias", False)),
    }


def one_configuration(arguments: argparse.Namespace) -> None:
    """Start one engine, measure every batch size and the quality, print a result."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "INFO")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=arguments.model,
        quantization=arguments.quantization,
        dtype="float16",
        gpu_memory_utilization=arguments.util,
        max_model_len=1024,
        enable_prefix_caching=False,
    )
    greedy = SamplingParams(temperature=0.0, max_tokens=arguments.max_tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {}
    tokens: list[list[int]] = []
    for batch in arguments.batches:
        asked = prompts(batch, arguments.prompt_tokens)
        llm.generate(asked, greedy, use_tqdm=False)  # warm-up: compilation, graphs, caches
        rates[str(batch)] = []
        for _ in range(arguments.repeats):
            begun = time.perf_counter()
            outputs = llm.generate(asked, greedy, use_tqdm=False)
            took = time.perf_counter() - begun
            made = sum(len(output.outputs[0].token_ids) for output in outputs)
            rates[str(batch)].append(made / took)
        processes.tell(f"batch {batch}: {statistics.median(rates[str(batch)]):,.0f} tokens/s")
    outputs = llm.generate(prompts(QUALITY_BATCH, arguments.prompt_tokens), greedy, use_tqdm=False)
    tokens = [list(output.outputs[0].token_ids) for output in outputs]
    ids = llm.get_tokenizer().encode(TEXT.read_text(encoding="utf-8"))[:1000]
    scored = llm.generate(
        [{"prompt_token_ids": ids}],
        SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0),
        use_tqdm=False,
    )
    entries = scored[0].prompt_logprobs[1:]  # the first token has no context
    chosen = [entry[token].logprob for entry, token in zip(entries, ids[1:], strict=True)]
    config = llm.llm_engine.vllm_config
    result = {
        "rates": rates,
        "tokens": tokens,
        "nll": -statistics.fmean(chosen),
        "blocks": config.cache_config.num_gpu_blocks,
        "block_size": config.cache_config.block_size,
        "shape": shape_of(config.model_config.hf_config),
    }
    processes.answer(result)


def start(arguments: argparse.Namespace, model: str, quantization: str | None) -> dict[str, Any]:
    """Run `one_configuration` in a process of its own; its result, with the log's lines."""
    command = [__file__, "--one", "--model", model, "--util", str(arguments.util)]
    command += ["--max-tokens", str(arguments.max_tokens), "--repeats", str(arguments.repeats)]
    command += ["--prompt-tokens", str(arguments.prompt_tokens), "--batches"]
    command += [str(batch) for batch in arguments.batches]
    command += ["--quantization", quantization] if quantization else []
    ran = processes.start(command, show=WANTED)
    return {**ran.needed(), "lines": ran.lines}


def predict(lab: ModuleType, shape: Any, batches: list[int], hbm: float, flops: float) -> None:
    """The table to write down beforehand."""
    print(f"PREDICTED, not measured: {hbm / 1e12:.2f} TB/s, {flops / 1e12:.0f} TFLOP/s in 16 bits")
    for fmt in ("bf16", "fp8", "w4_asym"):
        ceilings = "  ".join(
            f"{b}: {lab.decode_ceiling_tok_s(lab.streamed_bytes(shape, fmt), b, hbm):,.0f}"
            for b in batches
        )
        print(
            f"  {fmt:<8} {lab.weight_bytes(shape, fmt) / 1e9:.3f} GB of weights, at most "
            f"{lab.extra_kv_blocks(shape, fmt):,} blocks more; tokens/s at most, by batch: "
            f"{ceilings}"
        )
    print(f"  FP8 overtakes 4 bits at about {lab.crossover_batch(flops, hbm):.0f} tokens per step")


def report(
    lab: ModuleType, found: dict[str, dict[str, Any]], hbm: float | None, slack_blocks: int
) -> None:
    """Everything measured beside its prediction, and what cannot be true."""
    base = found["bf16"]
    shape = lab.ModelShape(**base["shape"])
    for fmt, run in found.items():
        log = lab.read_log(run["lines"])
        same = [lab.agreed_prefix(a, b) for a, b in zip(base["tokens"], run["tokens"], strict=True)]
        print(f"=== {fmt}: kernels {log.kernels or 'none named'}")
        predicted = lab.weight_bytes(shape, fmt) / 2**30
        print(f"weights: predicted {predicted:.2f} GiB, the log says {log.weight_gib} GiB")
        gained = run["blocks"] - base["blocks"]
        most = lab.extra_kv_blocks(shape, fmt, run["block_size"])
        print(
            f"blocks: {run['blocks']:,} of {run['block_size']}, {gained:+,} against the base; "
            f"at most {most:+,} expected"
        )
        print(
            f"quality: NLL {run['nll']:.4f} ({run['nll'] - base['nll']:+.4f}); greedy outputs "
            f"agree for {statistics.median(same):.0f} of {len(run['tokens'][0])} tokens (median)"
        )
        for batch, rates in run["rates"].items():
            line = f"batch {batch}: {statistics.median(rates):,.0f} tokens/s"
            line += f" ({min(rates):,.0f} to {max(rates):,.0f})"
            if hbm:
                ceiling = lab.decode_ceiling_tok_s(lab.streamed_bytes(shape, fmt), int(batch), hbm)
                line += f", {statistics.median(rates) / ceiling:.0%} of the ceiling {ceiling:,.0f}"
            print(line)
    for batch in base["rates"]:
        rows = [
            {"fmt": fmt, "tok_s": statistics.median(run["rates"][batch]), "blocks": run["blocks"]}
            for fmt, run in found.items()
        ]
        for flag in lab.audit(rows, shape, int(batch), hbm or float("inf"), slack_blocks):
            print(f"IMPOSSIBLE at batch {batch}: {flag}")
    kept = {
        fmt: {key: run[key] for key in ("rates", "nll", "blocks", "block_size", "shape")}
        for fmt, run in found.items()
    }
    processes.answer(kept)


def main() -> None:
    parser = argparse.ArgumentParser(description="One model in three formats.")
    parser.add_argument("--model", default=BASE)
    parser.add_argument("--awq", default=AWQ, help="the same model in AWQ, or none")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64, 256])
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--util", type=float, default=0.5, help="gpu_memory_utilization")
    parser.add_argument("--hbm", type=float, help="bytes/s of the device's memory")
    parser.add_argument("--flops16", type=float, help="peak dense 16-bit FLOP/s")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="no GPU: predictions only")
    parser.add_argument("--device", default="L4", choices=sorted(DEVICES), help="with --predict")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--quantization", help="with --one")
    arguments = parser.parse_args()
    if arguments.one:
        return one_configuration(arguments)
    lab = load_module(arguments.file)
    if arguments.predict:
        hbm, flops = DEVICES[arguments.device]
        shape = lab.ModelShape(**QWEN_05B)
        return predict(
            lab, shape, arguments.batches, arguments.hbm or hbm, arguments.flops16 or flops
        )
    versions.need_vllm("--predict, or the tests")
    import torch

    if not torch.cuda.is_available():
        raise SystemExit("no CUDA GPU here. Without one: --predict, or the tests")
    name = torch.cuda.get_device_name(0)
    known = DEVICES[FULL_NAMES[name]] if name in FULL_NAMES else (None, None)
    hbm, flops = arguments.hbm or known[0], arguments.flops16 or known[1]
    if not hbm:
        print(f"{name}: no data sheet here, so no ceilings; give --hbm and --flops16")
    configurations: dict[str, tuple[str, str | None]] = {
        "bf16": (arguments.model, None),
        "fp8": (arguments.model, "fp8"),
    }
    if arguments.awq != "none":
        configurations["w4_asym"] = (arguments.awq, None)
    found: dict[str, dict[str, Any]] = {}
    for fmt, (model, quantization) in configurations.items():
        print(f"=== starting {model}, quantization={quantization}, on {name}", flush=True)
        found[fmt] = start(arguments, model, quantization)
        if len(found) == 1 and hbm and flops:
            predict(lab, lab.ModelShape(**found[fmt]["shape"]), arguments.batches, hbm, flops)
    report(lab, found, hbm, slack_blocks=found["bf16"]["blocks"] // 50)


if __name__ == "__main__":
    main()
