"""What is refused about adapters, and that a refusal changes nothing."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest

from mini_vllm import EngineParts, LLMEngine, Request, SamplingParams, Scheduler
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.lora.config import LoRAConfig
from mini_vllm.lora.request import LoRARequest
from mini_vllm.lora.slots import AdapterSlotCache
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.tests.lora_support import (
    ALL,
    CONFIG,
    alone,
    answers,
    tiny,
    weights,
    write_adapter,
)

Q = "base_model.model.model.layers.0.self_attn.q_proj"
E, HEAD = "base_model.model.model.embed_tokens", "base_model.model.lm_head"
ZEROS = np.zeros((2, 16))

FOLDERS = [
    ({"r": None}, "r is missing"),
    ({"lora_alpha": None}, "lora_alpha is missing"),
    ({"target_modules": None}, "target_modules is missing"),
    ({"target_modules": 7, "r": 2}, "target_modules=7: need names"),
    ({"r": 0}, "r=0: need at least 1"),
    ({"r": 9}, "r=9: greater than max_lora_rank=8"),
    ({"r": 2.5}, "r=2.5: need an int"),
    ({"lora_alpha": "x"}, "lora_alpha='x': need a finite number"),
    ({"use_rslora": "yes"}, "use_rslora='yes': need true or false"),
    ({"bias": "all"}, "bias='all': need 'none'"),
    ({"peft_type": "IA3"}, "peft_type='IA3': need 'LORA'"),
    ({"use_dora": True}, "use_dora=True: not supported"),
    ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head']: not supported"),
    ({"rank_pattern": {"q_proj": 4}}, "rank_pattern={'q_proj': 4}: not supported"),
    ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern={'q_proj': 4}: not supported"),
    ({"layer_replication": [[0, 2]]}, "layer_replication=[[0, 2]]: not supported"),
    ({"tensors": {f"{Q}.lora_A.weight": None}}, "layers.0.self_attn.q_proj: lora_A is missing"),
    ({"tensors": {f"{Q}.lora_B.weight": None}}, "layers.0.self_attn.q_proj: lora_B is missing"),
    ({"tensors": {f"{Q}.lora_B.bias": ZEROS}}, "q_proj.lora_B.bias is not a supported LoRA weight"),
    ({"tensors": {f"{Q}.weight": ZEROS}}, "q_proj.weight is not a supported LoRA weight"),
    ({"tensors": {f"{Q}.lora_A.weight": ZEROS[:, :9]}}, "has shape (2, 9), r=2 of"),
    ({"tensors": {f"{Q}.lora_A.weight": ZEROS[:1]}}, "has shape (1, 16), r=2 of"),
    ({"tensors": {f"{Q}.lora_A.weight": ZEROS * np.nan}}, "holds values from nan"),
    ({"target_modules": ()}, "holds no weights"),
    (
        {"tensors": {f"{Q.replace('layers.0', 'layers.7')}.lora_A.weight": ZEROS}},
        "the model has no model.layers.7.self_attn.q_proj to adapt; it has down_proj, embed_tok",
    ),
    ({"tensors": {f"{HEAD}.lora_A.weight": ZEROS}}, "lm_head: lora_B is missing"),
    (
        {"tensors": {f"{HEAD}.lora_A.weight": ZEROS, f"{HEAD}.lora_B.weight": ZEROS.T}},
        "lm_head.lora_B.weight has shape (16, 2), r=2 of adapter_config.json on lm_head implies (2",
    ),
    (
        {
            "tensors": {
                f"{E}.lora_embedding_A": np.zeros((2, 300)),
                f"{E}.lora_embedding_B": ZEROS.T,
            }
        },
        "embed_tokens.lora_embedding_A has shape (2, 300), r=2 of adapter_config.json on model.em",
    ),
    (
        {"tensors": {f"{E}.lora_A.weight": ZEROS}},
        "embed_tokens.lora_A.weight is not a supported LoRA weight",
    ),
    (
        {"tensors": {f"{HEAD}.lora_embedding_A": np.zeros((2, 257))}},
        "lm_head.lora_embedding_A is not a supported LoRA weight",
    ),
    (
        {"tensors": {f"{HEAD}.base_layer.weight": np.zeros((300, 16))}},
        "lm_head.base_layer.weight has shape (300, 16), the model implies (257, 16)",
    ),
    (
        {"tensors": {f"{Q}.base_layer.weight": np.zeros((16, 16))}},
        "q_proj.base_layer.weight is not a supported LoRA weight",
    ),
    (
        {"tensors": {"base_model.model.embed_tokens.lora_embedding_A": np.zeros((2, 257))}},
        "embed_tokens.lora_embedding_A is not a supported LoRA weight",
    ),
    (
        {"tensors": {f"{Q}_norm.lora_A.weight": ZEROS}},
        "the model has no model.layers.0.self_attn.q_proj_norm to adapt",
    ),
]


@pytest.fixture
def lora(tmp_path) -> LLMEngine:
    write_adapter(tmp_path / "good", seed=1)
    return LLMEngine(tiny(), enable_lora=True, max_lora_rank=8)


def good(tmp_path) -> LoRARequest:
    return LoRARequest("good", 1, str(tmp_path / "good"))


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "words"), FOLDERS, ids=[words for _, words in FOLDERS])
def test_a_folder_that_cannot_be_served_is_refused_at_the_door(lora, tmp_path, changes, words):
    if changes.get("target_modules") == 7:  # the file has weights; the config says nonsense
        write_adapter(tmp_path / "bad", seed=2)
        raw = json.loads((tmp_path / "bad" / "adapter_config.json").read_text())
        (tmp_path / "bad" / "adapter_config.json").write_text(json.dumps(raw | changes))
    else:
        write_adapter(tmp_path / "bad", seed=2, **changes)
    kept = lora.add_request([1, 2, 3], lora_request=good(tmp_path))
    bad = LoRARequest("bad", 2, str(tmp_path / "bad"))
    with pytest.raises(ValueError, match=re.escape(words)):
        lora.add_request([1, 2, 3], lora_request=bad)
    assert list(lora.requests) == [kept]
    assert lora.feature("lora").list_adapters() == {1}
    write_adapter(tmp_path / "bad", seed=2, target_modules=ALL)
    expected = alone([1, 2, 3], bad)
    assert answers(lora, [[1, 2, 3]], [bad]) == [expected], "mended, it is served under its name"


def test_an_architecture_without_embedding_modules_has_its_linears_adapted_alone(tmp_path):
    """Qwen2 says nothing of its embedding and head, so upstream wraps neither."""
    config = replace(CONFIG, architecture="Qwen2ForCausalLM")
    lora = LLMEngine(Transformer(config, weights(config), "float64"), enable_lora=True)
    for target, module in (("embed_tokens", "model.embed_tokens"), ("lm_head", "lm_head")):
        path = write_adapter(tmp_path / target, target_modules=(target,))
        with pytest.raises(ValueError, match=f"the model has no {module} to adapt; it has down_p"):
            lora.add_request([1], lora_request=LoRARequest(target, 1, str(path)))


def test_a_vocabulary_too_large_for_an_adapted_head_is_refused_before_any_adapter():
    def engine(architecture, vocab_size):
        config = ModelConfig(vocab_size, 2, 2, 1, 1, 1, 2, 16, architecture=architecture)
        return LLMEngine(Transformer(config, weights(config)), enable_lora=True)

    with pytest.raises(ValueError, match="vocab_size=258049: need at most 258048, since its head"):
        engine("LlamaForCausalLM", 258_049)
    engine("Qwen2ForCausalLM", 258_049)
    engine("LlamaForCausalLM", 258_048)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json: no such"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors: no such"),
        (
            lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"x" * 40),
            "truncated or not a safetensors file",
        ),
    ],
)
def test_a_damaged_folder_is_refused_by_file(lora, tmp_path, damage, words):
    damage(write_adapter(tmp_path / "bad"))
    with pytest.raises(ValueError, match=words):
        lora.add_request([1], lora_request=LoRARequest("bad", 2, str(tmp_path / "bad")))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (("", 1, "x"), "lora_name='': need a non-empty text"),
        (("a", 1, ""), "lora_path='': need a non-empty text"),
        (("a", 0, "x"), "lora_int_id=0: need at least 1"),
        (("a", -1, "x"), "lora_int_id=-1"),
        (("a", "1", "x"), "lora_int_id='1'"),
    ],
)
def test_a_request_for_an_adapter_names_what_is_wrong_with_it(fields, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LoRARequest(*fields)


def test_adapters_are_equal_by_name_alone():
    one, other = LoRARequest("a", 1, "x"), LoRARequest("a", 2, "y")
    assert one == other and hash(one) == hash(other)
    assert one != LoRARequest("b", 1, "x")
    assert hash(one) != hash("a")


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"max_loras": 0}, "max_loras=0: need at least 1"),
        ({"max_loras": 1.5}, "max_loras=1.5"),
        ({"max_lora_rank": 24}, "max_lora_rank=24: need one of 1, 8, 16, 32, 64, 128, 256, 320, 5"),
        ({"max_lora_rank": True}, "max_lora_rank=True"),
        ({"max_loras": 4, "max_cpu_loras": 2}, "max_cpu_loras=2: need at least max_loras=4"),
        ({"fully_sharded_loras": True}, "need tensor_parallel_size of 2 or more"),
        ({"num_loras": 4}, "num_loras=4: no such argument"),
        ({"model": "toy"}, "enable_lora=True: ToyModel has no projections to adapt"),
    ],
)
def test_a_knob_out_of_range_is_refused_by_name(knobs, words):
    with pytest.raises(ValueError, match=re.escape(words)):
        LLMEngine(**{"model": tiny(), "enable_lora": True} | knobs)


def test_defaults_are_those_of_the_real_engine():
    config = LoRAConfig()
    assert (config.max_loras, config.max_lora_rank, config.max_cpu_loras) == (1, 16, 1)
    assert LoRAConfig(max_loras=3).max_cpu_loras == 3


def test_an_adapter_without_enable_lora_is_refused(tmp_path):
    plain = LLMEngine(tiny())
    with pytest.raises(ValueError, match=r"lora_request=LoRARequest.*: need enable_lora=True"):
        plain.add_request([1], lora_request=LoRARequest("a", 1, "x"))
    with pytest.raises(ValueError, match="max_loras=2: need enable_lora=True"):
        LLMEngine(tiny(), max_loras=2)


@pytest.mark.parametrize("wrong", ["good", 1, {"lora_name": "a"}])
def test_what_is_no_adapter_is_refused(lora, wrong):
    with pytest.raises(ValueError, match="lora_request="):
        lora.add_request([1], lora_request=wrong)
    assert not lora.requests


def test_a_list_of_adapters_has_one_for_each_prompt_and_one_refusal_runs_none(lora, tmp_path):
    with pytest.raises(ValueError, match="lora_request has 1 entries for 2 prompts"):
        lora.generate([[1], [2]], lora_request=[good(tmp_path)])
    with pytest.raises(ValueError, match="no such folder"):
        lora.generate([[1], [2]], lora_request=[good(tmp_path), LoRARequest("b", 2, "nowhere")])
    assert not lora.requests


def test_a_name_or_an_id_stands_for_one_adapter(lora, tmp_path):
    """The real engine answers with stale weights for an id used twice, stale KV for a name."""
    lora.add_request([1], lora_request=good(tmp_path))
    write_adapter(tmp_path / "other", seed=3)
    other = str(tmp_path / "other")
    for name, number, path in (("new", 1, other), ("good", 2, other), ("good", 1, other)):
        with pytest.raises(
            ValueError, match="already; need a new name and a new id for other weights"
        ):
            lora.add_request([1], lora_request=LoRARequest(name, number, path))
    lora.add_request([1], lora_request=LoRARequest("new", 2, other))
    assert len(lora.requests) == 2


def test_drafts_adapters_and_asynchronous_scheduling_are_not_served_together():
    """At the pin an assertion of the scheduler fails then, near the model's length."""
    drafts = {"method": "ngram_gpu", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="enable_lora=True: need async_scheduling=False with spec"):
        LLMEngine(tiny(), enable_lora=True, async_scheduling=True, speculative_config=drafts)


