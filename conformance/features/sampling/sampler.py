"""Record the sampler of the real v0.22.1: every stage of it, for batches of unlike requests.

Needs the pinned tree on `PYTHONPATH`, no GPU. The real `SamplingParams`, input batch, logits
processors and `Sampler.forward` run on one batch at a time; a case is one row of it. Batches are
drawn (small vocabularies, ties, edges of every parameter) or have rows of the shipped model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np

from conformance.features.quantization.quantization_layouts import floats

Case = dict[str, Any]

ABOUT = (
    "One row of a batch. `params`: fields of `SamplingParams`, upstream's defaults where absent "
    "(temperature is always there). `bad_words_token_ids`: what the tokenizer made of `bad_words`, "
    "or drawn. `logits` in; `edited`: after allowed ids, bad words, min_tokens, logit_bias and "
    "penalties; `processed`: after temperature, min_p, top-k and top-p; `probs`: its softmax; all "
    "[vocab_size] float32, null is -inf. Greedy rows have neither `processed` nor `probs`; where "
    "every token is masked `processed` and `probs` are null too. `token`: what was sampled, the "
    "largest `probs / exponentials` or the argmax of `edited`. `logprobs`: null or `{token_ids, "
    "logprobs, rank}` of the logits as they came in: the sampled token first, then the likeliest "
    "(of equal ones in no order); `rank` counts the tokens that are at least as likely. Rows that "
    "float32 rounding could decide are left out."
)

MODEL_PROMPTS = (
    "The KV cache is", "Each block holds", "def schedule(self", "A request waits until ",
    "temperature, top_k and ", "the the the the the", "Paged attention reads",
    "import numpy as np\n", "1, 2, 3, 4, 5, ", "The scheduler The scheduler",
)  # fmt: skip
MAX_LEN = 64
LOGITS_UNIT = 1 / 1024
"""Rows of the model are rounded to multiples of this, so that they are short to write."""
NEAR = 1e-4
"""Two numbers that are closer than this, and not equal, may come in either order in float32."""


def cases() -> Iterator[Case]:
    """The cases; the same every time."""
    rng = np.random.default_rng(22)
    number = 0
    for _ in range(110):
        logits = _drawn_logits(rng)
        yield from _batch(rng, number, logits, [_history(rng, row) for row in logits])
        number += 1
    for prompt in MODEL_PROMPTS:
        rows, prompt_ids, said = _model_rows(prompt, 6)
        histories = [(prompt_ids, said[:count]) for count in range(len(rows))]
        yield from _batch(rng, number, rows, histories, words=("the", " cache", "e", prompt[-2:]))
        number += 1


# --- what goes in ---------------------------------------------------------------------------------


def _drawn_logits(rng: np.random.Generator) -> np.ndarray:
    """[rows, vocab_size] multiples of 1/16, so that ties occur; some rows lie far from 0."""
    shape = int(rng.integers(1, 7)), int(rng.choice((4, 8, 8, 24)))
    scale = rng.choice((0.5, 2.0, 6.0), size=(shape[0], 1))
    logits = np.round(rng.normal(0, 1, shape) * scale * 16) / 16
    coarse = rng.random((shape[0], 1)) < 0.4
    logits = np.where(coarse, np.round(logits), logits)
    return logits + rng.choice((0.0, 0.0, 0.0, 0.0, 1000.0, -500.0), size=(shape[0], 1))


def _history(rng: np.random.Generator, row: np.ndarray) -> tuple[list[int], list[int]]:
    """Ids of a prompt and of an output, few different ones, so that they repeat."""
    ids = rng.integers(0, len(row), size=4)
    prompt = rng.choice(ids, size=int(rng.integers(1, 7)))
    output = rng.choice(ids, size=int(rng.choice((0, 1, 3, 8))))
    return prompt.tolist(), output.tolist()


def _model_rows(prompt: str, count: int) -> tuple[np.ndarray, list[int], list[int]]:
    """`count` rows [vocab_size] of the shipped model after `prompt`, the prompt, what it says."""
    from labkit import shipped_model
    from mini_vllm import LLMEngine, SamplingParams

    engine = LLMEngine(shipped_model())
    rows = []
    execute = engine.runner.execute

    def kept(plan: Any) -> np.ndarray:
        logits = execute(plan)
        rows.append(np.round(logits[0] / LOGITS_UNIT) * LOGITS_UNIT)
        return logits

    with mock.patch.object(engine.runner, "execute", kept):
        name = engine.add_request(prompt, SamplingParams(max_tokens=count, ignore_eos=True))
        request = engine.requests[name]
        while engine.has_unfinished_requests():
            engine.step()
    return np.array(rows), list(request.prompt_token_ids), list(request.output_token_ids)


def _params(rng: np.random.Generator, vocab: int, argmax: int) -> dict[str, Any]:
    """Fields of `SamplingParams` for one row; each edge of each has its turn."""

    def maybe(share: float, *values: Any) -> dict[str, Any]:
        return {} if rng.random() >= share else values[int(rng.integers(len(values)))]

    def ids(most: int) -> list[int]:
        count = int(rng.integers(1, most + 1))
        return sorted({int(token) for token in rng.integers(0, vocab, size=count)})

    temperature = float(rng.choice((0.0, 0.005, 0.3, 0.7, 1.0, 1.0, 1.5, 4.0)))
    params: dict[str, Any] = {"temperature": temperature}
    if temperature > 0:
        ks = (1, 2, 3, vocab - 1, vocab, vocab + 5, -1)
        params |= maybe(0.5, *({"top_k": k} for k in ks))
        params |= maybe(0.5, *({"top_p": p} for p in (1e-6, 0.1, 0.5, 0.9, 0.99, 1.0)))
        params |= maybe(0.5, *({"min_p": p} for p in (0.01, 0.1, 0.35, 0.8, 1.0)))
    params |= maybe(0.4, *({"repetition_penalty": f} for f in (0.5, 1.2, 1.5, 2.0, 8.0)))
    params |= maybe(0.35, *({"frequency_penalty": f} for f in (-2.0, -0.25, 0.3, 0.75, 2.0)))
    params |= maybe(0.35, *({"presence_penalty": f} for f in (-2.0, 0.5, 1.25, 2.0)))
    biases = (1.5, -3.25, 10.0, -100.0, 100.0)
    bias = {int(token): float(rng.choice(biases)) for token in ids(3)}
    params |= maybe(0.3, {"logit_bias": bias}, {"logit_bias": {argmax: -3.25}})
    params |= maybe(0.15, {"allowed_token_ids": ids(vocab)}, {"allowed_token_ids": ids(2)})
    if rng.random() < 0.3:
        stops = sorted({*ids(2), argmax}) if rng.random() < 0.5 else ids(2)
        params |= {"min_tokens": int(rng.choice((1, 3, 4))), "stop_token_ids": stops}
    params |= maybe(0.5, *({"logprobs": count} for count in (0, 1, 3, -1)))
    return params


def _bad_words(
    rng: np.random.Generator, vocab: int, argmax: int, history: tuple[list[int], list[int]]
) -> list[list[int]]:
    """Sequences of ids: single ones, ones that the output is about to complete, ones it is not."""
    prompt, output = history
    tail = output[-int(rng.integers(1, 4)) :] if output else prompt[-1:]
    found = [
        [argmax],
        [int(rng.integers(vocab))],
        [*tail, argmax],
        [*tail, int(rng.integers(vocab))],
        [(tail[-1] + 1) % vocab, argmax],
        [prompt[-1], *output, argmax],
    ]
    picked = rng.permutation(len(found))[: int(rng.integers(1, 4))]
    return [[int(token) for token in found[index]] for index in picked]


# --- what comes out -------------------------------------------------------------------------------


def _batch(
    rng: np.random.Generator,
    number: int,
    logits: np.ndarray,
    histories: Sequence[tuple[list[int], list[int]]],
    words: Sequence[str] = (),
) -> Iterator[Case]:
    """One batch through the real sampler: a case for every row that rounding does not decide."""
    import torch

    vocab = logits.shape[1]
    eos = int(rng.integers(vocab)) if not words else 256
    rows: list[dict[str, Any]] = []
    for row, history in zip(logits, histories, strict=True):
        fields = _params(rng, vocab, int(row.argmax()))
        banned: list[list[int]] = []
        if rng.random() < 0.25:
            if words:
                fields["bad_words"] = [words[int(rng.integers(len(words)))]]
            else:
                banned = _bad_words(rng, vocab, int(row.argmax()), history)
        if "allowed_token_ids" in fields and rng.random() < 0.15:
            banned = [[token] for token in fields["allowed_token_ids"]]  # nothing is left
        rows.append({"fields": fields, "banned": banned, "history": history})
    exponentials = rng.integers(1, 1 << 12, size=logits.shape) / (1 << 10)
    params = [_real_params(row["fields"], row["banned"], eos) for row in rows]
    stages, output = _real_sampler(
        torch.tensor(logits, dtype=torch.float32), params, histories, exponentials
    )
    for index, row in enumerate(rows):
        real = params[index]
        case: Case = {
            "batch": number,
            "params": {name: _plain(value) for name, value in row["fields"].items()},
            "eos_token_id": eos,
            "prompt_token_ids": row["history"][0],
            "output_token_ids": row["history"][1],
            "bad_words_token_ids": real.bad_words_token_ids or [],
            "logits": written(logits[index]),
            "edited": written(stages["edited"][index]),
            "processed": None,
            "probs": None,
            "exponentials": None,
            "token": int(output.sampled_token_ids[index, 0]),
            "logprobs": _logprobs(output.logprobs_tensors, index, real, vocab),
        }
        if real.temperature > 0:
            case["exponentials"] = exponentials[index].tolist()
            if np.isfinite(stages["edited"][index]).any():
                case["processed"] = written(stages["processed"][index])
                case["probs"] = floats(stages["probs"][index])
        if _survives_rounding(case, real):
            yield case


def _real_params(fields: dict[str, Any], banned: list[list[int]], eos: int) -> Any:
    """The real `SamplingParams`, with what an engine adds to it."""
    from vllm.sampling_params import SamplingParams

    params = SamplingParams(**fields)
    params.update_from_generation_config({}, eos)
    if banned:
        params._bad_words_token_ids = banned
    else:
        params.update_from_tokenizer(_tokenizer())
    return params


def _tokenizer() -> Any:
    """The shipped model's tokenizer, as the real engine wraps it."""
    from vllm.tokenizers import get_tokenizer

    from conformance.first_tokens import MODEL

    return get_tokenizer(str(MODEL))


