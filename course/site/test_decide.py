"""The documents of the explorables of phases 03 to 06: equal to what engine and recordings say."""

from __future__ import annotations

from dataclasses import asdict
from itertools import pairwise, product

import numpy as np
import pytest

from conformance import parts
from course.conftest import REPOSITORY
from course.files import load_module
from course.site import widgets
from course.site.widgets import (
    backend_choice,
    code_points,
    graph_tape,
    padding_ladder,
    scheduler_desk,
    smooth_alpha,
    softmax_keys,
    weight_grid,
)
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.batch import ForwardBatch
from mini_vllm.cudagraph import GraphRunner

SIZES = (1, 2, 4, 8)
"""Keys of a block."""
DECIDED = [name for name in widgets.NAMES if "decide" in widgets.scripts(name)]

# ------------------------------------------------------------------ online softmax


def attended(scores, values, size, kernel):
    """The engine's answer: one query of one head whose keys are the scores themselves."""
    count = len(scores)
    blocks = -(-count // size)
    cache = np.zeros((2, blocks + 1, size, 1, 1))
    cache[0].reshape(-1)[size : size + count] = scores
    cache[1].reshape(-1)[size : size + count] = values
    batch = ForwardBatch(
        token_ids=np.zeros(1, np.int64),
        positions=np.array([count - 1]),
        slot_mapping=np.array([size + count - 1]),
        query_start_loc=np.array([0, 1]),
        seq_lens=np.array([count]),
        block_tables=np.arange(1, blocks + 1)[None],
        logits_indices=np.array([0]),
        block_size=size,
    )
    return float(kernel(np.ones((1, 1, 1)), cache, batch, 1.0)[0, 0, 0])


@pytest.mark.parametrize("kernel", [paged_attention, paged_attention_reference])
@pytest.mark.parametrize("scores", softmax_keys.PRESETS.values(), ids=softmax_keys.PRESETS)
@pytest.mark.parametrize("size", SIZES)
def test_the_walk_over_keys_ends_where_the_engines_attention_ends(scores, size, kernel):
    # Float64 and sums of eight: differences are of the last bits.
    exact = attended(scores, softmax_keys.VALUES, size, kernel)
    out = softmax_keys.walk(scores, softmax_keys.VALUES, size)[-1]["out"]
    assert out == pytest.approx(exact, rel=1e-12)


def test_every_state_of_the_walk_is_that_of_the_lab():
    lab = load_module(
        REPOSITORY / "phase-04-attention-backends/labs/lab-01-paged-attention-gather/solution.py"
    )
    for scores, size in product(softmax_keys.PRESETS.values(), SIZES):
        state, start = lab.empty_state(1), 0
        for step in softmax_keys.walk(scores, softmax_keys.VALUES, size):
            part = np.array(scores[start : step["read"]], float)
            values = np.array(softmax_keys.VALUES[start : step["read"]])[:, None]
            state, start = lab.softmax_step(state, part, values), step["read"]
            assert step["m"] == state.m
            assert step["denom"] == pytest.approx(state.denom, rel=1e-12)
            assert step["acc"] == pytest.approx(float(state.acc[0]), rel=1e-12)


def test_without_corr_rising_scores_go_wrong_and_falling_ones_do_not():
    by_preset = {
        name: softmax_keys.walk(scores, softmax_keys.VALUES, 1)[-1]
        for name, scores in softmax_keys.PRESETS.items()
    }
    assert by_preset["falling"]["forgot"] == by_preset["falling"]["out"]
    assert by_preset["rising"]["forgot"] < by_preset["rising"]["out"] - 1


# ------------------------------------------------------------------ the selector


def looked_up(document, place):
    """What the browser reads at a place of the table."""
    valid, rejected = document["outcomes"][int(document["table"][3 * place : 3 * place + 3], 36)]
    backends, reasons = document["backends"], document["reasons"]
    return {
        "valid": [backends[b] for b in valid],
        "rejected": {backends[b]: [reasons[r] for r in why] for b, *why in rejected},
    }


@pytest.mark.slow
def test_every_combination_shown_is_that_of_the_recording():
    document = backend_choice.document()
    combinations = backend_choice.combinations()
    assert len(document["table"]) == 3 * len(combinations)
    for place, picked in enumerate(combinations):
        found = parts.selector_outcome(
            backend_choice.GPUS[picked["gpu"]],
            backend_choice.LAYERS[picked["layer"]],
            **{name: picked[name] for name in backend_choice.AXES},
        )
        assert looked_up(document, place) == found, picked


# ------------------------------------------------------------------ questions


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow) if name == "weight-grid" else name
        for name in DECIDED  # that one's document runs a model thirteen times
    ],
)
def test_a_question_has_its_answer_among_its_choices_once(name):
    for question in widgets.document(name)["questions"]:
        assert question["choices"].count(question["answer"]) == 1, question
        assert len(question["choices"]) >= 2


