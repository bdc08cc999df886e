"""Adapters over the linears of labs 06-01 (int8) and 06-03 (int4): the logits of peft.

peft runs over a model that holds the weights which the codes stand for, so base and delta are
added there in the same way: the delta is of the rows that the layer got, and is not quantized.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course.learning import mine
from course.learning.labs import find_labs
from mini_vllm import EngineParts, LLMEngine
from mini_vllm.lora.request import LoRARequest
from mini_vllm.models.loader import MODELS, SHIPPED_MODEL, load_checkpoint
from mini_vllm.models.tests.test_parity import float64_inside, load_theirs
from mini_vllm.models.transformer import Transformer
from mini_vllm.tests.lora_support import Watching, answers, write_adapter

ROOT = Path(__file__).resolve().parents[1]
TOLERANCE = 1e-9
"""On logits of about 10, float64 on both sides."""
PROMPT = list(b"The scheduler decides which requests")


def linear_of(lab_id: str) -> Any:
    """The lab's linear layer, from its solution."""
    labs = [lab for lab in find_labs(ROOT) if lab.id == lab_id]
    parts, _ = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    return parts["linear"]


def weights_of(model: Transformer) -> dict[str, np.ndarray]:
    """What the codes of each linear stand for, by the checkpoint's names: the layer of the unit
    vectors."""
    c = model.config
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    packed = {
        "self_attn.qkv_proj": {"q_proj": q, "k_proj": kv, "v_proj": kv},
        "self_attn.o_proj": {"o_proj": c.hidden_size},
        "mlp.gate_up_proj": {"gate_proj": c.intermediate_size, "up_proj": c.intermediate_size},
        "mlp.down_proj": {"down_proj": c.hidden_size},
    }
    made: dict[str, np.ndarray] = {"lm_head": model.lm_head(np.eye(c.hidden_size)).T}
    for number, layer in enumerate(model.layers):
        for name, rows in packed.items():
            block, _, attribute = name.partition(".")
            inputs = c.intermediate_size if attribute == "down_proj" else c.hidden_size
            whole, start = getattr(layer, attribute)(np.eye(inputs)).T, 0
            for part, count in rows.items():
                made[f"model.layers.{number}.{block}.{part}"] = whole[start : start + count]
                start += count
    return made


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("lab_id", ["06-01", "06-03"])
def test_adapters_over_a_quantized_base_give_the_logits_and_tokens_of_peft(
    lab_id: str, tmp_path: Path
) -> None:
    """Two shipped ones, one of embedding and head, and none, in one batch with no slot to spare."""
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: pip install -e '.[torch]'")
    import peft
    import torch

    checkpoint, linear = load_checkpoint(SHIPPED_MODEL), linear_of(lab_id)
    model = Transformer(checkpoint.config, checkpoint.weights, "float64", linear=linear)
    ends = write_adapter(
        tmp_path / "ends", config=checkpoint.config, size=0.3, r=4, lora_alpha=8,
        target_modules=("embed_tokens", "lm_head", "q_proj"),
    )  # fmt: skip
    paths = [MODELS / "adapters" / "shout", MODELS / "adapters" / "quote", ends]
    wanted = [None, *(LoRARequest(p.name, n, str(p)) for n, p in enumerate(paths, start=1))]
    watching = Watching()
    engine = LLMEngine(
        model, enable_lora=True, max_loras=3, parts=EngineParts(sampler=lambda: watching)
    )
    said = answers(engine, [PROMPT] * 4, wanted, max_tokens=12)
    assert len({tuple(tokens) for tokens in said}) == 4
    for request, tokens in zip(wanted, said, strict=True):
        theirs = load_theirs(SHIPPED_MODEL)
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())  # no longer tied
        with torch.no_grad():
            for name, weight in weights_of(model).items():
                theirs.get_submodule(name).weight.copy_(torch.from_numpy(weight.copy()))
        if request is not None:
            theirs = peft.PeftModel.from_pretrained(theirs, request.lora_path).double().eval()
        with torch.no_grad(), float64_inside():
            expected = theirs(torch.tensor([[*PROMPT, *tokens[:-1]]])).logits[0].numpy()
        expected = expected[len(PROMPT) - 1 :]
        assert expected.argmax(axis=1).tolist() == tokens
        for row in expected:
            assert min(float(np.abs(row - mine).max()) for mine in watching.rows) < TOLERANCE
