"""Layers that keep windows and states: outputs, memory, and what is never read."""

from __future__ import annotations

import collections

import numpy as np
import pytest

from mini_vllm import LLM, EngineParts, KVCacheManager, LLMEngine, SamplingParams
from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.kv.coordinator import HybridKVCacheManager, num_blocks_of
from mini_vllm.kv_cache_interface import KVCacheSpec, MambaSpec
from mini_vllm.models.groups import hybrid_block_size, layer_groups
from mini_vllm.models.hybrid import FULL, MAMBA, SLIDING
from mini_vllm.models.mamba import scan
from mini_vllm.models.tests.hybrid_support import CONFIGS, WINDOW, model_of, run


@pytest.mark.slow
@pytest.mark.parametrize("seed", [3, 8])
@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_do_not_depend_on_chunks_preemption_and_hits(kind, seed):
    under_pressure, alone, _ = run(kind, seed)
    assert under_pressure == alone


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_outputs_of_a_hundred_workloads_depend_on_nothing(kind):
    share = 100 // len(CONFIGS)
    first = 1000 + share * list(CONFIGS).index(kind)
    seen = collections.Counter()
    for seed in range(first, first + share):
        under_pressure, alone, events = run(kind, seed)
        assert under_pressure == alone, seed
        seen.update(events)
    assert min(seen.values()) > 0, seen


@pytest.mark.slow
@pytest.mark.parametrize("kind", CONFIGS)
def test_the_null_block_is_never_read(kind):
    """It holds NaN at every step, so nothing reads what a window has passed."""
    engine = LLMEngine(model_of(kind), num_blocks=200, block_size=4, max_num_batched_tokens=23)

    def poison(plan):
        for cache in engine.runner.kv_caches:
            cache[:, :, 0] = np.nan

    engine.observers.append(poison)
    prompts = [list(range(50)), list(range(9)), [7] * 33, [*range(40), 1, 2]]
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    outputs = [out.outputs[0].token_ids for out in engine.generate(prompts, params)]
    again = [out.outputs[0].token_ids for out in engine.generate(prompts, params)]
    clean = LLMEngine(model_of(kind), num_blocks=200, block_size=4, enable_prefix_caching=False)
    assert outputs == again == [o.outputs[0].token_ids for o in clean.generate(prompts, params)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["windows", "window alone", "all three"])
def test_the_fast_attention_sees_the_window_of_the_reference(kind):
    prompts = [list(range(30)), list(range(70)), [5] * 18]
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    rows = []
    for attention in (paged_attention, paged_attention_reference):
        model = model_of(kind, attention=attention)
        engine = LLMEngine(model, num_blocks=99, block_size=4, max_num_batched_tokens=41)
        rows.append([])

        class Keeps:
            kv_specs = model.kv_specs

            def forward(self, batch, model=model, rows=rows):
                rows[-1].append(model.forward(batch))
                return rows[-1][-1]

        engine.model = Keeps()
        engine.generate(prompts, params)
    for fast, slow in zip(*rows, strict=True):
        np.testing.assert_allclose(fast, slow, rtol=0, atol=1e-11)


@pytest.mark.slow
def test_a_window_holds_what_the_arithmetic_says_at_4096_tokens():
    """All layers that see everything: 256 blocks of 16. Those that see 10 tokens: 1 or 2."""
    held = _blocks_held("windows", block_size=16)
    for computed, num_tokens, tables in held:
        full, window = -(-num_tokens // 16), -(-num_tokens // 16) - max(0, computed - 9) // 16
        kinds = [
            FULL if s.sliding_window is None else SLIDING for s in model_of("windows").kv_specs
        ]
        assert tables == [full if kind == FULL else window for kind in kinds]
    assert held[-1][1:] == (4096, [1, 1, 256])
    assert WINDOW == 10


@pytest.mark.slow
def test_a_state_holds_one_block_at_4096_tokens():
    held = _blocks_held("states", block_size=16)
    assert all(tables[:2] == [1, 1] or computed % 16 == 0 for computed, _, tables in held[8:])
    assert held[-1][1:] == (4096, [1, 1, 256])


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "most"), [("none", 1), ("align", 2)])
def test_a_state_holds_no_more_than_its_mode_says(mode, most):
    held = _blocks_held("states", block_size=16, mode=mode)
    assert max(max(tables[:2]) for *_, tables in held) == most
    assert held[-1][1] == 4096 and held[-1][2][2] == 256


