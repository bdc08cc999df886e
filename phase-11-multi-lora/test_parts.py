"""Labs 11-01 and 11-04 as parts of the engine: three adapters and the base, the same texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from course.learning import mine
from course.learning.labs import find_labs
from labkit import shipped_model
from labkit.mine import PassedCourse
from mini_vllm import EngineParts, LLMEngine, SamplingParams
from mini_vllm.lora.request import LoRARequest

PHASE = Path(__file__).parent
ADAPTERS = PHASE.parent / "models" / "adapters"
NAMES = ("shout", "quote", "code")
WHO = ("shout", None, "quote", "code", "shout", "quote", None, "code")
PROMPTS = ["The KV cache", "A block", "def f(x):", "one two"]


@pytest.fixture(scope="module")
def supplied():
    labs = [lab for lab in find_labs(PHASE.parent) if lab.id in ("11-01", "11-04")]
    parts, owners = mine.parts_of(labs, lambda lab: True, lambda lab: lab.solution)
    assert {part: lab.id for part, lab in owners.items()} == {
        "adapter_delta": "11-01",
        "adapter_slots": "11-04",
    }
    return parts


def texts(max_loras, parts):
    engine = LLMEngine(
        shipped_model(), parts=parts, enable_lora=True, max_loras=max_loras, max_num_seqs=4
    )
    known = {
        name: LoRARequest(name, number, str(ADAPTERS / name))
        for number, name in enumerate(NAMES, 1)
    }
    params = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)
    for place, name in enumerate(WHO):
        engine.add_request(
            PROMPTS[place % len(PROMPTS)],
            params,
            request_id=f"r{place}",
            lora_request=known.get(name),
        )
    requests = dict(engine.requests)
    while engine.has_unfinished_requests():
        engine.step()
    return [list(request.output_token_ids) for request in requests.values()], engine


@pytest.mark.parametrize(
    "max_loras",
    [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(3, marks=pytest.mark.slow)],
)
def test_the_engine_says_the_same_with_the_labs_slots_and_delta(supplied, max_loras):
    asked = []

    def watched(x, A, B, scaling):
        asked.append(len(x))
        return supplied["adapter_delta"](x, A, B, scaling)

    plain, own_engine = texts(max_loras, EngineParts())
    parts = mine.engine_parts(supplied | {"adapter_delta": watched})
    own, engine = texts(max_loras, parts)
    assert own == plain
    assert asked, "every delta was the lab's"
    assert engine.feature("lora").stats() == own_engine.feature("lora").stats()
    assert (engine.feature("lora").stats()["evictions"] > 0) == (max_loras < 3)


@pytest.mark.slow
def test_course_run_mine_takes_both(tmp_path, monkeypatch, capsys):
    course = PassedCourse(tmp_path, ["11-01", "11-04"], monkeypatch, capsys)
    said = course.run("The scheduler", "--mine", "--adapter", "shout")
    assert "yours, from lab 11-01" in said and "yours, from lab 11-04" in said
