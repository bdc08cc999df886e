"""The documents of the book's widgets: whole, JSON, and equal to what the real engine computes."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import numpy as np
import pytest

from conformance import parts
from conformance.features.hybrid import kv_sizing
from course.conftest import REPOSITORY
from course.files import load_module
from course.site import widgets
from course.site.widgets import (
    adapter_slots,
    allowed_bytes,
    cache_sizer,
    code_points,
    expert_bytes,
    kv_calculator,
    layer_blocks,
    picture_budget,
    release_bisect,
    roofline,
    sampling_knobs,
    shard_matrix,
    speculation,
    stream_buffers,
    two_pools,
)
from course.site.widgets.hardware import GPUS, models, num_parameters
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.sampler import Sampler, probabilities
from mini_vllm.structured_output import StructuredOutputsParams, explain

LONG = {"allowed-bytes", "cache-race", "padding-ladder", "weight-grid"}
"""Their documents run a model."""

EXPERTS = ((8, 2, 1), (8, 2, 16), (60, 4, 3), (128, 8, 8), (256, 8, 64))
"""Experts of a layer, top-k and batch."""

DRAFTED = (speculation.SAMPLE, "banana bandana banana", "abcdefgh", "aaaaaaaaaa", "ab")
LENGTHS = ((2, 5, 3), (1, 3, 4), (3, 3, 8))
"""Shortest and longest n-gram, and the number of drafts."""

KNOBS = [
    sampling_knobs.OFF | knobs
    for knobs in (
        {}, {"temperature": 0.0}, {"temperature": 0.5, "top_p": 0.9},
        {"temperature": 2.0, "top_k": 12, "min_p": 0.05}, {"repetition": 1.3},
        {"presence": 1.0, "frequency": 0.4, "temperature": 0.7},
        {"ban": ord("t"), "temperature": 0.0}, {"bias_token": ord("z"), "bias": 6.0, "top_k": 5},
    )
]  # fmt: skip
CROWDED = [
    {
        "temperature": 1.6, "top_k": 9, "top_p": 0.7, "min_p": 0.08, "repetition": 1.2,
        "presence": 0.4, "frequency": 0.2, "bias_token": ord("w"), "bias": 2.0, "ban": ord("t"),
    },
    sampling_knobs.OFF | {"min_p": 0.3, "top_p": 0.65},
]  # fmt: skip
"""Knobs whose order matters."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name in LONG else name
        for name in widgets.NAMES
    ],
)
def test_a_document_is_json_and_the_same_every_time(name):
    assert json.dumps(widgets.document(name)) == json.dumps(widgets.document(name))


@pytest.mark.parametrize("name", widgets.NAMES)
def test_every_widget_has_its_script(name):
    script = widgets.FOLDER / f"{name}.js"
    assert f'CourseWidgets.mount("{name}"' in script.read_text(encoding="utf-8")


def test_the_calculator_counts_blocks_as_the_real_engine_does():
    cases = parts.load("kv_capacity")
    assert cases
    for case in cases:
        per_token = 2 * case["num_layers"] * case["num_kv_heads"] * case["head_size"]
        found = kv_calculator.capacity(
            case["available_memory"],
            per_token * case["dtype_bytes"],
            case["block_size"],
            case["max_model_len"],
        )
        # The recording divides twice and rounds down twice: by a layer's block, then by layers.
        assert found["num_blocks"] == case["num_blocks"]
        assert found["max_concurrency"] == case["max_concurrency"]


def test_parameters_are_those_of_the_published_models():
    counts = {name: num_parameters(config) for name, config in models().items()}
    assert counts["Llama 3 8B"] == 8_030_261_248
    assert counts["byte-llama, shipped here"] == 3_213_824


def test_decode_is_bound_by_memory_at_batch_1_and_the_cache_outweighs_the_weights_in_the_end():
    shape = roofline.document()["models"]["Llama 3 8B"]
    gpu = GPUS["A100 80 GB"]
    alone = roofline.decode_step(shape, gpu, 1, 128)
    many = roofline.decode_step(shape, gpu, 64, 2048)
    assert alone["intensity"] < alone["ridge"]
    assert many["kv_bytes"] > many["weight_bytes"] == alone["weight_bytes"]