# ------------------------------------------------------------------ the scheduler's timeline


def test_the_first_run_is_that_of_the_guide():
    document = scheduler_desk.document()
    steps = [frame for frame in document["frames"] if frame["total"]]
    given = [{one["id"]: one["tokens"] for one in frame["batch"]} for frame in steps]
    assert given[0] == {"A": 16, "B": 16, "C": 16}
    assert given[1] == {"A": 1, "B": 1}
    assert steps[1]["total"]["preempted"] == ["C"]
    assert given[8] == {"C": 17}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_what_a_preemption_took_was_the_victims_and_is_the_others(policy):
    requests = [
        {"tokens": 9 + 5 * k, "outputs": 14, "arrival": k, "priority": (k * 3) % 4}
        for k in range(5)
    ]
    settings = {**asdict(scheduler_desk.SETTINGS), "policy": policy, "budget": 24, "slots": 5}
    frames = scheduler_desk.play(settings, requests)["frames"]
    found = [
        (before, frame, taken) for before, frame in pairwise(frames) for taken in frame["taken"]
    ]
    assert found
    for before, frame, taken in found:
        assert taken["victim"] in frame["total"]["preempted"]
        for block in taken["blocks"]:
            assert block in before["pool"]["tables"][taken["victim"]]
            assert block in frame["pool"]["tables"][taken["to"]]
    assert any(taken["blocks"] for _, _, taken in found)
    assert sum(len(f["taken"]) for f in frames) == frames[-1]["counters"]["preemptions"]


def test_a_scripted_run_gives_what_it_was_asked_for():
    requests = [{"tokens": 5, "outputs": 3, "arrival": 2, "priority": 0}]
    document = scheduler_desk.play(asdict(scheduler_desk.SETTINGS), requests)
    (one,) = document["requests"]
    assert (one["id"], one["prompt_tokens"]) == ("A", 5)
    assert document["frames"][-1]["counters"]["computed"] == 5 + 3 - 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"tokens": 0}, "tokens=0"),
        ({"tokens": 65}, "tokens=65"),
        ({"outputs": 0}, "max_tokens=0"),
        ({"what": 1}, "what"),
    ],
)
def test_a_bad_request_is_named(change, words):
    request = {"tokens": 4, "outputs": 4, "arrival": 0, "priority": 0, **change}
    with pytest.raises(ValueError, match=words):
        scheduler_desk.play(asdict(scheduler_desk.SETTINGS), [request])


# ------------------------------------------------------------------ the tape


def test_a_swapped_pointer_gives_the_old_answer_and_a_copy_the_new_one():
    moved = graph_tape.play([["write", "A", 7], ["replay"], ["point", "B"], ["replay"]])[-1]
    assert (moved["out"], moved["eager"]) == (13.0, 199.0)
    copied = graph_tape.play([["copy", "B"], ["replay"]])[-1]
    assert copied["out"] == 199.0


def test_what_is_kept_without_a_copy_changes_with_the_next_replay():
    for kind, kept in (("keep", 1.0), ("keep copy", 13.0)):
        actions = [["write", "A", 7], ["replay"], [kind], ["write", "A", 1], ["replay"]]
        assert graph_tape.play(actions)[-1]["kept"] == kept


# ------------------------------------------------------------------ the ladder


@pytest.mark.parametrize("sizes", padding_ladder.document()["ladders"].values())
def test_a_batch_is_padded_as_the_runner_pads_it(sizes):
    runner = GraphRunner([np.negative], capture_sizes=sizes)
    for tokens in range(1, padding_ladder.MOST + 1):
        before = set(runner.graphs)
        runner(np.ones((tokens, 1)))
        size = padding_ladder.rung(tokens, sizes)
        made = {shape[0] for shape in set(runner.graphs) - before}
        assert made <= {size}
        assert (size is None) or (size, 1) in runner.graphs
    assert runner.num_captured == len(sizes)


