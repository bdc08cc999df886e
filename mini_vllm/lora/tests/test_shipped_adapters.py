"""The shipped adapters: small, different from each other and from the base, and as their cards say.

With torch and peft: the logits of `peft` on `transformers`.
"""

from __future__ import annotations

import functools
import importlib.util
import json
import re
from pathlib import Path

import numpy as np
import pytest

from mini_vllm import LLM, EngineParts, SamplingParams
from mini_vllm.lora.layers import AdaptedModel
from mini_vllm.lora.request import LoRARequest
from mini_vllm.models.loader import MODELS, SHIPPED_MODEL
from mini_vllm.models.tests.test_parity import float64_inside, load_theirs
from mini_vllm.tests.lora_support import Watching

FOLDERS = sorted((MODELS / "adapters").iterdir())
NAMES = [folder.name for folder in FOLDERS]
TOLERANCE = 1e-9
"""On logits of about 10, float64 on both sides."""
PROMPT = "The scheduler decides which requests"


def adapter(name: str) -> LoRARequest:
    return LoRARequest(name, 1 + NAMES.index(name), str(MODELS / "adapters" / name))


@functools.cache
def texts() -> dict[str, str]:
    """What the base ("") and each adapter write to one prompt, all in one batch."""
    llm = LLM(dtype="float64", enable_lora=True, max_loras=2)
    wanted = [None, *map(adapter, NAMES)]
    results = llm.generate([PROMPT] * len(wanted), SamplingParams(max_tokens=64), wanted)
    return dict(zip(["", *NAMES], [r.outputs[0].text for r in results], strict=True))


def card(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_there_are_three_each_below_150_kilobytes():
    assert NAMES == ["code", "quote", "shout"]
    for folder in FOLDERS:
        assert (folder / "adapter_model.safetensors").stat().st_size < 150_000


@pytest.mark.slow
def test_each_writes_in_its_own_manner():
    said = texts()
    assert len(set(said.values())) == 4
    letters = [c for c in said["shout"] if c.isalpha()]
    assert sum(c.isupper() for c in letters) > 0.9 * len(letters)
    assert sum(c.isupper() for c in said[""]) < 0.2 * len(said[""])
    assert re.search(r"\n> .+\n> ", said["quote"]) and "\n>" not in said[""]
    assert re.search(r"^def \w+\(", said["code"], re.M) and "def " not in said[""]


@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_the_card_says_what_the_folder_holds_and_what_it_gained(folder):
    page, raw = card(folder), json.loads((folder / "adapter_config.json").read_text())
    size = (folder / "adapter_model.safetensors").stat().st_size
    assert f"{size:,} bytes" in page
    assert f"| rank, alpha, scaling | {raw['r']}, {raw['lora_alpha']}, " in page
    assert all(f"`{target}`" in page for target in raw["target_modules"])
    bits = [
        float(found)
        for found in re.findall(r"\| (?:byte-llama|with this adapter) \| (.+?) \|", page)
    ]
    assert bits[1] < 0.9 * bits[0]


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_the_texts_on_the_card_are_what_it_writes(folder):
    shown = re.findall(r"```text\n(.*?)\n```", card(folder), re.S)
    prompts = [text.splitlines()[0] for text in shown]
    llm = LLM(SHIPPED_MODEL, enable_lora=True)
    results = llm.generate(prompts, SamplingParams(max_tokens=96), adapter(folder.name))
    for text, prompt, result in zip(shown, prompts, results, strict=True):
        assert text == f"{prompt}\n{result.outputs[0].text.rstrip()}"


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=NAMES)
def test_an_adapter_gives_the_logits_and_tokens_of_peft(folder):
    if importlib.util.find_spec("peft") is None:
        pytest.skip("peft is not installed: pip install -e '.[torch]'")
    import peft
    import torch

    theirs = peft.PeftModel.from_pretrained(load_theirs(SHIPPED_MODEL), folder).double().eval()
    watching = Watching()
    llm = LLM(
        dtype="float64",
        enable_lora=True,
        max_loras=2,
        enable_prefix_caching=False,
        parts=EngineParts(sampler=lambda: watching),
    )
    other = adapter(next(name for name in NAMES if name != folder.name))
    for prompt in (PROMPT, "Return the", "A block of tokens " * 12):
        asked = llm.generate(
            [prompt, prompt, prompt],
            SamplingParams(max_tokens=12, ignore_eos=True),
            [other, adapter(folder.name), None],
        )[1].outputs[0]
        ids = torch.tensor([[*prompt.encode(), *asked.token_ids[:-1]]])
        with torch.no_grad(), float64_inside():
            expected = theirs(ids).logits[0, len(prompt.encode()) - 1 :].numpy()
        assert expected.argmax(axis=1).tolist() == asked.token_ids
        for row in expected:
            nearest = min(float(np.abs(row - mine).max()) for mine in watching.rows)
            assert nearest < TOLERANCE
        watching.rows.clear()
    assert isinstance(llm.llm_engine.model, AdaptedModel)


# ------------------------------------------------------------------ the key of a block


class Nameless(LoRARequest):
    """Adapters that all look alike to a hash: what an engine that forgets the key would see."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, LoRARequest)

    def __hash__(self) -> int:
        return 0


def one_after_another(forgotten: bool) -> str:
    """What "quote" says to a prompt of several blocks that "shout" has just answered."""
    kind = Nameless if forgotten else LoRARequest
    first, second = (
        kind(name, 1 + NAMES.index(name), str(MODELS / "adapters" / name))
        for name in ("shout", "quote")
    )
    llm = LLM(dtype="float64", enable_lora=True, max_loras=2, block_size=8)
    params = SamplingParams(max_tokens=24)
    llm.generate([PROMPT * 2], params, first)
    return llm.generate([PROMPT * 2], params, second)[0].outputs[0].text


@pytest.mark.slow
def test_an_adapter_s_text_is_the_same_after_anothers_and_another_where_the_key_is_forgotten():
    right = (
        LLM(dtype="float64", enable_lora=True)
        .generate([PROMPT * 2], SamplingParams(max_tokens=24), adapter("quote"))[0]
        .outputs[0]
        .text
    )
    assert one_after_another(forgotten=False) == right
    assert one_after_another(forgotten=True) != right