def _real_sampler(
    logits: Any,
    params: Sequence[Any],
    histories: Sequence[tuple[list[int], list[int]]],
    exponentials: np.ndarray,
) -> tuple[dict[str, np.ndarray], Any]:
    """What `Sampler.forward` makes of one batch: stages, [rows, vocab_size] each, and output."""
    import torch
    from vllm.v1.sample import sampler as real
    from vllm.v1.sample.logits_processor import build_logitsprocs
    from vllm.v1.sample.ops import penalties, topk_topp_sampler
    from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch

    stages: dict[str, np.ndarray] = {}

    def keeping(name: str, function: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            result = function(*arguments)
            stages[name] = result.clone().numpy()
            return result

        return wrapped

    def draw(probs: Any, generators: dict[int, Any]) -> Any:
        stages["probs"] = probs.clone().numpy()
        return random_sample(probs, generators)

    table = torch.tensor(exponentials, dtype=torch.float32)
    random_sample = topk_topp_sampler.random_sample
    truncate = topk_topp_sampler.apply_top_k_top_p
    count, device = len(params), torch.device("cpu")
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=count), speculative_config=None
    )
    with (
        mock.patch.object(penalties, "is_pin_memory_available", lambda: False),
        mock.patch.object(real, "is_pin_memory_available", lambda: False),
        mock.patch.object(topk_topp_sampler, "apply_top_k_top_p", keeping("processed", truncate)),
        mock.patch.object(topk_topp_sampler, "random_sample", draw),
        mock.patch.object(torch.Tensor, "exponential_", lambda self, **_: self.copy_(table)),
        torch.compiler.set_stance("force_eager"),
    ):
        batch = InputBatch(
            count, MAX_LEN, MAX_LEN, device, False, logits.shape[1], [16], [16],
            logitsprocs=build_logitsprocs(config, device, False, False),
        )  # fmt: skip
        for index, (prompt, output) in enumerate(histories):
            batch.add_request(
                CachedRequestState(
                    f"r{index}", prompt, [], params[index], None, ([],), len(prompt), output
                )
            )
        batch.refresh_metadata()
        sampler = real.Sampler()
        edit = sampler.apply_logits_processors
        with mock.patch.object(sampler, "apply_logits_processors", keeping("edited", edit)):
            return stages, sampler(logits, batch.sampling_metadata)


