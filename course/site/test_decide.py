"""The documents of the explorables of phases 03 to 06: equal to what engine and recordings say."""

from __future__ import annotations

import numpy as np
import pytest

from conformance import parts
from course.conftest import REPOSITORY
from course.files import load_module
from course.site import backend_choice, softmax_keys, widgets
from mini_vllm.attention import paged_attention, paged_attention_reference
from mini_vllm.batch import ForwardBatch

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
@pytest.mark.parametrize("example", softmax_keys.softmax_keys()["examples"])
def test_the_walk_over_keys_ends_where_the_engines_attention_ends(example, kernel):
    # Float64 and sums of eight: differences are of the last bits.
    exact = attended(example["scores"], softmax_keys.VALUES, example["size"], kernel)
    assert example["steps"][-1]["out"] == pytest.approx(exact, rel=1e-12)


def test_every_state_of_the_walk_is_that_of_the_lab():
    lab = load_module(
        REPOSITORY / "phase-04-attention-backends/labs/lab-01-paged-attention-gather/solution.py"
    )
    for example in softmax_keys.softmax_keys()["examples"]:
        state, start = lab.empty_state(1), 0
        for step in example["steps"]:
            part = np.array(example["scores"][start : step["read"]], float)
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


def test_every_combination_shown_is_that_of_the_recording():
    document = backend_choice.backend_choice()
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


@pytest.mark.parametrize("name", sorted(widgets.NEEDS))
def test_a_question_has_its_answer_among_its_choices_once(name):
    questions = widgets.WIDGETS[name]().get("questions", [])
    for question in questions:
        assert question["choices"].count(question["answer"]) == 1, question
        assert len(question["choices"]) >= 2
