"""The recorded sampler: which situations its rows hold, and that they follow its own order.

`edits` and `truncated` are the rule in our words; labs and engine are replayed in their own tests.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.features.sampling.sampler import read, tolerance

Case = dict[str, Any]
CASES = parts.load("sampler")
SAMPLED = [case for case in CASES if case["probs"] is not None]


def edits(case: Case) -> np.ndarray:
    """Allowed ids, bad words, min_tokens, bias; then repetition, frequency, presence."""
    params, z = case["params"], read(case["logits"])
    prompt, output = case["prompt_token_ids"], case["output_token_ids"]
    allowed = params.get("allowed_token_ids") or range(len(z))
    z[[token for token in range(len(z)) if token not in allowed]] = -np.inf
    for *before, last in case["bad_words_token_ids"]:
        if len(before) <= len(output) and output[len(output) - len(before) :] == before:
            z[last] = -np.inf
    if len(output) < params.get("min_tokens", 0):
        z[[*params.get("stop_token_ids", ()), case["eos_token_id"]]] = -np.inf
    for token, bias in params.get("logit_bias", {}).items():
        z[int(token)] += bias
    penalty, seen = params.get("repetition_penalty", 1.0), list({*prompt, *output})
    z[seen] = np.where(z[seen] > 0, z[seen] / penalty, z[seen] * penalty)
    counts = np.bincount(output, minlength=len(z))
    z -= params.get("frequency_penalty", 0.0) * counts
    return z - params.get("presence_penalty", 0.0) * (counts > 0)


def truncated(z: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    """Temperature, min_p, top-k, top-p."""
    z = z / max(params["temperature"], 0.01)
    weights = np.exp(z - z.max())
    z = np.where(weights < params.get("min_p", 0.0), -np.inf, z)
    top_k, top_p = params.get("top_k", 0), params.get("top_p", 1.0)
    if 0 < top_k < len(z):
        z = np.where(z < np.sort(z)[-top_k], -np.inf, z)
    if top_p < 1.0:
        order = np.argsort(-z, kind="stable")
        weights = np.exp(z[order] - z.max()) / np.exp(z - z.max()).sum()
        z[order[np.cumsum(weights) - weights >= top_p]] = -np.inf
    return z


def same_row(expected: np.ndarray, got: np.ndarray, case: Case) -> None:
    """Equal masks; the rest to float32's rounding."""
    finite = np.isfinite(expected)
    assert np.array_equal(finite, np.isfinite(got)), case
    if finite.any():
        np.testing.assert_allclose(got[finite], expected[finite], rtol=0, atol=tolerance(expected))


def test_the_edits_come_in_the_order_as_written() -> None:
    for case in CASES:
        same_row(read(case["edited"]), edits(case), case)


def test_the_truncation_comes_in_the_order_as_written() -> None:
    for case in SAMPLED:
        z = truncated(read(case["edited"]), case["params"])
        same_row(read(case["processed"]), z, case)
        probs = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
        np.testing.assert_allclose(case["probs"], probs, rtol=0, atol=tolerance(z))


def test_the_token_is_the_argmax_or_wins_the_race() -> None:
    for case in CASES:
        edited = read(case["edited"])
        if not np.isfinite(edited).any():
            assert case["token"] == 0, "a row without a token gives token 0"
        elif case["probs"] is None:
            assert case["token"] == int(edited.argmax()), case
        else:
            race = np.array(case["probs"]) / np.array(case["exponentials"])
            assert case["token"] == int(race.argmax()), case


def test_logprobs_are_of_the_logits_as_they_came_in() -> None:
    for case in CASES:
        if (found := case["logprobs"]) is None:
            continue
        z = read(case["logits"])
        logprobs = z - z.max() - np.log(np.exp(z - z.max()).sum())
        asked = case["params"]["logprobs"]
        likeliest = np.sort(logprobs)[::-1][: len(z) if asked < 0 else asked]
        expected = [logprobs[case["token"]], *likeliest]
        np.testing.assert_allclose(found["logprobs"], expected, rtol=2e-6, atol=2e-6)
        np.testing.assert_allclose(logprobs[found["token_ids"]], expected, rtol=2e-6, atol=2e-6)
        assert found["token_ids"][0] == case["token"]
        assert found["rank"] == int((z >= z[case["token"]]).sum()), case