def _logprobs(tensors: Any, row: int, params: Any, vocab: int) -> dict[str, Any] | None:
    """The row's own: a batch is gathered for whoever wants most."""
    if params.logprobs is None:
        return None
    columns = 1 + (vocab if params.logprobs == -1 else params.logprobs)
    return {
        "token_ids": tensors.logprob_token_ids[row, :columns].tolist(),
        "logprobs": floats(tensors.logprobs[row, :columns].numpy()),
        "rank": int(tensors.selected_token_ranks[row]),
    }


def _plain(value: Any) -> Any:
    return {str(key): each for key, each in value.items()} if isinstance(value, dict) else value


def written(row: np.ndarray) -> list[float | None]:
    """A row of logits for JSON: -inf is null."""
    finite = np.isfinite(row)
    return [value if keep else None for value, keep in zip(floats(row), finite, strict=True)]


def read(row: Sequence[float | None]) -> np.ndarray:
    """A row of a case as it was, [vocab_size] float64: null is -inf."""
    return np.array([-np.inf if value is None else value for value in row])


def tolerance(row: np.ndarray) -> float:
    """How far float32 may be from float64 in a finite logit of `row`, or in a probability made of
    it: some steps of the largest one, of which a logit near 1,000 makes steps of 6e-5."""
    return float(4 * np.spacing(np.float32(np.abs(row[np.isfinite(row)]).max()))) + 2e-6