@pytest.fixture(scope="module")
def study():
    """The phase's own decoding and rounding of the formats."""
    path = REPOSITORY / "phase-06-quantization" / "studies" / "code_points.py"
    before = list(sys.path)
    module = load_module(path)
    sys.path[:] = before
    return module


@pytest.mark.parametrize("name", ["int8", "int4", "E4M3", "E5M2", "E2M1"])
def test_code_points_are_those_of_the_study(study, name):
    assert code_points.FORMATS[name]["points"] == study.grid(name).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["int8", "E4M3", "E5M2", "int4", "E2M1", "MXFP4", "NVFP4"])
@pytest.mark.parametrize("spike", [1, 12])
def test_a_quantized_row_is_that_of_the_study(study, name, spike):
    # The study works in float32 for NVFP4, so its sums differ in the last digits.
    for row in code_points.rows().values():
        loud = np.abs(row).argmax()
        spiked = row.copy()
        spiked[loud] *= spike
        by_block = {"MXFP4": study.mxfp4, "NVFP4": study.nvfp4}
        quantize = by_block.get(name, lambda W: study.per_tensor(W, name))
        got = quantize(spiked[None])[0]
        rest = np.delete(spiked, loud)
        error = np.linalg.norm(np.delete(got, loud) - rest) / np.linalg.norm(rest)
        found = code_points.on_grid(row, name, 256, spike)
        assert found["error"] == pytest.approx(error, rel=1e-5)
        assert found["zeros"] == (np.delete(got, loud) == 0).sum()


def test_smaller_groups_keep_a_spike_among_fewer(study):
    row = next(iter(code_points.rows().values()))
    errors = [code_points.on_grid(row, "int4", size, 20)["error"] for size in (256, 128, 32, 16)]
    assert errors == sorted(errors, reverse=True)
    assert errors[0] > 2 * errors[-1]


def test_a_step_reads_about_as_many_experts_as_the_formula_says():
    for experts, top_k, batch in EXPERTS:
        drawn = expert_bytes.drawn_experts(experts, top_k, batch)
        assert all(len(set(token)) == top_k for token in drawn), "no expert twice for a token"
        touched = expert_bytes.experts_touched(experts, top_k, batch)
        assert abs(len(set().union(*drawn)) - touched) <= max(1.5, 0.1 * experts)


def test_what_drafts_are_worth_is_the_arithmetic_of_the_lab():
    lab = load_module(
        REPOSITORY / "phase-08-speculative-decoding/labs/lab-04-speedup-model/solution.py"
    )
    for alpha in (0.0, 0.3, 0.7, 1.0):
        for c in (0.0, 0.05, 0.4):
            for k in range(9):
                found = speculation.step(alpha, k, c, 1, ridge=300)
                assert found["tokens"] == lab.expected_tokens_per_verify(alpha, k)
                assert found["speedup"] == lab.speedup(alpha, k, c)
            assert speculation.best_k(alpha, c, 1, ridge=300) == lab.optimal_k(alpha, c)


def test_beyond_the_ridge_drafts_lose():
    for k in (1, 3, 5):
        found = speculation.step(0.7, k, 0.05, 4096, ridge=295)
        assert found["verify"] == k + 1
        assert found["speedup"] < 1
    assert speculation.best_k(0.7, 0.05, 4096, ridge=295) == 0


class Reciter:
    """A model that says a text, whatever it is asked: the widget's assumption, in the engine."""

    def __init__(self, text):
        self.tokens = [ord(character) for character in text] + [0] * 40

    def forward(self, batch):
        rows = batch.logits_indices
        logits = np.zeros((len(rows), 257))
        following = [self.tokens[position + 1] for position in batch.positions[rows]]
        logits[np.arange(len(rows)), following] = 1.0
        return logits