def situations(case: Case) -> dict[str, bool]:
    """What a row may hold, and whether it does."""
    params, z, edited = case["params"], read(case["logits"]), read(case["edited"])
    prompt, output = case["prompt_token_ids"], case["output_token_ids"]
    greedy, counts = case["probs"] is None, np.bincount(output, minlength=len(z))
    tests: dict[str, Any] = {
        "a row of the shipped model": len(z) == 257,
        "greedy": params["temperature"] == 0.0,
        "greedy, and an edit moved the argmax": greedy and z.argmax() != edited.argmax(),
        "every token masked": not np.isfinite(edited).any(),
        "temperature raised to 0.01": 0 < params["temperature"] < 0.01,
        "logits far from 0": abs(z).min() > 100,
    }
    seen = sorted({*prompt, *output})
    if "repetition_penalty" in params:
        tests |= {
            "repetition on a positive logit": (z[seen] > 0).any(),
            "repetition on a negative logit": (z[seen] < 0).any(),
            "repetition on a logit of 0": (z[seen] == 0).any(),
            "repetition of the prompt alone": bool(set(prompt) - set(output)),
            "repetition below 1": params["repetition_penalty"] < 1,
        }
    additive = {"frequency_penalty", "presence_penalty"} & set(params)
    tests |= {
        "frequency of a token said twice": "frequency_penalty" in params and counts.max() > 1,
        "all three penalties": len(additive) == 2 and "repetition_penalty" in params and output,
        "a penalty below 0": any(params[name] < 0 for name in additive) and output,
        "an additive penalty, and no output": additive and not output,
        "bias and penalty on one token": "repetition_penalty" in params
        and {int(token) for token in params.get("logit_bias", {})} & set(seen),
        "min_tokens not reached": len(output) < params.get("min_tokens", 0),
        "min_tokens reached": 0 < params.get("min_tokens", 0) <= len(output),
        "one allowed id": len(params.get("allowed_token_ids", ())) == 1,
        "bad words from text": "bad_words" in params,
        "logprobs of all": params.get("logprobs") == -1,
        "logprobs of the token alone": params.get("logprobs") == 0,
        "a sampled token that is not the likeliest": not greedy
        and case["logprobs"] and case["logprobs"]["rank"] > 1,
        "a rank among equals": case["logprobs"] and (z == z[case["token"]]).sum() > 1,
    }  # fmt: skip
    for *before, _ in case["bad_words_token_ids"]:
        ends = before and output[len(output) - len(before) :] == before
        tests["a bad word completed"] = tests.get("a bad word completed") or ends
        tests["a bad word begun in the prompt"] = before and [*prompt, *output][-len(before) :] == (
            before
        ) and not ends  # fmt: skip
        tests["a bad word of one token"] = not before
    if not greedy:
        kept, scaled = len(np.flatnonzero(case["probs"])), edited / max(params["temperature"], 0.01)
        top_k, top_p, min_p = (
            params.get(name, off) for name, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0))
        )
        late = truncated(edited, {**params, "min_p": 0.0})
        late = np.where(np.exp(late - late.max()) < min_p, -np.inf, late)
        before = truncated(edited * max(params["temperature"], 0.01), {**params, "temperature": 1})
        tests |= {
            "top-k keeps a tie": 0 < top_k < kept and top_p == 1.0,
            "top-k of 1": top_k == 1, "top-k of the vocabulary": top_k == len(z),
            "top-k beyond the vocabulary": top_k > len(z), "top-k of -1": top_k == -1,
            "top-p near 0": top_p < 1e-3, "min_p of 1": min_p == 1.0,
            "all three masks": 0 < top_k < len(z) and top_p < 1.0 and min_p > 0.0,
            "min_p after top-p would keep others": np.isfinite(late).sum() != kept,
            "temperature after the masks would keep others": np.isfinite(before).sum() != kept
            and np.isfinite(scaled).sum() > 1,
        }  # fmt: skip
    return {name: bool(holds) for name, holds in tests.items()}


def test_every_situation_occurs() -> None:
    counts: Counter[str] = Counter()
    for case in CASES:
        counts.update(situations(case))
    counts["greedy rows beside sampled ones"] = sum(
        len({case["probs"] is None for case in batch}) == 2
        for _, batch in (
            (n, list(b)) for n, b in itertools.groupby(CASES, key=lambda c: c["batch"])
        )
    )
    assert len(counts) == 38 and min(counts.values()) >= 3, counts


@pytest.mark.upstream
def test_recording_again_gives_the_kept_cases() -> None:
    """Masks and tokens exactly, numbers to the last digits of float32: exp differs by processor."""
    from conformance import real
    from conformance.features.sampling import sampler as recorder

    real.model_config()
    again = list(recorder.cases())
    assert len(again) == len(CASES)
    for case, kept in zip(again, CASES, strict=True):
        for name in ("edited", "processed", "probs"):
            one, other = case.pop(name), kept[name]
            assert (one is None) == (other is None)
            if one is not None:
                same_row(read(other), read(one), kept)
        numbers = case["logprobs"] and case["logprobs"].pop("logprobs")
        if numbers:
            np.testing.assert_allclose(numbers, kept["logprobs"]["logprobs"], rtol=2e-6, atol=2e-6)
            case["logprobs"].pop("token_ids")
        left = {name: kept[name] for name in case}
        if left["logprobs"]:
            left["logprobs"] = {"rank": left["logprobs"]["rank"]}
        assert case == left