# ------------------------------------------------------------------ parts


class NoGates(Scheduler):
    def __init__(self, kv, config=None):
        super().__init__(kv, config)


class NoKeys(Request):
    def __init__(self, request_id, prompt_token_ids, sampling_params, eos_token_id=None,
                 arrival_time=0.0, priority=0, cache_salt=None):  # fmt: skip
        super().__init__(request_id, prompt_token_ids, sampling_params, eos_token_id,
                         arrival_time, priority, cache_salt)  # fmt: skip


class Sharing(KVCacheManager):
    """Hashes tokens alone, as the lab that comes before adapters does."""

    def _extend_hashes(self, request):
        keys, request.extra_keys = request.extra_keys, ()
        super()._extend_hashes(request)
        request.extra_keys = keys


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (EngineParts(scheduler=NoGates), "scheduler part NoGates: takes no gates, needed for Adap"),
        (EngineParts(request=NoKeys), "request part NoKeys: need a parameter extra_keys"),
        (
            EngineParts(kv_cache_manager=Sharing),
            "kv_cache_manager part Sharing: ignores Request.extra_keys",
        ),
    ],
)
def test_a_part_that_knows_no_adapters_is_refused_by_name(parts, words):
    LLMEngine(tiny(), parts=parts).generate([[1]], SamplingParams(max_tokens=1))
    with pytest.raises(ValueError, match=words):
        LLMEngine(tiny(), parts=parts, enable_lora=True)


