"""What vLLM answers to questions about pictures, and whether the mini engine says the same.

    course engine run -m conformance.record texts-pictures    # record: the real engine
    python -m conformance.texts multimodal                    # compare: any machine

Questions of every kind of `labkit.pictures` about one picture or two, the same in two prompts and
twice in one, a conversation, a picture that must be resized, and texts without any: all in one
call, under a budget of tokens that ends chunks inside pictures.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from conformance import recording
from conformance.features import RECORDINGS, ROOT
from conformance.real_engine import provenance
from labkit.pictures import KINDS, conversation, single_question
from mini_vllm import LLM, SamplingParams

KEPT = RECORDINGS / "engine"
MODEL = ROOT / "models" / "byte-sees"
MAX_TOKENS, MAX_MODEL_LEN, BUDGET = 48, 512, 96
Asked = tuple[str, list[np.ndarray]]
"""A text with `<image>` in it, and the pictures."""


def questions() -> list[Asked]:
    """What is asked; the same every time."""
    rng = np.random.default_rng(22)
    asked: list[Asked] = []
    for kind in KINDS:
        for _ in range(2):
            turn = single_question(rng, kind)
            text = "<image>" * len(turn.pictures) + turn.question.text + "\n"
            asked.append((text, list(turn.pictures)))
    first = asked[0][1][0]
    asked.append(("<image>what colour is it?\n", [first]))
    asked.append(("<image><image>same thing?\n", [first, first]))
    asked.append(("look: <image> and <image>, which has a 7?\n", [first, asked[2][1][0]]))
    text, shown = "", list[np.ndarray]()
    for turn in conversation(rng):
        text += "<image>" * len(turn.pictures) + f"{turn.question.text}\n{turn.question.answer}\n"
        shown += turn.pictures
    asked.append((text + "what is this?\n", shown))
    large = np.kron(first, np.ones((3, 3, 1), np.uint8))
    asked.append(("<image>what is this?\n", [large]))
    asked.append(("<image>how many things?\n", [np.concatenate([large, large[:60]])]))
    asked += [("what is this?\n", []), ("The scheduler\n", [])]
    return asked


def mark_of(asked: Sequence[Asked]) -> str:
    """A hash of all that is asked: a recording says which pictures it is of."""
    found = hashlib.sha256()
    for text, shown in asked:
        found.update(text.encode())
        for pixels in shown:
            found.update(repr(pixels.shape).encode() + pixels.tobytes())
    return found.hexdigest()


def recorded() -> Iterator[dict[str, Any]]:
    """What vLLM answers, float32 and greedy, all prompts handed over at once: one line."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from PIL import Image

    params = vllm.SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS)
    llm = vllm.LLM(
        model=str(MODEL), dtype="float32", seed=0, max_model_len=MAX_MODEL_LEN, max_num_seqs=16,
        max_num_batched_tokens=BUDGET, enforce_eager=True, gpu_memory_utilization=0.4,
        limit_mm_per_prompt={"image": 2},
    )  # fmt: skip
    asked = questions()
    batch: Any = [
        {"prompt": text, "multi_modal_data": {"image": [Image.fromarray(p) for p in shown]}}
        if shown else {"prompt": text}
        for text, shown in asked
    ]  # fmt: skip
    answers = llm.generate(batch, params)
    yield {
        "upstream": recording.UPSTREAM, "machine": provenance("float32"), "mark": mark_of(asked),
        "num_prompt_tokens": [len(a.prompt_token_ids) for a in answers],
        "texts": [a.outputs[0].text for a in answers],
        "outputs": [list(a.outputs[0].token_ids) for a in answers],
    }  # fmt: skip


def kept(name: str = "texts-pictures", folder: Path = KEPT) -> dict[str, Any]:
    """The recording: "machine", "mark", "num_prompt_tokens", "texts", "outputs"."""
    (found,) = recording.lines(folder / f"{name}.jsonl.gz")
    return found


def mini(dtype: str = "float32") -> list[tuple[int, list[int]]]:
    """What the mini engine answers: prompt tokens and output tokens of each."""
    llm = LLM(MODEL, dtype=dtype, num_blocks=600, max_num_seqs=16, max_num_batched_tokens=BUDGET,
              max_model_len=MAX_MODEL_LEN)  # fmt: skip
    batch = [
        {"prompt": text, "multi_modal_data": {"image": shown}} if shown else {"prompt": text}
        for text, shown in questions()
    ]
    answers = llm.generate(batch, SamplingParams(max_tokens=MAX_TOKENS))
    return [(len(a.prompt_token_ids), list(a.outputs[0].token_ids)) for a in answers]


def differing(found: Mapping[str, Any], answers: Sequence[tuple[int, Sequence[int]]]) -> int:
    """How many prompts have another length, or another answer, than is recorded."""
    each = zip(found["num_prompt_tokens"], found["outputs"], answers, strict=True)
    return sum((length, ids) != (n, list(got)) for length, ids, (n, got) in each)


def main() -> int:
    """Compare; returns the exit status."""
    found = kept()
    if found["mark"] != mark_of(questions()):
        print("the recording is of other pictures")
        return 1
    count = differing(found, mini())
    print(f"{len(found['outputs'])} texts about pictures: {count} differ")
    return 1 if count else 0