@pytest.mark.parametrize("text", DRAFTED)
@pytest.mark.parametrize(("low", "high", "k"), LENGTHS)
def test_a_drafted_text_is_what_the_engine_drafts_and_keeps(text, low, high, k):
    runs = speculation.drafted_runs(text, low, high, k)
    engine = LLMEngine(
        model=Reciter(text),
        speculative_config={
            "method": "ngram",
            "num_speculative_tokens": k,
            "prompt_lookup_min": low,
            "prompt_lookup_max": high,
        },
    )
    params = SamplingParams(max_tokens=len(text) - 1, ignore_eos=True)
    name = engine.add_request([ord(text[0])], params)
    request, seen = engine.requests[name], []
    engine.observers.append(lambda plan: seen.append(list(plan.spec_token_ids.get(name, ()))))
    lengths = [1]
    while engine.has_unfinished_requests():
        engine.step()
        lengths.append(request.num_tokens)
    assert request.num_tokens == len(text)
    # The engine drafts beyond the end of the text; until a run reaches it, all is equal.
    reach = [n for n, known in enumerate(lengths[:-1]) if known + k + 1 < len(text)]
    for n in reach:
        assert "".join(map(chr, seen[n])) == runs[n]["drafts"]
        assert lengths[n + 1] - lengths[n] == runs[n]["accepted"] + 1
    assert len(lengths) - 1 == len(runs)


class Law(Sampler):
    """A sampler part that keeps the law it drew from."""

    def sample(self, logits, params, rng=None):
        if params.temperature == 0:
            self.law = np.eye(len(logits))[logits.argmax()]
        else:
            self.law = probabilities(logits, params)
        return super().sample(logits, params, rng)


@pytest.fixture(scope="module")
def engine_law():
    """The law of the engine's first token after a prompt, for a widget's knobs."""
    engine = LLMEngine(dtype="float64")
    engine.sampler = Law()

    def law(prompt, knobs):
        params = sampling_knobs._params({**knobs, "ban": None})
        words = () if knobs["ban"] is None else (chr(knobs["ban"]),)
        engine.generate([prompt], replace(params, bad_words=words, max_tokens=1))
        return engine.sampler.law

    return law


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sure", "open"])
def test_knobs_leave_what_the_engine_draws_from(name, engine_law):
    row = sampling_knobs.rows()[name]
    assert not row["output"]
    for knobs in KNOBS:
        left, expected = sampling_knobs.stages(row, knobs, sampling_knobs.ORDERS["vLLM's"])
        law = engine_law(row["prompt"], knobs)
        assert law == pytest.approx(expected, abs=2e-3), knobs
        if knobs["temperature"]:
            assert (law > 0).sum() == left[-1]


def test_penalties_of_a_row_see_what_was_said():
    row = sampling_knobs.rows()["in a loop"]
    said, prompt_only = ord("h"), ord("A")
    assert said in row["output"] and prompt_only in row["prompt"]
    assert prompt_only not in row["output"]
    order = sampling_knobs.ORDERS["vLLM's"]
    base = sampling_knobs.OFF
    _, plain = sampling_knobs.stages(row, base, order)
    for knob, value, sees_prompt in (("presence", 1.0, False), ("repetition", 1.5, True)):
        _, law = sampling_knobs.stages(row, base | {knob: value}, order)
        ratio = law / plain
        never = max(ratio)  # of tokens that nobody said
        assert ratio[said] < 0.99 * never
        assert (ratio[prompt_only] < 0.99 * never) == sees_prompt


def test_each_wrong_order_shows_on_some_row():
    right = sampling_knobs.ORDERS["vLLM's"]
    for name, order in sampling_knobs.ORDERS.items():
        assert sorted(order) == sorted(right)
        differs = [
            not np.array_equal(*(sampling_knobs.stages(row, knobs, each)[1] for each in both))
            for row in sampling_knobs.rows().values()
            for knobs in CROWDED
            for both in [(order, right)]
        ]
        assert any(differs) == (name != "vLLM's")


def test_of_adapters_and_slots_no_step_has_more_adapters_than_slots_and_nobody_is_lost():
    document = adapter_slots.document()
    for name, films in document["films"].items():
        letters = document["patterns"][name]
        for slots, film in films.items():
            for step in film["steps"]:
                pairs = zip(letters, step["states"], strict=True)
                running = {letter for letter, state in pairs if state == "r"} - {"-"}
                assert len(running) <= int(slots)
            for number in range(len(letters)):
                ran = sum(step["states"][number] == "r" for step in film["steps"])
                assert ran == document["num_tokens"], (name, slots, number)


def test_more_slots_never_make_adapters_wait_longer_here():
    for films in adapter_slots.document()["films"].values():
        waited = [film["waited"] for film in films.values()]
        assert waited == sorted(waited, reverse=True)