@pytest.mark.slow
def test_the_default_ladder_pads_as_the_recorded_dispatcher_does():
    seats, counts = padding_ladder.served()
    asked = {"kind": "dispatch", "mode": "FULL_AND_PIECEWISE", "max_num_seqs": seats}
    (case,) = [
        case
        for case in parts.load("cudagraph_modes")
        if all(case.get(key) == value for key, value in asked.items())
    ]
    sizes = padding_ladder.default_sizes()
    for tokens in range(1, seats + 1):
        mode, padded = case["found"][tokens - 1][2]
        assert padding_ladder.rung(tokens, sizes) == (padded if mode == "FULL" else None)
    assert sum(counts.values()) == 110  # the decode steps that the guide counts
    assert padding_ladder.cost(counts, sizes)["without"] == 5


# ------------------------------------------------------------------ formats


@pytest.mark.parametrize("shared", ["tensor", "channel"])
def test_snapped_int8_weights_are_those_of_the_lab(shared):
    lab = load_module(
        REPOSITORY / "phase-06-quantization/labs/lab-01-fake-quant-linear/solution.py"
    )
    weights = weight_grid.piece()
    quantize = lab.quantize_per_tensor if shared == "tensor" else lab.quantize_per_channel
    codes, scales = quantize(weights)
    back = codes * (scales if shared == "tensor" else scales[:, None])
    # The lab's scales are float32, six digits of which hold.
    assert np.allclose(weight_grid.snapped(weights, "int8", shared), back, rtol=1e-6, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("name", weight_grid.FORMATS)
def test_a_snapped_row_errs_as_that_of_the_other_widget(name):
    row = weight_grid.piece()[1]
    back = weight_grid.snapped(row[None], name, "channel")[0]
    loud = int(np.abs(row).argmax())
    error = np.linalg.norm(np.delete(back - row, loud)) / np.linalg.norm(np.delete(row, loud))
    assert error == pytest.approx(code_points.on_grid(row, name, len(row), 1)["error"], rel=1e-12)


def test_a_group_pays_alone_for_its_loud_weight():
    weights = weight_grid.piece()
    spiked = weights.copy()
    spiked[3, 0] = weight_grid.MOST
    before, after = (weight_grid.snapped(W, "int4", "group") for W in (weights, spiked))
    changed = np.argwhere(before != after)
    assert {tuple(place) for place in changed} <= {(3, column) for column in range(4)}


@pytest.mark.slow
def test_the_texts_are_the_models_own_and_finer_formats_keep_more_of_it():
    found = weight_grid.texts()
    engine = LLMEngine(dtype="float64")
    params = SamplingParams(max_tokens=weight_grid.NUM_TOKENS, ignore_eos=True)
    (result,) = engine.generate([weight_grid.PROMPT], params)
    assert found["as shipped"] == result.outputs[0].text
    assert found["int8 channel"] == found["as shipped"]
    assert found["int4 tensor"] != found["as shipped"]


@pytest.mark.parametrize("loud", [1, 20, 80])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_smoothing_is_that_of_the_lab(loud, alpha):
    lab = load_module(
        REPOSITORY / "phase-06-quantization/labs/lab-04-activation-outliers-smoothquant/solution.py"
    )
    X, W = smooth_alpha.layer()
    X = smooth_alpha.louder(X, loud)
    found = smooth_alpha.smoothed(X, W, alpha)
    X_s, W_s, _ = lab.smooth(X, W, alpha)
    assert found["x"] == pytest.approx(np.abs(X_s).max(axis=0).tolist(), rel=1e-12)
    assert found["w"] == pytest.approx(np.abs(W_s).max(axis=0).tolist(), rel=1e-12)
    quiet = [c for c in range(X.shape[1]) if c not in smooth_alpha.LOUD]
    got = lab.fake_quant(X_s)[:, quiet] @ lab.fake_quant(W_s)[:, quiet].T
    exact = X[:, quiet] @ W[:, quiet].T
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert found["error"] == pytest.approx(error, rel=1e-9)
