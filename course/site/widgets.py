"""What the book's widgets show: one JSON document each, computed when the book is made.

Promises: a widget draws no number that is not in its document or derived from it by a formula that
a browser test holds against this module's own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from course.site import (
    adapter_slots,
    allowed_bytes,
    attention_map,
    backend_choice,
    block_allocator,
    cache_race,
    film,
    gantt,
    graph_tape,
    live_script,
    padding_ladder,
    request_journey,
    sampling_knobs,
    shard_matrix,
    softmax_keys,
    stream_buffers,
    weight_grid,
)
from mini_vllm.cudagraph import launches
from mini_vllm.models.config import expected_shapes, parse_config
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import load_checkpoint, resolve
from mini_vllm.models.transformer import ModelConfig
from mini_vllm.spec_decode.ngram import ngram_propose


def _llama(
    vocab: int, hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, context: int
) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context,
        tie_word_embeddings=False,
    )


def models() -> dict[str, ModelConfig]:
    """Shapes to choose from: the shipped model, and three of the Llama family as published."""
    path = resolve("byte-llama") / "config.json"
    return {
        "Llama 3 8B": _llama(128256, 4096, 14336, 32, 32, 8, 8192),
        "Llama 3 70B": _llama(128256, 8192, 28672, 80, 64, 8, 8192),
        "Llama 2 7B, no GQA": _llama(32000, 4096, 11008, 32, 32, 32, 4096),
        "byte-llama, shipped here": parse_config(read_json(path), path),
    }


GPUS: dict[str, dict[str, float]] = {
    "L4": {"gib": 24, "peak_flops": 121e12, "mem_bw": 300e9},
    "A100 80 GB": {"gib": 80, "peak_flops": 312e12, "mem_bw": 2.0e12},
    "H100 SXM": {"gib": 80, "peak_flops": 989e12, "mem_bw": 3.35e12},
    "H200 SXM": {"gib": 141, "peak_flops": 989e12, "mem_bw": 4.8e12},
}
"""The vendor's data sheets, rounded: nominal memory, dense bf16 FLOP/s, bytes/s."""