def test_a_slot_part_serves_and_one_that_mixes_slots_up_is_named(tmp_path):
    asked = []

    class Mine(AdapterSlotCache):
        def ensure(self, adapter_id):
            asked.append(adapter_id)
            return super().ensure(adapter_id)

    class Same(AdapterSlotCache):
        def slot_of(self, adapter_id):
            return 0

    class Beyond(AdapterSlotCache):
        def slot_of(self, adapter_id):
            return 7

    wanted = [
        LoRARequest(f"a{i}", i, str(write_adapter(tmp_path / f"a{i}", seed=i))) for i in (1, 2)
    ]
    prompts = [[1, 2, 3]] * 2

    def engine(slots):
        parts = EngineParts(rooms={"lora": {"adapter_slots": slots}})
        return LLMEngine(tiny(), parts=parts, enable_lora=True, max_loras=2)

    expected = [alone(p, a) for p, a in zip(prompts, wanted, strict=True)]
    assert answers(engine(Mine), prompts, wanted) == expected
    assert set(asked) == {1, 2}
    with pytest.raises(RuntimeError, match="adapter_slots part Same: gave two adapters one slot"):
        answers(engine(Same), prompts, wanted)
    with pytest.raises(RuntimeError, match="adapter_slots part Beyond: gave adapter 1 slot 7"):
        answers(engine(Beyond), prompts, wanted)