def test_a_cut_by_inputs_is_right_in_any_order_and_one_by_outputs_in_one_alone():
    cuts = shard_matrix.document()["cuts"]
    assert all(each["wrong"] == 0 for each in cuts["inputs"].values())
    right = {order for order, each in cuts["outputs"].items() if each["wrong"] == 0}
    assert right == {"0", "01", "0123"}
    assert cuts["outputs"]["10"]["together"] == [10, -2, 7, 6]
    assert cuts["inputs"]["01"]["parts"] == [[1, 2, 3, 2], [6, 4, 7, -4]]


@pytest.mark.parametrize("kind", list(shard_matrix.CUTS))
@pytest.mark.parametrize("ranks", shard_matrix.RANKS)
def test_a_rank_sends_what_the_collective_counts(kind, ranks):
    out, tokens = 64, 3
    said = shard_matrix.bill(kind, ranks, (out, 32), tokens)["sent"]
    item = shard_matrix.ITEM_BYTES
    if kind == "outputs":  # a copy of my share for every other
        assert said == (ranks - 1) * (out // ranks) * tokens * item
    else:  # lab 10-03's ring sends as much
        assert said == 2 * (ranks - 1) / ranks * out * tokens * item


def test_what_ranks_hold_of_a_matrix_is_the_matrix():
    for kind in shard_matrix.CUTS:
        for out, inner in shard_matrix.SIZES.values():
            for ranks in shard_matrix.RANKS:
                held = shard_matrix.bill(kind, ranks, (out, inner), 1)["weights"]
                assert held * ranks == out * inner


@pytest.mark.parametrize("name", list(stream_buffers.TEXTS))
def test_however_a_text_is_cut_the_pieces_of_a_stream_are_the_same(name):
    films = stream_buffers.document()["films"][name]
    joined = {
        (film["content"], "".join(step["arguments"] for step in film["steps"]), film["calls"])
        for film in films.values()
    }
    assert len(joined) == 1
    assert all(film["held"] < len(stream_buffers.CLOSE) for film in films.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", allowed_bytes.CASES)
def test_what_may_follow_is_what_the_machine_of_the_constraint_says(name):
    constraint = StructuredOutputsParams(**allowed_bytes.CASES[name][1])
    film = allowed_bytes.written(name)
    tokens = film["tokens"]
    text = bytes(token for token in tokens if token < 256)
    places = explain.allowed_bytes(constraint, text)[: len(tokens)]
    for token, shown, place in zip(tokens, film["places"], places, strict=True):
        runs = [range(first, last + 1) for first, last in shown["allowed"]]
        legal = [allowed for run in runs for allowed in run]
        assert legal == [*place.allowed, *([256] if place.may_end else [])]
        assert token in legal and token == shown["after"][0][0]
    assert (film["reason"] == "stop") == (tokens[-1] == 256)


@pytest.mark.slow
def test_the_mask_keeps_the_odds_of_what_may_follow():
    for name in allowed_bytes.CASES:
        for place in allowed_bytes.written(name)["places"]:
            after = dict(place["after"])
            for token, share in place["before"]:
                if token in after and share > 0.01:
                    assert after[token] == pytest.approx(share / place["legal"], rel=0.02)


@pytest.mark.parametrize("layers", ["64 64 all", "20 20 all", "128 all"])
@pytest.mark.parametrize("budget", layer_blocks.BUDGETS)
def test_blocks_of_layers_are_those_of_the_engine(layers, budget):
    class Model:
        """Says the token 0, and has the groups' caches."""

        kv_specs = tuple(layer_blocks._spec(n, kind) for n, kind in enumerate(layers.split()))
        dtype = np.dtype("float32")

        def forward(self, batch):
            return np.zeros((len(batch.logits_indices), 257))

    engine = LLMEngine(
        Model(), block_size=layer_blocks.BLOCK_SIZE, num_blocks=layer_blocks.NUM_BLOCKS,
        max_num_batched_tokens=budget,
    )  # fmt: skip
    kv, seen = engine.scheduler.kv, []
    groups = range(len(Model.kv_specs))
    engine.observers.append(
        lambda _: seen.append(
            ([kv.get_block_ids("a", g) for g in groups], kv.block_pool.get_num_free_blocks())
        )
    )
    prompt = [1] * layer_blocks.NUM_TOKENS
    engine.add_request(prompt, SamplingParams(max_tokens=1, ignore_eos=True), request_id="a")
    while engine.has_unfinished_requests():
        engine.step()
    film = layer_blocks.film(layers, budget)
    assert [(step["tables"], step["free"]) for step in film] == seen[: len(film)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"config": "{"}, r"config\.json: not JSON"),
        ({"config": "[]"}, r"config\.json: need an object"),
        ({"config": 7}, r"config\.json: need a text"),
        ({"memory_gib": 0}, r"memory_gib=0: need more than 0"),
        ({"memory_gib": float("nan")}, r"memory_gib=nan"),
        ({"memory_gib": 0.01}, r"a request of max_model_len=32768 tokens needs"),
        ({"block_size": 1.5}, r"block_size=1\.5"),
    ],
)
def test_a_cache_that_cannot_be_sized_is_refused_in_words(change, message):
    arguments = {**cache_sizer.KNOBS, "config": json.dumps(kv_sizing.MODELS["gemma-3-27b"][0])}
    with pytest.raises(ValueError, match=message):
        cache_sizer.sized(**arguments | change)


