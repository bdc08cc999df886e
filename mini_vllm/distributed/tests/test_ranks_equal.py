"""One model on one, two and four ranks: the same tokens, the same logits to rounding."""

from __future__ import annotations

import numpy as np
import pytest

from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.distributed.groups import Place
from mini_vllm.distributed.shards import FolderSource, part_of
from mini_vllm.models.loader import load_checkpoint
from mini_vllm.models.transformer import Linear
from mini_vllm.structured_output.params import StructuredOutputsParams
from mini_vllm.tests.ranks_support import (
    ALL_BIASES,
    DENSE,
    MOE,
    PROMPTS,
    TOLERANCE,
    Answers,
    RandomSource,
    alone,
    answer,
    batch_of,
    place_of,
    pool,
    ranked,
    row_parallel,
)

SOURCES = {
    "dense": RandomSource(DENSE),
    "biases": RandomSource(ALL_BIASES),
    "moe": RandomSource(MOE),
}

TP2 = {"tensor_parallel_size": 2}
TP4 = {"tensor_parallel_size": 4}
PP2 = {"pipeline_parallel_size": 2}
PP4 = {"pipeline_parallel_size": 4}
EP = {"enable_expert_parallel": True}
DCP2 = {"decode_context_parallel_size": 2}
DCP4 = {"decode_context_parallel_size": 4}
SHOWN = [
    ("dense", TP2), ("biases", TP4), ("dense", PP4), ("moe", TP2), ("moe", TP4 | EP),
    ("dense", TP4 | DCP2), ("moe", TP2 | PP2 | DCP2 | EP),
]  # fmt: skip
MORE = [
    ("dense", TP4), ("biases", TP2), ("moe", TP4), ("dense", PP2), ("biases", PP2),
    ("moe", TP2 | PP2), ("dense", TP2 | PP2), ("moe", TP2 | EP), ("moe", TP2 | PP2 | EP),
    ("moe", TP2 | DCP2), ("moe", TP4 | DCP4), ("moe", TP4 | DCP2 | EP),
]  # fmt: skip
KINDS = [*SHOWN, *(pytest.param(*kind, marks=pytest.mark.slow) for kind in MORE)]


def label(value: object) -> str:
    if not isinstance(value, dict):
        return str(value)
    short = {"tensor": "tp", "pipeline": "pp", "enable": "ep", "decode": "dcp"}
    return "-".join(f"{short[k.partition('_')[0]]}{int(v)}" for k, v in value.items())


def served(model: str, sizes: dict, **knobs) -> Answers:
    return answer(ranked(SOURCES[model], **sizes, **knobs))


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes"), KINDS, ids=label)
def test_ranks_answer_as_one_process_with_chunks_hits_and_preemptions(model, sizes):
    got, expected = served(model, sizes), alone(SOURCES[model])
    assert got.tokens == expected.tokens
    assert got.distance(expected) < TOLERANCE
    assert got.preempted > 0 and got.hits > 0 and got.chunks > 0, "the workload shows too little"


RULES = [
    {"enable_prefix_caching": False},
    {"policy": "priority", "forget_withdrawn_blocks": True},
    {"long_prefill_token_threshold": 3, "max_num_batched_tokens": 40},
    {"enable_chunked_prefill": False, "max_num_batched_tokens": 64},
]
TRANSPORTS = ["shared_memory", "sockets"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "sizes", "knobs", "transport"),
    [
        # Every rule with every split; each rule, and each split, with both transports.
        (*kind, knobs, TRANSPORTS[(place + number) % 2])
        for place, kind in enumerate([*SHOWN, *MORE])
        for number, knobs in enumerate(RULES)
    ],
    ids=lambda value: label(value) if value not in RULES else str(value),
)
def test_ranks_answer_as_one_process_under_every_rule(model, sizes, transport, knobs):
    got = answer(ranked(SOURCES[model], transport, **sizes, **knobs))
    expected = alone(SOURCES[model])
    assert got.tokens == expected.tokens
    assert got.distance(expected) < TOLERANCE


@pytest.mark.parametrize(
    "transport", ["shared_memory", pytest.param("sockets", marks=pytest.mark.slow)]
)
def test_the_transport_changes_no_bit(transport):
    source = SOURCES["moe"]
    sizes = TP2 | PP2 | EP
    assert answer(ranked(source, transport, **sizes)).distance(served("moe", sizes)) == 0