# --- what may be compared -------------------------------------------------------------------------


def _survives_rounding(case: Case, params: Any) -> bool:
    """Whether float64 must decide as float32 did: nothing lies close to a bound it is held against.

    Equal numbers count as close where an edit made them: another rounding may part them.
    """
    edited, untouched = read(case["edited"]), read(case["logits"])
    if not np.isfinite(edited).any():
        return True
    own = edited == untouched

    def close(values: np.ndarray, bound: int) -> bool:
        """Whether a value may fall on the other side of the one at index `bound`."""
        gap = np.abs(values - values[bound])
        apart = np.where(own & own[bound], gap > 0, np.arange(len(values)) != bound)
        return bool((apart & (gap < NEAR)).any())

    if case["processed"] is None:
        return not close(edited, int(edited.argmax()))
    scaled = edited / params.temperature
    weights = np.exp(scaled - scaled.max())
    ratio_gap = np.abs(weights - params.min_p)
    if 0.0 < params.min_p < 1.0 and ratio_gap.min() < NEAR:
        return False
    if params.min_p == 1.0 and close(scaled, int(scaled.argmax())):
        return False
    scaled = np.where(weights >= params.min_p, scaled, -np.inf)
    falling = np.argsort(-scaled, kind="stable")
    if 0 < params.top_k < np.isfinite(scaled).sum():
        bound = int(falling[params.top_k - 1])
        if close(scaled, bound):
            return False
        scaled = np.where(scaled < scaled[bound], -np.inf, scaled)
    if params.top_p == 1.0:  # a neighbour's top-p drops what has no probability in float32
        return bool((read(case["processed"])[np.isfinite(scaled)] > -np.inf).all())
    falling = np.argsort(-scaled, kind="stable")
    weights = np.exp(scaled[falling] - scaled.max())
    mass = np.cumsum(weights) / weights.sum()
    last = int((mass < params.top_p).sum())
    tied = last + 1 < len(falling) and close(scaled, int(falling[last]))
    equal = last + 1 < len(falling) and scaled[falling[last]] == scaled[falling[last + 1]]
    return not (tied or equal or np.abs(mass - params.top_p).min() < min(NEAR, params.top_p / 2))