def num_parameters(config: ModelConfig) -> int:
    """Weights of a checkpoint of this shape."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def capacity(
    available_bytes: int, bytes_per_token: int, block_size: int, max_model_len: int
) -> dict[str, float]:
    """Blocks in `available_bytes`, the tokens in them, and full-length requests at once.

    Mirrors `vllm/v1/core/kv_cache_utils.py:935` `get_num_blocks` for one full-attention group.
    """
    bytes_per_block = bytes_per_token * block_size
    num_blocks = max(0, available_bytes // bytes_per_block)
    concurrency = num_blocks / -(-max_model_len // block_size)
    return {
        "bytes_per_block": bytes_per_block,
        "num_blocks": num_blocks,
        "tokens": num_blocks * block_size,
        "max_concurrency": concurrency,
    }


def decode_step(
    shape: dict[str, Any], gpu: dict[str, float], batch: int, context: int
) -> dict[str, float]:
    """FLOP, bytes, intensity and the shortest possible time of one decode step.

    Every weight is read once and used once per request; every request reads its own context.
    Weights and cache take 2 bytes per number.
    """
    weights, kv = 2 * shape["parameters"], shape["kv_bytes_per_token"]
    flops = batch * (2 * shape["parameters"] + shape["attention_flops"] * context)
    kv_bytes = batch * context * kv
    seconds = max(flops / gpu["peak_flops"], (weights + kv_bytes) / gpu["mem_bw"])
    return {
        "flops": flops,
        "weight_bytes": weights,
        "kv_bytes": kv_bytes,
        "intensity": flops / (weights + kv_bytes),
        "ridge": gpu["peak_flops"] / gpu["mem_bw"],
        "seconds": seconds,
        "tokens_per_s": batch / seconds,
    }


def _shape(config: ModelConfig) -> dict[str, Any]:
    heads = config.num_attention_heads
    return {
        "layers": config.num_hidden_layers,
        "kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "context": config.max_position_embeddings,
        "parameters": num_parameters(config),
        "kv_bytes_per_token": config.kv_bytes_per_token(2),
        # 2 per multiplication and addition, for the score and for the weighted value
        "attention_flops": 4 * config.num_hidden_layers * heads * config.head_dim,
    }


def kv_calculator() -> dict[str, Any]:
    """Model shapes, GPUs, defaults of vLLM, and worked examples of `capacity`."""
    shapes = {name: _shape(config) for name, config in models().items()}
    examples = []
    for name, shape in shapes.items():
        for gib, utilization, block_size, length in ((24, 0.92, 16, 2048), (80, 0.9, 32, 8192)):
            weights = 2 * shape["parameters"]
            available = math.ceil(gib * 2**30 * utilization) - weights - 2**30
            worked = capacity(available, shape["kv_bytes_per_token"], block_size, length)
            settings = {"gib": gib, "utilization": utilization, "other_gib": 1}
            settings |= {"block_size": block_size, "max_model_len": length, "kv_dtype_bytes": 2}
            examples.append({"model": name, **settings, "available": available, **worked})
    return {"models": shapes, "gpus": GPUS, "examples": examples}


def roofline() -> dict[str, Any]:
    """Model shapes, GPUs, and worked examples of `decode_step`."""
    shapes = {name: _shape(config) for name, config in models().items()}
    examples = [
        {"model": name, "gpu": gpu, "batch": batch, "context": context}
        | decode_step(shapes[name], GPUS[gpu], batch, context)
        for name in shapes
        for gpu in GPUS
        for batch, context in ((1, 128), (64, 2048), (256, 1024))
    ]
    return {"models": shapes, "gpus": GPUS, "examples": examples}


def cuda_graphs() -> dict[str, Any]:
    """The kernels of a layer, defaults, and examples of `mini_vllm.cudagraph.launches.simulate`."""
    examples = []
    for layers, launch_us, kernel_us in ((1, 5, 2), (4, 5, 2), (4, 5, 10), (6, 2.5, 2.5)):
        for mode in launches.MODES:
            line = launches.simulate(launches.LAYER * layers, mode, launch_us, kernel_us)
            settings = {"layers": layers, "launch_us": launch_us, "kernel_us": kernel_us}
            result = {"launches": len(line.launches), "step_us": line.step_us}
            examples.append({"mode": mode, **settings, **result, "gpu_busy": line.gpu_busy})
    defaults = {"layers": 3, "launch_us": 5, "kernel_us": 2}
    return {
        "layer": list(launches.LAYER),
        "modes": list(launches.MODES),
        "defaults": defaults,
        "examples": examples,
    }


def _floats(exponent_bits: int, mantissa_bits: int, count: int) -> list[float]:
    """The first `count` values of a small float format, from 0 upwards."""
    bias, steps = (1 << (exponent_bits - 1)) - 1, 1 << mantissa_bits
    found = []
    for code in range(count):
        exponent, fraction = code // steps, code % steps / steps
        normal = exponent > 0
        found.append((normal + fraction) * 2.0 ** ((exponent if normal else 1) - bias))
    return found


FORMATS: dict[str, dict[str, Any]] = {
    "int8": {"points": [float(n) for n in range(128)], "bits": 8, "rule": "absmax"},
    "int4": {"points": [float(n) for n in range(8)], "bits": 4, "rule": "absmax"},
    "E4M3": {"points": _floats(4, 3, 127), "bits": 8, "rule": "absmax"},
    "E5M2": {"points": _floats(5, 2, 124), "bits": 8, "rule": "absmax"},
    "E2M1": {"points": _floats(2, 1, 8), "bits": 4, "rule": "absmax"},
    "MXFP4": {"points": _floats(2, 1, 8), "bits": 4, "rule": "power of two", "size": 32},
    "NVFP4": {"points": _floats(2, 1, 8), "bits": 4, "rule": "E4M3", "size": 16},
}
"""Non-negative values, bits of a code, what a scale may be, and the group where it is fixed."""

SCALE_BITS = {"absmax": 16, "power of two": 8, "E4M3": 8}


def round_to_points(sizes: np.ndarray, points: Sequence[float]) -> np.ndarray:
    """Index of the nearest point of each size (float64, not negative); ties to the even index."""
    values = np.asarray(points)
    above = np.clip(np.searchsorted(values, sizes), 1, len(values) - 1)
    middle = (values[above - 1] + values[above]) / 2
    up = (sizes > middle) | ((sizes == middle) & (above % 2 == 0))
    found: np.ndarray = np.where(up, above, above - 1)
    return found


def on_grid(row: np.ndarray, name: str, size: int, spike: float) -> dict[str, float]:
    """Quantize `row` (float64) with one scale per `size` neighbours; float64 throughout.

    Its largest weight is first made `spike` times as large. Returns `error`, the norm of the error
    of all other weights over theirs; `zeros`, how many of them became 0; `bits` per weight.
    NVFP4's float32 scale of the whole tensor is that of this row, and counts as no bits.
    """
    form = FORMATS[name]
    size = form.get("size", size)
    loud = int(np.abs(row).argmax())
    weights = row.copy()
    weights[loud] *= spike
    blocks = weights.reshape(-1, size)
    largest = np.abs(blocks).max(axis=1, keepdims=True)
    if form["rule"] == "absmax":
        scale = largest / form["points"][-1]
    elif form["rule"] == "power of two":
        scale = 2.0 ** (np.floor(np.log2(largest)) - 2)
    else:
        e4m3 = FORMATS["E4M3"]["points"]
        whole = 448 * 6 / largest.max()
        scale = np.take(e4m3, round_to_points(np.minimum(whole * largest / 6, 448), e4m3)) / whole
    back = np.take(form["points"], round_to_points(np.abs(blocks) / scale, form["points"])) * scale
    sizes, got = np.delete(np.abs(weights), loud), np.delete(back.ravel(), loud)
    error = float(np.linalg.norm(got - sizes) / np.linalg.norm(sizes))
    bits = form["bits"] + SCALE_BITS[form["rule"]] / size
    return {"error": error, "zeros": int((got == 0).sum()), "bits": bits}


def code_points() -> dict[str, Any]:
    """Rows of the shipped model's weights, the formats, and worked examples of `on_grid`."""
    weights = load_checkpoint("byte-llama").weights
    rows = {}
    for layer, place, number in ((3, "mlp.gate_proj", 219), (0, "self_attn.o_proj", 114)):
        name = f"{place.split('.')[1]} of layer {layer}, row {number}"
        rows[name] = weights[f"model.layers.{layer}.{place}.weight"][number].astype(float)
    examples = [
        {"row": row, "format": name, "size": size, "spike": spike}
        | on_grid(rows[row], name, size, spike)
        for row in rows
        for name in FORMATS
        for size, spike in ((256, 1), (256, 20), (32, 8))
    ]
    return {
        "rows": {name: row.tolist() for name, row in rows.items()},
        "formats": FORMATS,
        "scale_bits": SCALE_BITS,
        "examples": examples,
    }