def test_stages_alone_change_no_bit():
    """The same products of the same shapes in the same order, only in other processes."""
    source = SOURCES["dense"]
    engine = ranked(source, pipeline_parallel_size=4, num_blocks=64)
    reference = LLMEngine(source.transformer(), num_blocks=64, block_size=4, dtype="float64")
    batch = batch_of(PROMPTS)
    got = engine.model.forward(batch)
    batch.kv_cache = reference.runner.kv_cache
    assert np.array_equal(got, reference.model.forward(batch))


def test_tensor_parallel_ranks_reorder_sums_and_nothing_else():
    """With weights and activations that are small integers every sum is exact, in any order."""
    rng = np.random.default_rng(0)
    weight, x = (rng.integers(-8, 9, shape).astype(np.float32) for shape in ((5, 12), (3, 12)))
    whole = Linear(weight)(x)
    parts = [Linear(weight[:, i : i + 3])(x[:, i : i + 3]) for i in range(0, 12, 3)]
    assert np.array_equal(whole, parts[0] + parts[1] + parts[2] + parts[3])


@pytest.mark.parametrize("size", [2, 4])
def test_a_row_parallel_layer_in_float32_is_within_the_bound_of_its_sums(size):
    """A float32 sum of K products, in any order, is within g(K) * sum |x_k w_k| of the exact one,
    g(K) = K u / (1 - K u), u = 2^-24 (Higham, Accuracy and Stability, section 3.1). So are one
    process and N ranks; the addition of the bias makes K + 1 roundings. Two results then differ by
    at most twice that, in each entry."""
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(24, 64)).astype(np.float32)
    bias, x = (rng.normal(size=s).astype(np.float32) for s in (24, (7, 64)))
    ranks = pool().rpc("run", row_parallel, weight, bias, x, size)[:size]
    assert all(np.array_equal(ranks[0], other) for other in ranks[1:]), "ranks must agree in bits"
    terms = x.shape[1] + 1
    unit = 2.0**-24
    growth = terms * unit / (1 - terms * unit)
    sizes = np.abs(x).astype(float) @ np.abs(weight.T).astype(float) + np.abs(bias)
    apart = np.abs(ranks[0].astype(float) - Linear(weight, bias)(x).astype(float))
    assert (apart <= 2 * growth * sizes).all()


@pytest.mark.slow
@pytest.mark.parametrize(("model", "sizes"), [("dense", TP4), ("moe", TP2 | EP)], ids=label)
def test_float32_ranks_are_as_near_to_float64_as_one_process(model, sizes):
    """The same number of roundings of the same sizes, in another order: no bound of one is smaller
    than the other's. Measured, both are some 1e-6; four times one process's own error is asked."""
    exact = alone(SOURCES[model])
    own = alone(SOURCES[model], dtype="float32").distance(exact)
    assert served(model, sizes, dtype="float32").distance(exact) < 4 * own


@pytest.mark.slow
def test_random_sampling_draws_the_same_tokens():
    params = {"temperature": 0.9, "seed": 7, "top_p": 0.9}
    engine = LLMEngine(SOURCES["dense"].transformer(), dtype="float64", block_size=4, num_blocks=20)
    expected = answer(engine, **params).tokens
    assert answer(ranked(SOURCES["dense"], **TP2, **PP2), **params).tokens == expected


def test_logprobs_and_prompt_logprobs_come_through_chunks_in_flight():
    params = SamplingParams(max_tokens=5, logprobs=2, prompt_logprobs=1, ignore_eos=True)

    def noted(engine: LLMEngine) -> list:
        outputs = engine.generate(PROMPTS, params)
        return [(o.prompt_logprobs, o.outputs[0].logprobs) for o in outputs]

    def tokens(of: list) -> list:
        return [[list(entry or {}) for entry in part] for pair in of for part in pair]

    engine = LLMEngine(SOURCES["dense"].transformer(), dtype="float64", block_size=4, num_blocks=20)
    assert tokens(noted(ranked(SOURCES["dense"], **PP4))) == tokens(noted(engine))


@pytest.mark.slow
def test_stages_hold_as_many_batches_as_there_are_and_a_waiting_request_is_passed_over():
    assert served("dense", PP2).in_flight == 2
    assert served("dense", PP4).in_flight == 4
    assert served("dense", TP4).in_flight == 0


