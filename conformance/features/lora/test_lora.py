"""Adapters: what the recordings hold, and which wrong treatments of adapters they catch."""

from __future__ import annotations

import json
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance import parts, recording
from conformance.features.lora import faults
from conformance.features.lora import texts as lora_texts
from mini_vllm import LLM, SamplingParams
from mini_vllm.lora.adapters import Adapters
from mini_vllm.lora.config import LoRAConfig
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.slots import AdapterSlotCache
from mini_vllm.lora.tests import test_lora_refused
from mini_vllm.tests import lora_support

# ------------------------------------------------------------------ slots and memory


class _Reading(Adapters):
    """The tiers without a model: what would be read from disk is noted."""

    def __init__(self, max_loras: int, max_cpu_loras: int) -> None:
        self.config = LoRAConfig(max_loras, max_cpu_loras=max_cpu_loras)
        self.projections, self.model = {}, SimpleNamespace(set_adapter=lambda *slot: None)
        self._slots_factory, self._cpu, self.read = AdapterSlotCache, OrderedDict(), []
        self.restart()

    def _read(self, adapter: LoRARequest) -> dict[str, Any]:
        self.read.append(adapter.lora_int_id)
        return {}


def test_slots_evictions_and_loads_are_those_of_the_real_manager() -> None:
    num_evicted = num_refused = 0
    for case in parts.load("adapter_slots"):
        tiers = _Reading(case["max_loras"], case["max_cpu_loras"])
        for step in case["steps"]:
            tiers.read.clear()
            if step["error"]:
                assert len(step["adapters"]) > case["max_loras"]
                num_refused += 1
                continue
            evicted = tiers.slots.stats()["evictions"]
            for number in step["adapters"]:  # the recorded order; `before_execute` has its own
                adapter = LoRARequest(f"lora{number}", number, "none")
                is_resident = number in tiers._slot_adapters.values()
                tiers._activate(number, None if is_resident else tiers._weights(adapter))
            resident = tiers.slots.resident()
            slots: list[int | None] = [None] * case["max_loras"]
            for number in resident:
                slots[tiers.slots.slot_of(number)] = number
            assert (slots, resident) == (step["slots"], step["active"])
            assert (list(tiers._cpu), tiers.read) == (step["memory"], step["loaded"])
            num_evicted += tiers.slots.stats()["evictions"] > evicted
    assert num_evicted > 500 and num_refused > 10


# ------------------------------------------------------------------ the hash


@pytest.mark.upstream
def test_at_the_pin_a_salt_spelled_like_an_adapter_has_its_first_block() -> None:
    """Both are one text among the first block's keys; `mini_vllm` tells them apart."""
    from vllm.lora.request import LoRARequest

    from conformance import real

    real.init_none_hash(real.sha256)

    def hashes(**keys: Any) -> list[bytes]:
        request = real.Request(
            request_id="r", prompt_token_ids=list(range(8)), pooling_params=None,
            sampling_params=real.SamplingParams(max_tokens=1),
            block_hasher=real.get_request_block_hasher(4, real.sha256), **keys,
        )  # fmt: skip
        return list(request.block_hashes)

    adapter = hashes(lora_request=LoRARequest("shout", 1, "none"))
    salted, plain = hashes(cache_salt="shout"), hashes()
    assert adapter[0] == salted[0] != plain[0]
    assert len({adapter[1], salted[1], plain[1]}) == 3


# ------------------------------------------------------------------ refusals

TAKEN_THERE = (
    "r=2.5: need an int",
    "use_rslora='yes': need true or false",
    "target_modules=7: need names",
    "peft_type='IA3': need 'LORA'",
    "rank_pattern={'q_proj': 4}: not supported",
    "alpha_pattern={'q_proj': 4}: not supported",
    "layer_replication=[[0, 2]]: not supported",
    "layers.0.self_attn.q_proj: lora_A is missing",
    "layers.0.self_attn.q_proj: lora_B is missing",
    "has shape (2, 9), r=2 of",
    "has shape (1, 16), r=2 of",
    "holds values from nan",
    "holds no weights",
    "the model has no model.layers.7.self_attn.q_proj to adapt; it has down_proj, embed_tok",
    "lm_head: lora_B is missing",
    "lm_head.lora_B.weight has shape (16, 2), r=2 of adapter_config.json on lm_head implies (2",
    "embed_tokens.lora_A.weight is not a supported LoRA weight",
    "lm_head.lora_embedding_A is not a supported LoRA weight",
    "lm_head.base_layer.weight has shape (300, 16), the model implies (257, 16)",
    "embed_tokens.lora_embedding_A is not a supported LoRA weight",
)
"""What the pinned loader reads without a word, by the words of the mini engine's refusal: some of
it fails later, when a slot is filled."""