def experts_touched(num_experts: int, top_k: int, batch: int) -> float:
    """Experts of a layer that a decode step of `batch` tokens reads, if all are as likely."""
    return num_experts * (1 - (1 - top_k / num_experts) ** batch)


def drawn_experts(num_experts: int, top_k: int, batch: int) -> list[list[int]]:
    """Different experts for each token, drawn by a generator that a browser has as well."""
    state, tokens = 7, []
    for _ in range(batch):
        left, chosen = list(range(num_experts)), []
        for _ in range(top_k):
            state = (state * 1664525 + 1013904223) % 2**32
            chosen.append(left.pop((state >> 8) % len(left)))
        tokens.append(chosen)
    return tokens


EXPERTS_ASKED = (
    ("8 experts, top-2, one request decodes. How many experts does the step read?",
     8, 2, 1, "drawn", "The two that its token chose: a quarter of their bytes."),
    ("16 requests decode. How many of the 8 are read now?",
     8, 2, 16, "drawn", "32 choices among 8: nobody is left out, and each is read once."),
    ("How many rows does each of the 8 multiply, on average?",
     8, 2, 16, "rows", "32 choices over 8 experts: still far below the ridge."),
    ("128 experts, top-8, and 8 requests make 64 choices. How many experts does this draw read?",
     128, 8, 8, "drawn", "Some are chosen twice or more; on average 128 x (1 - (15/16)^8) = 51.6."),
)  # fmt: skip
"""What is asked: experts, top-k, batch, and which result answers."""


