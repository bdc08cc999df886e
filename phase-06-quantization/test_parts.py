"""Labs 06-01 and 06-03 as the engine's linear layers, on the shipped model.

The parts are found as `course run --mine` finds them, from the solutions. Quantized layers give
other tokens than the engine's own; what must not change them is how the engine schedules.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear, Transformer

PHASE = Path(__file__).resolve().parent
ROOT = PHASE.parent
SUPPLIERS = ("06-01", "06-03")
PROMPTS = [
    "The scale of a group is",
    "The scale of a group is stored",
    "A word of eight codes",
]
SETTINGS: dict[str, dict[str, Any]] = {
    "roomy": {},
    "chunked": {"max_num_batched_tokens": 10, "block_size": 4},
    "cramped": {"num_blocks": 20, "block_size": 4, "max_num_batched_tokens": 20},
}


@cache
def part_of(lab_id: str) -> Any:
    labs = [lab for lab in find_labs(ROOT) if lab.id == lab_id]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert owners["linear"].id == lab_id
    return parts["linear"]


@cache
def model(lab_id: str) -> Transformer:
    """The shipped model in float64 with the lab's layers: the batch's shape changes no token."""
    checkpoint = load_checkpoint("byte-llama")
    return Transformer(checkpoint.config, checkpoint.weights, "float64", linear=part_of(lab_id))


@pytest.mark.parametrize(
    "lab_id", [SUPPLIERS[0], pytest.param(SUPPLIERS[1], marks=pytest.mark.slow)]
)
def test_scheduling_does_not_change_what_quantized_layers_say(lab_id):
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    said, preempted = {}, {}
    for name, settings in SETTINGS.items():
        engine = LLMEngine(model=model(lab_id), **settings)
        preempted[name] = 0

        def note(plan: Any, name: str = name) -> None:
            preempted[name] += len(plan.preempted_req_ids)

        engine.observers.append(note)
        results = engine.generate(PROMPTS, sampling)
        said[name] = [list(result.outputs[0].token_ids) for result in results]
    assert said["chunked"] == said["cramped"] == said["roomy"]
    assert preempted["cramped"] >= 1


@pytest.mark.parametrize(
    # 3,211,520 weights in 10,497 rows: four layers of 2,560 rows, and the head's 257
    ("lab_id", "bits"),
    [("06-01", 8 + 32 * 10_497 / 3_211_520), ("06-03", 4.125)],
)
def test_every_layer_of_the_engine_is_quantized_and_holds_that_many_bits(lab_id, bits):
    transformer = model(lab_id)
    layers = [transformer.lm_head]
    for layer in transformer.layers:
        layers += [layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj]
    assert all(type(layer) is part_of(lab_id) for layer in layers)
    held = sum(v.nbytes for layer in layers for v in vars(layer).values() if hasattr(v, "nbytes"))
    assert 8 * held / 3_211_520 == pytest.approx(bits)


@pytest.mark.slow
@pytest.mark.parametrize(("lab_id", "least", "most"), [("06-01", 1e-4, 0.03), ("06-03", 0.02, 0.3)])
def test_logits_are_near_the_exact_ones_and_not_equal(lab_id, least, most):
    tokens = np.array(list(PROMPTS[1].encode()))
    checkpoint = load_checkpoint("byte-llama")
    exact = Transformer(checkpoint.config, checkpoint.weights, "float64", linear=Linear)
    ours, theirs = (_logits(transformer, tokens) for transformer in (model(lab_id), exact))
    centred = theirs - theirs.mean(axis=1, keepdims=True)
    assert least < np.linalg.norm(ours - theirs) / np.linalg.norm(centred) < most


def _logits(transformer: Transformer, tokens: np.ndarray) -> np.ndarray:
    from mini_vllm.batch import ForwardBatch

    length = len(tokens)
    layers, kv_heads, head_dim = transformer.kv_shape
    return transformer.forward(
        ForwardBatch(
            token_ids=tokens,
            positions=np.arange(length),
            slot_mapping=np.arange(length),
            query_start_loc=np.array([0, length]),
            seq_lens=np.array([length]),
            block_tables=np.zeros((1, 1), dtype=np.int64),
            logits_indices=np.arange(length),
            block_size=length,
            kv_cache=np.zeros((layers, 2, 1, length, kv_heads, head_dim)),
        )
    )


@pytest.mark.slow
def test_course_run_mine_uses_the_later_lab(tmp_path, monkeypatch, capsys):
    """A course with both labs passed: the int4 layers run, and say what they say in an engine."""
    said = PassedCourse(tmp_path, SUPPLIERS, monkeypatch, capsys).run(PROMPTS[2], "--mine")
    assert "linear             yours, from lab 06-03" in said
    engine = LLMEngine(parts=EngineParts(linear=part_of("06-03")))
    (result,) = engine.generate([PROMPTS[2]], SamplingParams(max_tokens=12))
    assert engine.tokenizer.decode(list(result.outputs[0].token_ids)).splitlines()[0] in said
