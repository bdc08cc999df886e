"""What the page's model says of a drawing is the engine's own answer, with its own counts."""

from __future__ import annotations

import base64

import numpy as np
import pytest

from course.site import seeing
from mini_vllm import LLM, SamplingParams


@pytest.mark.slow
def test_an_answer_is_the_engines_and_its_steps_add_up():
    drawn = seeing.example(0)
    told = seeing.see(drawn, " what is this? ")
    picture = np.frombuffer(base64.b64decode(drawn), np.uint8).reshape(56, 56, 3)
    asked = {"prompt": "<image>what is this?\n", "multi_modal_data": {"image": picture}}
    [output] = LLM("byte-sees", num_blocks=64).generate([asked], SamplingParams(max_tokens=48))
    assert told["answer"] == output.outputs[0].text
    assert told["tokens"] == len(output.prompt_token_ids) == 78
    assert told["steps"] == [[48, 64], [30, 0]]
    again = seeing.see(drawn, "what is this?")
    assert (again["answer"], again["found"], again["steps"]) == (told["answer"], 64, [[14, 0]])
    other = seeing.see(drawn, "what colour is it?")
    assert other["found"] == 64 and not any(rows for _, rows in other["steps"])


@pytest.mark.parametrize(("pixels", "question"), [("AAAA", "what?"), ("", "what?")])
def test_a_picture_of_another_size_is_refused(pixels, question):
    with pytest.raises(ValueError, match="need 56 x 56 x 3"):
        seeing.see(pixels, question)


@pytest.mark.parametrize("question", ["", "x" * 81, "<image>?"])
def test_a_question_that_is_none_is_refused(question):
    with pytest.raises(ValueError, match="question: need"):
        seeing.see(base64.b64encode(bytes(56 * 56 * 3)).decode(), question)