@pytest.mark.upstream
@pytest.mark.parametrize(
    ("changes", "words"), test_lora_refused.FOLDERS, ids=[w for _, w in test_lora_refused.FOLDERS]
)
def test_whatever_the_real_loader_refuses_is_refused_here(
    changes, words, tmp_path, monkeypatch
) -> None:
    import torch
    import vllm.lora.lora_model
    from vllm.config import LoRAConfig as RealLoRAConfig
    from vllm.lora.lora_model import LoRAModel
    from vllm.lora.peft_helper import PEFTHelper

    if changes.get("target_modules") == 7:
        path = lora_support.write_adapter(tmp_path / "bad", seed=2)
        raw = json.loads((path / "adapter_config.json").read_text())
        (path / "adapter_config.json").write_text(json.dumps(raw | changes))
    else:
        path = lora_support.write_adapter(tmp_path / "bad", seed=2, **changes)
    monkeypatch.setattr(vllm.lora.lora_model, "is_pin_memory_available", lambda: False)
    refused = ""
    try:
        helper = PEFTHelper.from_local_dir(str(path), 512)
        helper.validate_legal(RealLoRAConfig(max_lora_rank=8))
        LoRAModel.from_local_checkpoint(
            str(path), {*lora_support.ALL, "embed_tokens", "lm_head"}, helper, lora_model_id=1,
            device="cpu", dtype=torch.float32, model_vocab_size=lora_support.CONFIG.vocab_size,
        )  # fmt: skip
    except Exception as error:
        refused = f"{type(error).__name__}: {error}"
    assert bool(refused) != (words in TAKEN_THERE), refused or "taken"


# ------------------------------------------------------------------ texts


@pytest.mark.slow
def test_the_texts_of_three_adapters_and_the_base_in_one_batch_are_the_real_engines() -> None:
    """vLLM on a processor, float32 and greedy, a slot to spare; ours in float32, three slots."""
    found = lora_texts.kept()
    assert (len(found["outputs"]), found["max_loras"]) == (64, 4)
    for prompt in range(0, 64, 4):
        assert len({tuple(text) for text in found["outputs"][prompt : prompt + 4]}) == 4
    assert lora_texts.differing(found, lora_texts.mini(found)) == {
        "": 0, "code": 0, "quote": 0, "shout": 0
    }  # fmt: skip


@pytest.mark.slow
def test_the_texts_of_adapters_of_embedding_and_head_are_the_real_engines() -> None:
    found = lora_texts.kept("texts-lora-ends")
    assert (len(found["outputs"]), found["max_loras"]) == (64, 4)
    for prompt in range(0, 64, 4):
        assert len({tuple(text) for text in found["outputs"][prompt : prompt + 4]}) == 4
    counts = lora_texts.differing(found, lora_texts.mini_ends(found), tuple(lora_texts.ENDS))
    assert counts == {"": 0, "both": 0, "embedding": 0, "head": 0}


def test_with_every_slot_taken_the_pinned_form_for_processors_adapts_base_rows() -> None:
    """A base row's slot is -1, which indexes the last one: its text is that of an adapter."""
    spare, full = lora_texts.kept(), lora_texts.kept("texts-lora-full")
    assert full["max_loras"] == 3 and full["prompts"] == spare["prompts"]
    counts = lora_texts.differing(spare, full["outputs"])
    assert counts[""] > 0 and not counts["code"] + counts["quote"] + counts["shout"]
    taken = {"code": 0, "quote": 0, "shout": 0}
    for first in range(0, 64, 4):
        base, *others = full["outputs"][first : first + 4]
        for name, text in zip(lora_texts.NAMES, others, strict=True):
            taken[name] += base == text
    assert max(taken.values()) == 16


# ------------------------------------------------------------------ what ends the real engine

FAULTS = {run["run"]: run for run in recording.lines(lora_texts.KEPT / "lora-faults.jsonl.gz")}


def answered(name: str, folder: Path, **knobs: Any) -> list[Any]:
    """What the mini engine answers to a run of `faults.RUNS`."""
    max_loras, prompts, adapter, prompt_logprobs = faults.RUNS[name]
    llm = LLM(
        faults.MODEL, **{"enable_lora": True, "max_loras": max_loras, "max_lora_rank": 8, **knobs}
    )
    wanted = lora_texts.adapter(
        adapter, names=tuple(lora_texts.ENDS), folder=lora_texts.write_ends(folder)
    )
    params = SamplingParams(max_tokens=4, prompt_logprobs=prompt_logprobs)
    return llm.generate(prompts, params, [wanted] * len(prompts))


def test_a_base_request_with_an_id_behind_the_vocabulary_ends_the_real_engine_and_not_ours(
    tmp_path,
) -> None:
    """One slot, the default: its embedding's A has no row behind the last one."""
    assert "index out of range" in FAULTS["behind"]["error"]
    [ours] = answered("behind", tmp_path)
    [plain] = LLM(faults.MODEL).generate([faults.BEHIND], SamplingParams(max_tokens=4))
    assert ours.outputs[0].token_ids == plain.outputs[0].token_ids


@pytest.mark.slow
@pytest.mark.parametrize("name", ["two base prompts", "two prompts"])
def test_logprobs_of_two_prompts_end_the_real_engine_on_a_processor_and_not_ours(
    name, tmp_path
) -> None:
    assert "einsum" in FAULTS[name]["error"]
    lengths = [len(result.prompt_logprobs) for result in answered(name, tmp_path)]
    assert lengths == [len(prompt) for prompt in faults.PROMPTS]


def test_logprobs_of_one_prompt_under_a_heads_adapter_are_the_real_engines(tmp_path) -> None:
    """One row of the mapping serves all rows there, and it is the right one."""
    run = FAULTS["one prompt"]
    [ours] = answered("one prompt", tmp_path)
    assert [list(ours.outputs[0].token_ids)] == run["outputs"]
    [theirs] = run["prompt_logprobs"]
    for mine, row in zip(ours.prompt_logprobs, theirs, strict=True):
        assert (mine is None) == (row is None)
        for token, logprob in (row or {}).items():
            assert abs(mine[int(token)].logprob - logprob) < 1e-4