def expert_bytes() -> dict[str, Any]:
    """Shapes of models with experts, GPUs, and examples of what a decode step reads."""
    shapes = {
        "Mixtral 8x7B": {"experts": 8, "top_k": 2, "hidden": 4096, "inner": 14336, "layers": 32},
        "measured in phase 07": {
            "experts": 128, "top_k": 8, "hidden": 2048, "inner": 768, "layers": 24,
        },
        "Qwen1.5-MoE-A2.7B": {
            "experts": 60, "top_k": 4, "hidden": 2048, "inner": 1408, "layers": 24,
        },
    }  # fmt: skip
    examples = []
    for experts, top_k, batch in ((8, 2, 1), (8, 2, 16), (60, 4, 3), (128, 8, 8), (256, 8, 64)):
        drawn = drawn_experts(experts, top_k, batch)
        examples.append(
            {"experts": experts, "top_k": top_k, "batch": batch, "first": drawn[0]}
            | {"touched": experts_touched(experts, top_k, batch)}
            | {"drawn": len({expert for token in drawn for expert in token})}
        )
    questions = []
    for ask, experts, top_k, batch, kind, because in EXPERTS_ASKED:
        read = {expert for token in drawn_experts(experts, top_k, batch) for expert in token}
        answer = len(read) if kind == "drawn" else batch * top_k // len(read)
        knobs = {"experts": experts, "top_k": top_k, "batch": batch}
        questions.append({"ask": ask, "answer": answer, "because": because, **knobs})
    return {"models": shapes, "gpus": GPUS, "examples": examples, "questions": questions}


def speculation_step(
    alpha: float, k: int, c: float, batch: float, ridge: float
) -> dict[str, float]:
    """What `k` drafts a run are worth at a batch, where a step is bound by weights or arithmetic.

    Up to `ridge` tokens a step costs one reading of the weights, beyond it its tokens count. The
    cache is left out. Lab 08-04's model is that of small batches.

    Args:
        alpha: probability that a draft is kept if those before it were.
        c: one drafter step, in plain steps of the target at this batch.
        batch: requests.
        ridge: tokens of a step at which arithmetic takes as long as reading the weights.

    Returns:
        `tokens` per run and request; `verify`, a run in plain steps; `speedup`.
    """
    tokens = sum(alpha**i for i in range(k + 1))
    verify = max(1.0, batch * (k + 1) / ridge) / max(1.0, batch / ridge)
    return {"tokens": tokens, "verify": verify, "speedup": tokens / (verify + k * c)}


def best_k(alpha: float, c: float, batch: float, ridge: float, max_k: int = 20) -> int:
    """The number of drafts with the largest speedup, of equals the smallest."""
    return max(
        range(max_k + 1), key=lambda k: speculation_step(alpha, k, c, batch, ridge)["speedup"]
    )


def drafted_runs(text: str, min_n: int, max_n: int, k: int) -> list[dict[str, Any]]:
    """n-gram drafts over a text that is taken for what the model says after its first character.

    One entry per run: `drafts`, and `accepted`, how many of them were kept. A run says the kept
    drafts and one character more, while there are any.
    """
    tokens = [ord(character) for character in text]
    runs, known = [], 1
    while known < len(tokens):
        room = min(k, len(tokens) - known - 1)
        drafts = ngram_propose(np.array(tokens[:known]), min_n, max_n, room)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == tokens[known + accepted]:
            accepted += 1
        runs.append({"drafts": "".join(map(chr, drafts)), "accepted": accepted})
        known += accepted + 1
    return runs


SAMPLE = "for i in range(n):\n    a[i] = 0\nfor j in range(n):\n    b[j] = 0\n"


