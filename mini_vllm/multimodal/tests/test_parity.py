"""Logits with pictures, beside those of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from labkit.pictures import KINDS, single_question
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.models.loader import MODELS
from mini_vllm.tests.multimodal_support import picture, write_llava

pytestmark = pytest.mark.torch
BYTE_SEES = MODELS / "byte-sees"
PARAMS = SamplingParams(max_tokens=1, ignore_eos=True)


def ours(folder: Path, prompts: list[dict[str, Any]], **knobs: Any) -> list[np.ndarray]:
    """The row of logits behind each prompt, all of them in one batch."""
    engine = LLMEngine(folder, num_blocks=400, **knobs)
    rows: dict[str, np.ndarray] = {}
    execute = engine.runner.execute

    def noted(plan: Any) -> np.ndarray:
        logits = execute(plan)
        for request, row in zip(plan.scheduled_requests, logits, strict=True):
            if request.request_id in plan.sampling_req_ids:
                rows[request.request_id] = row.copy()
        return logits

    engine.runner.execute = noted
    outputs = engine.generate(prompts, PARAMS)
    return [rows[output.request_id] for output in outputs]


def theirs(folder: Path, prompts: list[dict[str, Any]]) -> list[np.ndarray]:
    """The same of `transformers`, one after another, from pictures and text."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    Image = pytest.importorskip("PIL.Image")
    model = transformers.LlavaForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    prepare = transformers.AutoImageProcessor.from_pretrained(folder)
    size, marker = model.config.image_seq_length, model.config.image_token_id
    found = []
    for prompt in prompts:
        shown = prompt["multi_modal_data"]["image"]
        pixels = prepare([Image.fromarray(p) for p in shown], return_tensors="pt")["pixel_values"]
        pieces = prompt["prompt"].split("<image>")
        ids = list(pieces[0].encode())
        for piece in pieces[1:]:
            ids += [marker] * size + list(piece.encode())
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0, -1]
        found.append(logits.numpy())
    return found


@pytest.mark.parametrize("knobs", [{}, {"max_num_batched_tokens": 50}], ids=["whole", "chunks"])
def test_logits_of_byte_sees_are_those_of_transformers(knobs) -> None:
    rng = np.random.default_rng(4)
    prompts = []
    for kind in KINDS:
        turn = single_question(rng, kind)
        text = "<image>" * len(turn.pictures) + turn.question.text + "\n"
        prompts.append({"prompt": text, "multi_modal_data": {"image": list(turn.pictures)}})
    pairs = zip(ours(BYTE_SEES, prompts, **knobs), theirs(BYTE_SEES, prompts), strict=True)
    assert max(np.abs(a - b).max() for a, b in pairs) < 1e-4


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"vision_feature_layer": -1},
        {"vision_feature_layer": 1},
        {"vision_feature_select_strategy": "full", "image_seq_length": 5},
        {"projector_hidden_act": "quick_gelu"},
    ],
    ids=str,
)
def test_logits_of_other_layouts_are_those_of_transformers(changes, tmp_path) -> None:
    folder = write_llava(tmp_path / "model", seed=3, **{"image_seq_length": 4, **changes})
    data = {"multi_modal_data": {"image": [picture(5)]}}
    prompts = [
        {"prompt": "see<image>", **data},
        {"prompt": "<image>and<image>!", "multi_modal_data": {"image": [picture(1), picture(7)]}},
    ]
    pairs = zip(ours(folder, prompts), theirs(folder, prompts), strict=True)
    worst = max(np.abs(a - b).max() / max(1.0, np.abs(b).max()) for a, b in pairs)
    assert worst < 1e-4