def test_the_way_to_a_caches_size_ends_at_what_was_recorded():
    for case in parts.load("kv_sizing"):
        if not case["memory_bytes"] % 2**30 and case["dtype_bytes"] == 2:
            told = cache_sizer.sized(
                json.dumps(case["config"]), case["memory_bytes"] // 2**30, case["max_model_len"],
                case["block_size"], case["max_num_batched_tokens"], 2, 2,
                case["enable_prefix_caching"],
            )  # fmt: skip
            assert told["lines"] == case["log_lines"]
            assert told["num_blocks"] == case["num_blocks"]
            assert told["steps"][-1].startswith(f"{case['num_blocks']:,} / ")


@pytest.mark.parametrize("same", [True, False])
def test_films_of_pictures_are_those_of_an_engine_that_sees(same):
    made = picture_budget.film("640 x 480", "640 x 480", "336 x 336", 512, same)
    assert made["tokens"] == [2 * 391 + 24, 144 + 16]
    assert [sum(step[i] for step in made["steps"]) for i in (0, 1)] == made["tokens"]
    assert all(sum(step[:2]) <= 512 for step in made["steps"])
    ran = "".join(step[2] for step in made["steps"])
    assert sorted(ran) == (["a", "b"] if same else ["a", "b", "c"])
    sizes = dict(zip(made["names"], (391, 391, 144), strict=True))
    for *_, encoded, cached, _evicted in made["steps"]:
        assert set(encoded) <= set(cached)
        assert sum(sizes[name] for name in cached) <= made["size"] == 512


@pytest.mark.parametrize("link", two_pools.LINKS)
def test_prompts_cross_one_after_the_other_and_are_gone_on_with_when_they_have(link):
    film = two_pools.film(2048, 60, str(link))
    rows = film["rows"]
    for before, row in itertools.pairwise(rows):
        assert before["wire"][1] <= row["wire"][0]
    for row in rows:
        assert row["arrival"] <= row["prefill"][0] < row["prefill"][1] <= row["wire"][0]
        assert row["wire"][1] <= row["decode"][0]
        seconds = two_pools.KV_BYTES * 8 * 2048 / (link * 1e9)
        assert abs(row["wire"][1] - row["wire"][0] - 1e4 * seconds) <= 1


def test_one_gpu_for_all_has_the_longer_gap_and_two_apart_the_longer_first_token():
    both, apart = two_pools.film(2048, 60, two_pools.TOGETHER), two_pools.film(2048, 60, "200")
    assert both["gap"] > 7 * apart["gap"] and both["ttft"] < apart["ttft"]


def test_asking_every_release_gives_the_stretch_and_asking_none_the_known_one():
    assert release_bisect.known({}, 5, 2) == {
        "first": 2, "last": 2, "below": -1, "above": 5, "done": False
    }  # fmt: skip
    gone = {0: True, 1: False, 3: True, 4: False}
    assert release_bisect.known(gone, 5, 2) == {
        "first": 2, "last": 3, "below": 1, "above": 4, "done": True
    }  # fmt: skip
    for bug in release_bisect.document()["bugs"]:
        said = [verdict for _, verdict in bug["verdicts"]]
        bad = [version for version, _ in bug["verdicts"]].index(bug["known"])
        found = release_bisect.known(dict(enumerate(said)), len(said), bad)
        assert found["done"] and all(said[found["first"] : found["last"] + 1])