def test_each_rank_reads_its_part_and_no_more():
    """Norms and the router are everybody's, the rest is divided; the padding is read by nobody."""
    c = DENSE
    layer = 4 * 8 * 32 + 32 * 4 * 8 + 3 * 48 * 32  # q, o, and the MLP: divided by all
    kv = 2 * (2 * 8 * 32)  # k and v: divided by two at most
    norms = 2 * 32
    held = ranked(SOURCES["dense"], **TP4).feature("distributed").loaded
    rows = [min(16, c.vocab_size - 16 * rank) * 32 for rank in range(4)]
    expected = [4 * (layer // 4 + kv // 2 + norms) + 2 * rows[rank] + 32 for rank in range(4)]
    assert [entry["weights"] for entry in held] == expected


def test_a_part_read_from_a_file_is_that_part_of_the_whole():
    """fp16 on disk; the rows of a vocabulary that ends within a rank's slice, columns, biases."""
    held = load_checkpoint("byte-llama")
    source = FolderSource(held.folder, held.config)
    for name, tensor in held.weights.items():
        for rank in (0, 3):
            part = part_of(name, held.config, Place.of(rank, 4, 1))
            assert np.array_equal(source.read(name, part), tensor[part])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    ("model", "sizes"),
    [
        ("byte-llama", TP2), ("byte-llama", TP4), ("byte-llama", PP4), ("byte-llama", TP2 | PP2),
        ("byte-llama", TP4 | DCP2), ("byte-moe", TP2 | EP), ("byte-moe", TP2 | PP2 | EP),
        ("byte-moe", TP4 | DCP4),
    ],
    ids=label,
)  # fmt: skip
def test_the_shipped_models_say_the_same_on_ranks(model, sizes, dtype):
    prompts = ["The scheduler ", "def allocate_slots(self", "A block table maps ", "import numpy"]
    params = SamplingParams(max_tokens=48)
    expected = LLMEngine(model, dtype=dtype).generate(prompts, params)
    got = LLMEngine(model, dtype=dtype, rank_pool=pool(), **sizes).generate(prompts, params)
    assert [o.outputs[0].text for o in got] == [o.outputs[0].text for o in expected]


def test_each_rank_holds_the_kv_of_its_heads_and_layers():
    def shapes(model: str, **sizes) -> list:
        held = ranked(SOURCES[model], num_blocks=9, **sizes).feature("distributed").loaded
        return [entry["kv_shape"] for entry in held]

    assert shapes("biases", **TP2) == [(4, 2, 9, 4, 4, 8)] * 2
    assert shapes("dense", **TP4) == [(4, 2, 9, 4, 1, 8)] * 4, "two ranks share each KV head"
    assert shapes("dense", pipeline_parallel_size=3) == [
        (1, 2, 9, 4, 2, 8), (2, 2, 9, 4, 2, 8), (1, 2, 9, 4, 2, 8),
    ]  # fmt: skip


def test_with_context_parallelism_the_same_memory_holds_as_many_times_the_tokens():
    engine = ranked(SOURCES["moe"], num_blocks=9, block_size=4, **TP4, **DCP4)
    assert engine.feature("distributed").loaded[0]["kv_shape"] == (4, 2, 9, 4, 1, 8)
    assert engine.scheduler.kv.block_size == 16


@pytest.mark.slow
def test_a_function_runs_in_every_rank_and_only_where_there_are_ranks():
    llm = LLM(SOURCES["dense"], rank_pool=pool(), dtype="float64", **TP4)
    assert llm.collective_rpc(place_of) == [(rank, 4) for rank in range(4)]
    llm.generate(PROMPTS[:1])
    assert all(stats.total_bytes() > 0 for stats in llm.collective_rpc("comm_stats"))
    with pytest.raises(ValueError, match="method='no_such': need a function, or a method of Worke"):
        llm.collective_rpc("no_such")
    with pytest.raises(
        ValueError, match="need an engine with ranks, such as tensor_parallel_size=2"
    ):
        LLM("toy").collective_rpc("comm_stats")
    assert pool().is_alive


@pytest.mark.slow
def test_asynchronous_scheduling_works_over_tensor_parallel_ranks():
    got = served("dense", TP2, async_scheduling=True)
    assert got.tokens == alone(SOURCES["dense"]).tokens


@pytest.mark.slow
def test_a_constraint_holds_where_the_model_runs_on_two_stages():
    params = SamplingParams(
        max_tokens=24, structured_outputs=StructuredOutputsParams(regex="[a-f]{3}-[0-9]{4}")
    )
    prompts = ["The scheduler", "A block", "Every step"]
    plain = LLMEngine("byte-llama", dtype="float64").generate(prompts, params)
    with LLM("byte-llama", dtype="float64", rank_pool=pool(), **PP2) as llm:
        split = llm.generate(prompts, params)
    assert [r.outputs[0].text for r in split] == [r.outputs[0].text for r in plain]
    assert all(r.outputs[0].finish_reason == "stop" for r in split)