def _blocks_held(kind, block_size, mode="all"):
    """Per step: tokens computed before and after it, blocks of each group that are not null."""
    model = model_of(kind, block_size=block_size, mamba_cache_mode=mode)
    caching = mode != "none"
    engine = LLMEngine(
        model, num_blocks=900, max_num_batched_tokens=512, enable_prefix_caching=caching
    )
    engine.add_request([1, 2, 3] * 1360, SamplingParams(max_tokens=17, ignore_eos=True))
    [request], held = engine.requests.values(), []

    def observe(plan):
        before = plan.num_computed_tokens[request.request_id]
        tables = [plan.block_ids, *plan.group_block_ids]
        counts = [sum(b != 0 for b in table[request.request_id]) for table in tables]
        held.append((before, before + plan.num_scheduled_tokens[request.request_id], counts))
        free = engine.scheduler.kv.block_pool.get_num_free_blocks()
        assert free == 899 - sum(counts), "the pool holds what the tables hold"

    engine.observers.append(observe)
    while engine.has_unfinished_requests():
        engine.step()
    return held


def test_layers_share_a_table_with_as_many_others_as_the_rarest_kind_has():
    assert layer_groups("wwfwwf") == [[0, 3], [1, 4], [2, 5]]
    assert layer_groups("wwwwwf" * 2) == [[0, 6], [1, 7], [2, 8], [3, 9], [4, 10], [5, 11]]
    assert layer_groups("fffwwww") == [[0, 1, 2], [3, 4, 5, 6]]  # less than half as many again
    assert layer_groups("ffff") == [[0, 1, 2, 3]]


def test_a_block_is_large_enough_for_a_state():
    assert hybrid_block_size(7392, 128, 16, None) == 64
    assert hybrid_block_size(7392, 128, 16, 64) == 64
    assert hybrid_block_size(7392, 128, 48, 64) == 192  # a multiple of both
    assert hybrid_block_size(7392, 128, 400, None) == 400


def test_a_scan_is_the_recurrence():
    rng = np.random.default_rng(0)
    fed, write, read = (rng.standard_normal((9, 2, n)) for n in (3, 4, 4))
    decay, state = -rng.random((9, 2)), rng.standard_normal((2, 3, 4))
    y, after = scan(fed, decay, write, read, state)
    for t in range(9):
        state = state * np.exp(decay[t])[:, None, None] + fed[t][:, :, None] * write[t][:, None]
        np.testing.assert_allclose(y[t], np.einsum("hds,hs->hd", state, read[t]), atol=1e-12)
    np.testing.assert_allclose(after, state, atol=1e-12)


def test_a_request_waits_for_a_state_that_the_same_step_writes():
    """As the pin: the second of two equal prompts begins a step later, and then hits."""
    engine = LLMEngine(model_of("states", block_size=4), num_blocks=99)
    for _ in range(2):
        engine.add_request(list(range(25)), SamplingParams(max_tokens=3))
    plans = []
    engine.observers.append(lambda plan: plans.append(dict(plan.num_scheduled_tokens)))
    engine.step()
    engine.step()
    assert [len(plan) for plan in plans] == [1, 2]
    assert list(plans[1].values()) == [1, 1]


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("speculative_config", {"method": "ngram", "num_speculative_tokens": 2}),
        ("enable_lora", True),
    ],
)
@pytest.mark.parametrize("kind", ["windows", "states"])
def test_what_is_not_proved_is_refused_at_the_door(kind, argument, value):
    with pytest.raises(ValueError, match=f"{argument}=.*need a model with one kind of KV cache"):
        LLMEngine(model_of(kind), **{argument: value})


def test_a_release_of_layers_that_differ_is_refused():
    with pytest.raises(ValueError, match=r"release='0\.33\.0': need a model with one kind"):
        LLM("byte-state", release="0.33.0")


def test_parts_that_do_not_go_with_groups_are_refused():
    class Mine(KVCacheManager):
        pass

    with pytest.raises(ValueError, match=r"parts\.kv_cache_manager=.*brings its own"):
        LLMEngine(model_of("states"), parts=EngineParts(kv_cache_manager=Mine))

    def blind(query, cache, batch, scale):
        return paged_attention(query, cache, batch, scale)

    with pytest.raises(ValueError, match=r"parts\.attention=.*batch\.sliding_window"):
        LLMEngine(model_of("windows", attention=blind))


def test_a_state_is_padded_to_the_page_of_attention():
    specs = model_of("states", block_size=4).kv_specs
    assert [spec.layers for spec in specs] == [(0,), (1,), (2,)]
    assert isinstance(specs[0], MambaSpec) and specs[0].state_size == 3 * 32 + 64
    assert specs[0].page_size_padded == 2 * 8 * 12 and specs[0].block_size == 12
    assert [CONFIGS["states"].layer_types[s.layers[0]] for s in specs] == [MAMBA, MAMBA, FULL]


