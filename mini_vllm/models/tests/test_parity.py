"""Parity with transformers: the same logits and the same greedy tokens from the same files.

Models of each family with random weights are built by `transformers`, saved, and loaded here. Our
side runs under pressure (chunks, prefix hits, preemption); theirs is a dense float64 forward pass
over each sequence, and its own `generate`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mini_vllm.batch import ForwardBatch
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.models.loader import load_checkpoint, resolve
from mini_vllm.models.tests.test_checkpoint import byte_tokenizer_json
from mini_vllm.models.transformer import Transformer

pytestmark = [pytest.mark.torch, pytest.mark.slow]

MAX_TOKENS = 64
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
SIZES = {
    "vocab_size": 257,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 56,
    "norm_topk_prob": True, "head_dim": 16,
}  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama tied": ("Llama", {"tie_word_embeddings": True}),
    "llama biased": ("Llama", {"attention_bias": True, "mlp_bias": True}),
    "llama3 rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama one kv head": ("Llama", {"num_key_value_heads": 1, "head_dim": 32}),
    "llama theta": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
    "qwen2": ("Qwen2", {}),
    "qwen2 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 24}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 biased": ("Qwen3", {"head_dim": 16, "attention_bias": True}),
}
MIXTURES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3 moe": ("Qwen3Moe", EXPERTS),
    "qwen3 moe in parts": (
        "Qwen3Moe",
        EXPERTS | {"norm_topk_prob": False, "tie_word_embeddings": True, "mlp_only_layers": [1]},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
}
SAVES: dict[str, tuple[str, dict[str, Any]]] = {
    "sharded": ("float32", {"max_shard_size": "100KB"}),
    "bf16": ("bfloat16", {}),
    "fp16": ("float16", {}),
    "bf16 sharded": ("bfloat16", {"max_shard_size": "60KB"}),
}


def save_model(folder: Path, family: str, dtype: str = "float32", **options: Any) -> Path:
    """A random-weight model of a family, written by transformers; its biases and norms too."""
    import torch
    import transformers

    name, changes = (FAMILIES | MIXTURES)[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SIZES | changes)
    theirs = getattr(transformers, f"{name}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            # The default initialisation (norms 1, biases 0, tiny weights) would hide errors.
            noise = torch.randn_like(parameter)
            parameter.copy_(1.0 + 0.2 * noise if "norm" in key else 0.15 * noise)
    theirs.to(getattr(torch, dtype)).save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text(json.dumps(byte_tokenizer_json()))
    return folder


@contextlib.contextmanager
def float64_inside() -> Iterator[None]:
    """Make transformers' own casts to float32 casts to float64.

    A float64 model still computes norms, rotary angles and the eager softmax in float32 there,
    which costs about 1e-5 in the logits; the reference must not.
    """
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


def load_theirs(folder: Path) -> Any:
    """The folder in transformers, float64 throughout, weights as stored."""
    import torch
    from transformers import AutoModelForCausalLM

    # Of the ways to compute experts, the plain loop is the one that knows float64.
    options = {"experts_implementation": "eager"} if "experts" in _config_text(folder) else {}
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options).eval()
    with float64_inside():  # rotary frequencies are computed when the module is made
        theirs.model.rotary_emb = type(theirs.model.rotary_emb)(theirs.config)
    assert theirs.model.rotary_emb.inv_freq.dtype == torch.float64
    return theirs


def _config_text(folder: Path) -> str:
    return (folder / "config.json").read_text(encoding="utf-8")


def their_logits(theirs: Any, token_ids: list[int]) -> np.ndarray:
    """[num_tokens, vocab_size] of one dense pass."""
    import torch

    with torch.no_grad(), float64_inside():
        return theirs(torch.tensor([token_ids]), use_cache=False).logits[0].numpy()


def their_greedy(theirs: Any, batch: list[list[int]]) -> list[list[int]]:
    """64 greedy tokens of `generate` for each prompt, one prompt at a time, EOS ignored."""
    import torch

    outputs = []
    for token_ids in batch:
        with float64_inside():
            out = theirs.generate(
                torch.tensor([token_ids]),
                attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
                do_sample=False,
                max_new_tokens=MAX_TOKENS,
                eos_token_id=None,
                pad_token_id=0,
            )
        outputs.append(out[0, len(token_ids) :].tolist())
    return outputs


def random_prompts() -> list[list[int]]:
    """Six ragged prompts; three share 40 tokens, one is a single token."""
    rng = np.random.default_rng(7)
    shared = rng.integers(0, 256, 40).tolist()
    lengths = (0, 9, 23)
    made = [shared + rng.integers(0, 256, n).tolist() for n in lengths]
    return [*made, rng.integers(0, 256, 70).tolist(), [65], rng.integers(0, 256, 17).tolist()]


def text_prompts() -> list[list[int]]:
    """The same shape in English and Python, which the shipped model was trained for."""
    shared = "The KV cache is divided into blocks of a "
    texts = [
        shared,
        shared + "fixed size",
        shared + "fixed number of tokens.",
        "def schedule(self) -> SchedulerOutput:\n    # One budget for all requests.",
        "T",
        "import numpy as n",
    ]
    return [list(text.encode()) for text in texts]


class Recorder:
    """A model that keeps every logits row with the tokens it was computed from."""

    def __init__(self, inner: Transformer) -> None:
        self.inner = inner
        self.rows: list[np.ndarray] = []

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        logits = self.inner.forward(batch)
        self.rows = list(logits)
        return logits


def under_pressure(
    folder: Path, dtype: str, prompts: list[list[int]]
) -> tuple[list[list[int]], float, dict[str, int], Any]:
    """Serve the prompts in a small pool and budget; compare every row with a dense pass.

    Returns:
        Output ids per prompt, the largest absolute difference of any logit of any scheduled
        request (partial prefills too), counts of events, and the model in transformers.
    """
    checkpoint = load_checkpoint(folder)
    model = Transformer(checkpoint.config, checkpoint.weights, dtype)
    engine = LLMEngine(
        num_blocks=34,
        block_size=8,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        long_prefill_token_threshold=10,
        model=model,
    )
    recorder = engine.model = Recorder(model)
    params = SamplingParams(max_tokens=MAX_TOKENS, ignore_eos=True)
    ids = [engine.add_request(prompt, params) for prompt in prompts]
    requests = [engine.requests[request_id] for request_id in ids]
    events = {"hits": 0, "preempted": 0, "chunks": 0}
    rows: dict[tuple[str, int], np.ndarray] = {}
    plans: list[Any] = []
    engine.observers.append(plans.append)
    while engine.has_unfinished_requests():
        engine.step()
        output = plans[-1]
        events["hits"] += sum(n > 0 for n in output.num_cached_tokens.values())
        events["preempted"] += len(output.preempted_req_ids)
        for request, row in zip(output.scheduled_requests, recorder.rows, strict=True):
            position = request.num_computed_tokens - 1
            events["chunks"] += position < request.num_prompt_tokens - 1
            rows[request.request_id, position] = row
    theirs = load_theirs(folder)
    worst = 0.0
    for request in requests:
        dense = their_logits(theirs, request.all_token_ids)
        for (request_id, position), row in rows.items():
            if request_id == request.request_id:
                worst = max(worst, float(np.abs(row - dense[position]).max()))
    return [request.output_token_ids for request in requests], worst, events, theirs


def check_parity(folder: Path, prompts: list[list[int]]) -> None:
    """Logits to 1e-9 in float64 and 1e-4 in float32, and 64 greedy tokens of every prompt."""
    outputs, worst, events, theirs = under_pressure(folder, "float64", prompts)
    assert min(events.values()) > 0, f"the workload was meant to exercise all of {events}"
    assert worst < 1e-9
    assert outputs == their_greedy(theirs, prompts)
    _, worst, _, _ = under_pressure(folder, "float32", prompts)
    assert worst < 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_logits_and_greedy_tokens_of_transformers(tmp_path, family):
    check_parity(save_model(tmp_path, family), random_prompts())


@pytest.mark.parametrize("save", SAVES)
def test_a_saved_form_gives_the_logits_and_greedy_tokens_of_transformers(tmp_path, save):
    dtype, options = SAVES[save]
    folder = save_model(tmp_path, "qwen3 biased", dtype, **options)
    assert (folder / "model.safetensors.index.json").exists() == ("max_shard_size" in options)
    check_parity(folder, random_prompts())


def test_the_shipped_model_gives_the_logits_and_greedy_tokens_of_transformers():
    check_parity(resolve("byte-llama"), text_prompts())


def check_mixture(folder: Path, prompts: list[list[int]]) -> None:
    """Logits alone, of every step: their loop over experts takes minutes for 64 tokens a prompt."""
    for dtype, bound in (("float64", 1e-9), ("float32", 1e-4)):
        _, worst, events, _ = under_pressure(folder, dtype, prompts)
        assert min(events.values()) > 0, f"the workload was meant to exercise all of {events}"
        assert worst < bound, dtype


@pytest.mark.parametrize("family", MIXTURES)
def test_a_mixture_gives_the_logits_of_transformers(tmp_path, family):
    check_mixture(save_model(tmp_path, family), random_prompts())


def test_the_shipped_mixture_gives_the_logits_of_transformers():
    check_mixture(resolve("byte-moe"), text_prompts())


def test_the_shipped_tokenizer_gives_the_ids_of_transformers():
    """The folder's `tokenizer.json`, run by the library, against `ByteTokenizer`."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(resolve("byte-llama"))
    ours = load_checkpoint("byte-llama").tokenizer
    for text in (
        "hello world",
        "  two spaces\n\ttab",
        "\N{ROCKET} caf\N{LATIN SMALL LETTER E WITH ACUTE}",
    ):
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids) == ours.decode(ids) == text