def speculation() -> dict[str, Any]:
    """Ridges, defaults, and worked examples of `speculation_step` and `drafted_runs`."""
    ridges = {name: gpu["peak_flops"] / gpu["mem_bw"] for name, gpu in GPUS.items()}
    examples = [
        {"gpu": gpu, "alpha": alpha, "k": k, "c": c, "batch": batch}
        | speculation_step(alpha, k, c, batch, ridges[gpu])
        | {"best_k": best_k(alpha, c, batch, ridges[gpu])}
        for gpu in ("A100 80 GB", "H100 SXM")
        for alpha, k, c, batch in (
            (0.7, 5, 0.05, 1), (0.7, 5, 0.05, 64), (0.7, 3, 0.05, 512), (0.3, 2, 0.3, 8),
            (0.9, 10, 0.1, 16), (1.0, 4, 0.0, 1024),
        )
    ]  # fmt: skip
    texts = (SAMPLE, "banana bandana banana", "abcdefgh", "aaaaaaaaaa", "ab")
    drafted = [
        {
            "text": text,
            "min_n": low,
            "max_n": high,
            "k": k,
            "runs": drafted_runs(text, low, high, k),
        }
        for text in texts
        for low, high, k in ((2, 5, 3), (1, 3, 4), (3, 3, 8))
    ]
    defaults = {"gpu": "H100 SXM", "alpha": 0.7, "k": 3, "c": 0.05, "batch": 8, "text": SAMPLE}
    ridge = ridges["H100 SXM"]
    asked = (
        ("alpha is 1: every draft is kept. k = 3. How many tokens does a run bring?",
         1.0, 3, 0.0, 1, 4, "Three drafts, and one token that the model says itself."),
        ("An H100, k = 3. Up to how many requests does it cost one plain step to verify?",
         0.7, 3, 0.05, 64, int(ridge // 4), "Each has 4 rows, and the ridge is 295."),
        ("alpha 0.5, a draft costs 0.1 steps, 8 requests. Which k is best?",
         0.5, best_k(0.5, 0.1, 8, ridge), 0.1, 8, best_k(0.5, 0.1, 8, ridge),
         "The next draft is kept too seldom to pay for its own cost."),
        ("The same with 512 requests. Which k is best now?",
         0.5, 3, 0.1, 512, best_k(0.5, 0.1, 512, ridge),
         "512 rows are past the ridge without drafts: every row costs, and not every one is kept."),
    )  # fmt: skip
    names = ("ask", "alpha", "k", "c", "batch", "answer", "because")
    return {
        "ridges": ridges, "defaults": defaults, "examples": examples, "drafted": drafted,
        "questions": [dict(zip(names, question, strict=True)) for question in asked],
    }  # fmt: skip


WIDGETS: dict[str, Callable[[], dict[str, Any]]] = {
    "engine-timeline": gantt.engine_timeline,
    "pool-film": lambda: dict(film.pool_film()),
    "kv-calculator": kv_calculator,
    "roofline": roofline,
    "cuda-graphs": cuda_graphs,
    "code-points": code_points,
    "expert-bytes": expert_bytes,
    "speculation": speculation,
    "sampling-knobs": sampling_knobs.sampling_knobs,
    "adapter-slots": adapter_slots.adapter_slots,
    "allowed-bytes": allowed_bytes.allowed_bytes,
    "shard-matrix": shard_matrix.shard_matrix,
    "stream-buffers": stream_buffers.stream_buffers,
    "attention-map": attention_map.attention_map,
    "cache-race": cache_race.cache_race,
    "block-allocator": block_allocator.block_allocator,
    "request-journey": request_journey.request_journey,
    "softmax-keys": softmax_keys.softmax_keys,
    "backend-choice": backend_choice.backend_choice,
    "scheduler-desk": live_script.scheduler_desk,
    "graph-tape": graph_tape.graph_tape,
    "padding-ladder": padding_ladder.padding_ladder,
    "weight-grid": weight_grid.weight_grid,
    "smooth-alpha": weight_grid.smooth_alpha,
}
"""By the name that a page writes in `<!-- widget: NAME -->`."""

NEEDS: dict[str, tuple[str, ...]] = {
    "softmax-keys": ("decide",),
    "backend-choice": ("decide",),
    "scheduler-desk": ("live-views", "live-form"),
    "graph-tape": ("decide",),
    "padding-ladder": ("decide",),
    "weight-grid": ("decide", "code-points"),
    "smooth-alpha": ("decide",),
}
"""Scripts of book/widgets that must be there before a widget's own."""