@pytest.mark.parametrize(("kind", "needed"), [("windows", 3 * 8), ("states", 3 * 3)])
def test_a_request_that_could_never_be_admitted_is_refused_at_the_door(kind, needed):
    """Every group needs room for it, so as many blocks as one group would want are too few."""
    model = model_of(kind, block_size=4)
    engine = LLMEngine(model, num_blocks=needed, block_size=4)
    params = SamplingParams(max_tokens=2)
    with pytest.raises(
        ValueError, match=rf"needs {needed} blocks of .*: the pool has {needed - 1}"
    ):
        engine.add_request([1] * 31, params)
    assert not engine.requests
    roomy = LLMEngine(model_of(kind, block_size=4), num_blocks=needed + 1, block_size=4)
    [out] = roomy.generate([[1] * 31], params)
    assert len(out.outputs[0].token_ids) == 2


def test_ranks_and_drafters_of_layers_that_differ_are_refused():
    with pytest.raises(ValueError, match="model='byte-window': ranks need a model with one kind"):
        LLMEngine("byte-window", tensor_parallel_size=2)
    config = {"method": "draft_model", "model": "byte-window", "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="model='byte-window': need a draft model with one kind"):
        LLMEngine("byte-llama", speculative_config=config)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"max_num_batched_tokens": 63}, "max_num_batched_tokens=63: need at least 64, a block"),
        ({"long_prefill_token_threshold": 9}, "long_prefill_token_threshold=9: need 0, or at"),
        ({"enable_chunked_prefill": False}, "enable_chunked_prefill=False: need True"),
        ({"mamba_cache_mode": "some"}, "mamba_cache_mode='some': need one of none, align, all"),
    ],
)  # fmt: skip
def test_what_states_in_mode_align_cannot_do_is_refused_by_name(knobs, message):
    with pytest.raises(ValueError, match=message):
        LLMEngine("byte-state", **{"mamba_cache_mode": "align"} | knobs)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all", "align"])
def test_where_a_step_ends_decides_what_of_a_prompt_is_hit(mode):
    """200 bytes in one step: "all" keeps states at 64, 128 and 192, "align" at 192 alone."""
    engine = LLMEngine("byte-state", num_blocks=99, mamba_cache_mode=mode)
    params = SamplingParams(max_tokens=1)
    engine.generate([[7] * 200], params)
    plans = []
    engine.observers.append(plans.append)
    engine.generate([[7] * 150], params)
    assert list(plans[0].num_cached_tokens.values()) == [128 if mode == "all" else 0]
    engine.generate([[7] * 200 + [8]], params)
    assert list(plans[-1].num_cached_tokens.values()) == [192]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size=0: need at least 1"),
        ({"max_model_len": 5000}, "max_model_len=5000: need"),
        ({"mamba_cache_mode": None}, "mamba_cache_mode=None: need one of none, align, all"),
    ],
)
def test_a_model_of_wrong_sizes_is_refused_by_name(options, message):
    with pytest.raises(ValueError, match=message):
        model_of("states", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_blocks": "9"}, "num_blocks='9': need an int"),
        ({"block_size": 1.5}, "block_size=1.5: need an int"),
        ({"kv_specs": None}, "kv_specs is empty"),
        ({"kv_specs": ["x"]}, "='x': need a KVCacheSpec"),
        ({"kv_specs": [KVCacheSpec((0,), 1, 2, 0)]}, r"kv_specs\[0\]\.sliding_window=0: need at"),
        ({"kv_specs": [KVCacheSpec((0,), 1, 2, None, -4)]}, r"kv_specs\[0\]\.block_size=-4: need"),
        ({"kv_specs": [MambaSpec((0,), mamba_cache_mode="x")]}, "mamba_cache_mode='x': need one"),
        ({"kv_specs": [MambaSpec((0,), sliding_window=4)]}, "sliding_window=4: need None for"),
    ],
)  # fmt: skip
def test_groups_that_no_manager_can_keep_are_refused_by_name(arguments, message):
    given = {"num_blocks": 9, "block_size": 4, "kv_specs": [KVCacheSpec((0,), 1, 2)]} | arguments
    with pytest.raises(ValueError, match=message):
        HybridKVCacheManager(**given)
    if "kv_specs" in arguments:
        with pytest.raises(ValueError, match=message):
            num_blocks_of(given["kv_specs"], 10, 4, 10, 10)


def test_groups_of_nothing_are_refused():
    with pytest.raises(ValueError, match=r"kinds=\[\]: need at least one layer"):
        layer_groups([])
    with pytest.raises(ValueError, match=r"kinds\[0\]=\[1\]: need a hashable value"):
        layer_groups([[1]])
    with pytest.raises(ValueError, match="per_token=0: need at least 1"):
        hybrid_block_size(10, 0, 16, None)
