"""Features together: requests in one engine that mixes them, each against the same request alone.

    python -m conformance.combinations --seed 0 --count 20000

Each seed draws two or three features, or more, for the engine, and wishes for each of its requests;
they run together over a tiny model in float64, some aborted on the way. Each request then runs
alone in an engine with nothing but what its answer depends on (its adapter, its grammar). Tokens,
text, reason, stop reason and log-probabilities must be equal, every block must be back, and nothing
may know a request any more. What an engine refuses is counted by the first words of its message,
and is no difference.

Under the priority policy the engine is told to forget the blocks of a withdrawn request: without
that it reads what was never written, as the pin does (`conformance.hazard`), and an answer differs
in one of some 3,000 workloads.

Left out, since the answer is meant to differ there: drafts under a temperature (the same law, other
numbers), `token_ids` behind a stop text with drafts (a step's accepted tokens are all kept), a
seeded request that a reset of the prefix cache interrupts with tokens in flight.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.lora.request import LoRARequest
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.moe import MoeConfig
from mini_vllm.models.transformer import ModelConfig, Transformer
from mini_vllm.outputs import RequestOutput
from mini_vllm.releases import parts_of
from mini_vllm.request import Request
from mini_vllm.structured_output import StructuredOutputsParams

LONGEST = 96
DENSE = ModelConfig(257, 16, 24, 2, 2, 1, 8, 4 * LONGEST)
TOLERANCE = 1e-8
"""Of a log-probability in float64: sums in another order differ by about 1e-14."""
ALPHABET = b'abcdef {}[]":,0123456789\n\xc3\xa4\xe2\x82\xac'
GRAMMARS: tuple[dict[str, Any], ...] = (
    {"regex": "(ab|cd){1,8}"},
    {"regex": "[a-f]{3}( [0-9]+)*"},
    {"choice": ("yes", "no", "perhaps")},
    {"json": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}},
    {"grammar": 'root ::= "a" root "b" | "c"'},
)


def weights(config: ModelConfig, seed: int) -> dict[str, np.ndarray]:
    """Random ones, float64, so large that every token of a prompt changes the answer."""
    rng = np.random.default_rng(seed)
    found = {}
    for name, shape in expected_shapes(config).items():
        if len(shape) == 1:
            found[name] = np.ones(shape)
        elif "embed" in name:
            found[name] = rng.normal(0, 0.4, shape)
        else:
            found[name] = rng.normal(0, 2 / np.sqrt(shape[-1]), shape)
    return found


@functools.cache
def model(kind: str) -> Transformer:
    """ "dense" or "moe"."""
    moe = MoeConfig(4, 2, 12, True) if kind == "moe" else None
    config = ModelConfig(257, 16, 24, 2, 2, 1, 8, 4 * LONGEST, moe=moe) if moe else DENSE
    return Transformer(config, weights(config, 7 if moe else 3), "float64")


@dataclass(frozen=True, slots=True)
class Wish:
    """One request of a workload."""

    prompt: tuple[int, ...]
    params: SamplingParams
    arrives: int
    """Step before which it is added."""
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: LoRARequest | None = None
    aborted: int | None = None
    """Step before which it is aborted."""


@dataclass(frozen=True, slots=True)
class Workload:
    """An engine's arguments and its requests."""

    seed: int
    kind: str
    knobs: Mapping[str, Any]
    plain: Mapping[str, Any]
    """What of the arguments an answer depends on."""
    wishes: tuple[Wish, ...]
    resets: Mapping[int, bool]
    """Before which step the prefix cache is reset, and whether running requests are too."""

    @property
    def has_drafts(self) -> bool:
        return "speculative_config" in self.knobs


class Folders:
    """Adapters and a draft model on disk, made once."""

    def __init__(self, root: Path) -> None:
        self.adapters = [self._adapter(root / f"a{i}", i) for i in range(1, 5)]
        self.draft = self._draft(root / "draft")

    @staticmethod
    def _adapter(folder: Path, number: int) -> LoRARequest:
        folder.mkdir()
        rng, rank, held = np.random.default_rng(number), number, {}
        for name, shape in expected_shapes(DENSE).items():
            if ".self_attn." in name and name.endswith("proj.weight"):
                base = f"base_model.model.{name.removesuffix('.weight')}"
                held[f"{base}.lora_A.weight"] = rng.normal(0, 0.4, (rank, shape[1]))
                held[f"{base}.lora_B.weight"] = rng.normal(0, 0.4, (shape[0], rank))
        targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
        if number > 2:  # the others leave both ends as they are
            vocab, hidden, base = DENSE.vocab_size, DENSE.hidden_size, "base_model.model"
            held[f"{base}.model.embed_tokens.lora_embedding_A"] = rng.normal(0, 0.4, (rank, vocab))
            held[f"{base}.model.embed_tokens.lora_embedding_B"] = rng.normal(0, 0.4, (hidden, rank))
            held[f"{base}.lm_head.lora_A.weight"] = rng.normal(0, 0.4, (rank, hidden))
            held[f"{base}.lm_head.lora_B.weight"] = rng.normal(0, 0.4, (vocab, rank))
            targets += ["embed_tokens", "lm_head"]
        save_file(
            {n: t.astype(np.float32) for n, t in held.items()}, folder / "adapter_model.safetensors"
        )
        raw = {"peft_type": "LORA", "bias": "none", "r": rank, "lora_alpha": 2 * rank}
        (folder / "adapter_config.json").write_text(json.dumps(raw | {"target_modules": targets}))
        return LoRARequest(f"a{number}", number, str(folder))

    @staticmethod
    def _draft(folder: Path) -> str:
        """The target with a little noise, so that some drafts are accepted."""
        folder.mkdir()
        rng, held = np.random.default_rng(5), weights(DENSE, 3)
        noisy = {n: (t + rng.normal(0, 0.02, t.shape)).astype(np.float32) for n, t in held.items()}
        save_file(noisy, folder / "model.safetensors")
        shipped = Path(__file__).parents[1] / "models" / "byte-llama"
        raw = json.loads((shipped / "config.json").read_text())
        raw |= {
            "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8,
            "max_position_embeddings": 4 * LONGEST, "dtype": "float32", "torch_dtype": "float32",
            "rms_norm_eps": DENSE.rms_norm_eps, "rope_theta": DENSE.rope_theta,
            "tie_word_embeddings": DENSE.tie_word_embeddings,
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(raw))
        for name in ("tokenizer.json", "generation_config.json"):
            (folder / name).write_bytes((shipped / name).read_bytes())
        return str(folder)


# ------------------------------------------------------------------ drawing


def workload(seed: int, folders: Folders) -> Workload:
    """What a seed stands for."""
    rng = random.Random(f"combinations {seed}")
    names = [
        "async", "ngram", "draft", "lora", "grammar", "knobs", "sampled", "stop", "no cache",
        "tight", "priority", "chunks", "moe", "release", "aborts", "resets", "short", "prompt rows",
        "salt", "jump",
    ]  # fmt: skip
    has = set(rng.sample(names, k=rng.choice((2, 2, 3, 3, 4, 6))))
    if has & {"ngram", "draft"}:
        has -= {"sampled"}
    if "jump" in has:
        has |= {"grammar", "ngram"} if "sampled" not in has else set()
    kind = "moe" if "moe" in has and not has & {"lora", "draft"} else "dense"
    block = rng.choice((2, 4, 8, 16))
    knobs: dict[str, Any] = {"block_size": block, "dtype": "float64", "num_blocks": 512}
    if "tight" in has:  # room for the longest request and little more
        knobs["num_blocks"] = -(-LONGEST // block) + rng.randint(2, 8)
        knobs["max_num_seqs"] = rng.randint(1, 6)
    knobs["max_model_len"] = rng.choice((24, 40)) if "short" in has else LONGEST
    knobs["enable_prefix_caching"] = "no cache" not in has
    if "chunks" in has:
        knobs["max_num_batched_tokens"] = rng.choice((8, 16, 33))
        knobs["long_prefill_token_threshold"] = rng.choice((0, 3, 7))
    if "priority" in has:
        knobs |= {"policy": "priority", "forget_withdrawn_blocks": True}
    if "async" in has:
        knobs["async_scheduling"] = True
    drafts = rng.randint(1, 4)
    if "draft" in has:
        knobs["speculative_config"] = {
            "method": "draft_model", "model": folders.draft, "num_speculative_tokens": drafts,
        }  # fmt: skip
    elif "ngram" in has:
        method = "ngram_gpu" if "async" in has else "ngram"
        knobs["speculative_config"] = {
            "method": method, "num_speculative_tokens": drafts, "prompt_lookup_min": 1,
            "prompt_lookup_max": 3,
        }  # fmt: skip
    plain: dict[str, Any] = {}
    if "lora" in has:
        most = rng.randint(1, 3)
        knobs |= {"enable_lora": True, "max_loras": most, "max_lora_rank": 8}
        plain |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": 8, "max_cpu_loras": 4}
    if "jump" in has and "grammar" in has:
        knobs["structured_outputs_config"] = {"jump_ahead": True}
    if "release" in has:
        knobs["release"] = rng.choice(("0.27.1", "0.33.0"))
    plain |= {"max_model_len": knobs["max_model_len"], "dtype": "float64", "num_blocks": 512}
    shared = _prompt(rng, 20)
    wishes = tuple(_wish(rng, has, knobs, shared, folders) for _ in range(rng.randint(2, 5)))
    resets = {}
    if "resets" in has:
        running = "sampled" not in has and rng.random() < 0.5
        resets = {rng.randint(2, 12): running for _ in range(2)}
    return Workload(seed, kind, knobs, plain, wishes, resets)


def _prompt(rng: random.Random, most: int) -> tuple[int, ...]:
    return tuple(rng.choices(ALPHABET, k=rng.randint(1, most)))


def _wish(
    rng: random.Random, has: set[str], knobs: Mapping[str, Any], shared: tuple[int, ...],
    folders: Folders,
) -> Wish:  # fmt: skip
    prompt = (*shared, *_prompt(rng, 12)) if rng.random() < 0.6 else _prompt(rng, 24)
    prompt = prompt[: knobs["max_model_len"] - 4]
    wanted: dict[str, Any] = {
        "max_tokens": rng.randint(1, 16),
        "ignore_eos": rng.random() < 0.3,
        "min_tokens": 0,
    }
    if rng.random() < 0.3:
        wanted["logprobs"] = rng.randint(0, 3)
    if "prompt rows" in has and rng.random() < 0.7:
        wanted["prompt_logprobs"] = rng.randint(0, 2)
    if "sampled" in has:
        wanted |= {"temperature": rng.choice((0.5, 1.0, 2.0)), "seed": rng.randrange(1 << 20)}
        wanted |= {"top_k": rng.choice((0, 3)), "top_p": rng.choice((1.0, 0.8))}
        wanted["n"] = rng.choice((1, 1, 3))
    if "knobs" in has:
        wanted |= _edits(rng, "speculative_config" in knobs)
        if "release" not in has:
            wanted["min_tokens"] = rng.randint(0, wanted["max_tokens"])
    if "stop" in has:
        wanted["stop_token_ids"] = tuple(rng.sample(range(97, 123), k=rng.randint(0, 6)))
        wanted["stop"] = tuple(rng.choices("abcdefghij", k=rng.randint(0, 3)))
        wanted["include_stop_str_in_output"] = rng.random() < 0.5
    if "grammar" in has and rng.random() < 0.7:
        wanted["structured_outputs"] = StructuredOutputsParams(**rng.choice(GRAMMARS))
    adapter = rng.choice((None, *folders.adapters)) if "lora" in has else None
    options: dict[str, Any] = {}
    if "salt" in has:
        options["cache_salt"] = rng.choice((None, "x", "y"))
    if "priority" in has:
        options["priority"] = rng.randint(0, 2)
    arrives = rng.choice((0, 0, rng.randint(0, 10)))
    aborted = arrives + rng.randint(0, 8) if "aborts" in has and rng.random() < 0.4 else None
    return Wish(prompt, SamplingParams(**wanted), arrives, options, adapter, aborted)


def _edits(rng: random.Random, has_drafts: bool) -> dict[str, Any]:
    """What changes rows; with drafts `logit_bias` is refused, as upstream refuses it."""
    found: dict[str, Any] = {
        "presence_penalty": rng.choice((0.0, 1.0)),
        "frequency_penalty": rng.choice((0.0, -0.5)),
        "repetition_penalty": rng.choice((1.0, 1.3)),
    }
    if rng.random() < 0.4:
        found["bad_words"] = tuple(rng.choices("abcdefg", k=2))
    if rng.random() < 0.3:
        found["allowed_token_ids"] = tuple(rng.sample(range(32, 126), k=40))
    if rng.random() < 0.3 and not has_drafts:
        found["logit_bias"] = {rng.randrange(257): rng.uniform(-5, 5) for _ in range(3)}
    return found


# ------------------------------------------------------------------ running


class Refused(Exception):
    """An engine does not take this combination; the text says why."""


def together(work: Workload) -> tuple[dict[int, RequestOutput], list[str]]:
    """Run a workload; per wish that was taken its output, and what was left behind.

    Raises:
        Refused: the engine, or every one of its requests, was refused.
    """
    try:
        knobs = dict(work.knobs)
        if release := knobs.pop("release", None):
            knobs["parts"] = parts_of(release)
        engine = LLMEngine(model(work.kind), **knobs)
    except ValueError as error:
        raise Refused(str(error)) from None
    idle = engine.scheduler.kv.block_pool.get_num_free_blocks()
    runs: dict[int, tuple[str, list[Request]]] = {}
    refused: list[str] = []
    step, last = 0, max((*(w.arrives for w in work.wishes), *work.resets, 0))
    while engine.has_unfinished_requests() or step <= last:
        for number, wish in enumerate(work.wishes):
            if wish.arrives == step:
                try:
                    runs[number] = _add(engine, number, wish)
                except ValueError as error:
                    refused.append(str(error))
            if wish.aborted == step and number in runs:
                engine.abort_request(runs[number][0])
        if step in work.resets:
            try:
                engine.reset_prefix_cache(work.resets[step])
            except ValueError as error:
                refused.append(str(error))
        engine.step()
        step += 1
        if step > 5_000:
            raise RuntimeError("the engine does not come to an end")
    engine.generate([[3]], SamplingParams(max_tokens=2))  # a step may still know the one before it
    left = []
    if engine.scheduler.kv.block_pool.get_num_free_blocks() != idle:
        left.append("blocks")
    ids = {request.request_id for _, requests in runs.values() for request in requests}
    left += [path for path, _ in holders(engine, ids)]
    engine.close()
    if refused and not runs:
        raise Refused(refused[0])
    outputs = {
        number: RequestOutput.of(request_id, requests, (), engine.tokenizer)
        for number, (request_id, requests) in runs.items()
    }
    return outputs, left


def _add(engine: LLMEngine, number: int, wish: Wish) -> tuple[str, list[Request]]:
    """Queue a wish; its id and its requests."""
    options = dict(wish.options)
    if wish.adapter is not None:
        options["lora_request"] = wish.adapter
    request_id, requests = engine.inputs.process(
        list(wish.prompt), wish.params, f"w{number}", options.pop("priority", 0), None,
        options.pop("cache_salt", None), **options,
    )  # fmt: skip
    engine.queue_requests(request_id, requests)
    return request_id, list(requests)


def alone(work: Workload, wish: Wish, engines: dict[str, LLMEngine]) -> RequestOutput:
    """The answer of an engine that does nothing else."""
    key = json.dumps([work.kind, dict(work.plain)], sort_keys=True)
    if key not in engines:
        engines[key] = LLMEngine(model(work.kind), **work.plain)
    engine = engines[key]
    engine.reset_prefix_cache()
    options = {} if wish.adapter is None else {"lora_request": wish.adapter}
    [output] = engine.generate([list(wish.prompt)], wish.params, **options)
    return output


def holders(engine: LLMEngine, ids: set[str]) -> Iterator[tuple[str, Any]]:
    """Where the engine's objects still hold one of these request ids, as key or element."""
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("engine", engine)]
    while todo:
        path, found = todo.pop()
        if id(found) in seen or isinstance(found, str | bytes | np.ndarray | int | float | None):
            continue
        seen.add(id(found))
        if isinstance(found, Mapping):
            if any(isinstance(key, str) and key in ids for key in found):
                yield path, found
            todo += [(f"{path}[...]", value) for value in found.values()]
        elif isinstance(found, list | tuple | set | frozenset | collections.deque):
            if any(isinstance(each, str) and each in ids for each in found):
                yield path, found
            todo += [(f"{path}[...]", value) for value in found if not isinstance(value, str)]
        elif isinstance(found, Request):
            yield path, found
        elif type(found).__module__.startswith("mini_vllm"):
            names = [n for c in type(found).__mro__ for n in getattr(c, "__slots__", ())]
            held = {n: getattr(found, n) for n in names if hasattr(found, n)}
            held |= getattr(found, "__dict__", {})
            todo += [(f"{path}.{name}", value) for name, value in held.items()]


# ------------------------------------------------------------------ comparing


def differences(work: Workload, engines: dict[str, LLMEngine]) -> list[str]:
    """What differs between together and alone; nothing if all is well. Raises Refused."""
    outputs, left = together(work)
    found = [f"left behind: {path}" for path in left]
    for number, output in outputs.items():
        wish = work.wishes[number]
        expected = alone(work, wish, engines)
        pairs = zip(output.outputs, expected.outputs, strict=True)
        for index, (came, wanted) in enumerate(pairs):
            place = f"request {number}.{index}"
            if came.finish_reason == "abort":
                if came.token_ids != wanted.token_ids[: len(came.token_ids)]:
                    found.append(f"{place}, aborted: {came.token_ids} of {wanted.token_ids}")
                continue
            by_text = work.has_drafts and came.finish_reason == "stop" and wish.params.stop
            length = len(wanted.token_ids) if by_text else None
            for name in ("token_ids", "text", "finish_reason", "stop_reason"):
                one, other = getattr(came, name), getattr(wanted, name)
                if (one[:length] if name == "token_ids" else one) != other:
                    found.append(f"{place}, {name}: {one!r}, alone {other!r}")
            found += _apart(f"{place}, logprobs", came.logprobs, wanted.logprobs)
        if all(each.finish_reason != "abort" for each in output.outputs):
            place = f"request {number}, prompt_logprobs"
            found += _apart(place, output.prompt_logprobs, expected.prompt_logprobs)
    return found


def _apart(place: str, came: Any, wanted: Any) -> list[str]:
    """Positions whose log-probabilities differ by more than `TOLERANCE`."""
    if came is None or wanted is None:
        return [] if came is wanted else [f"{place}: {came}, alone {wanted}"]
    for position, (one, other) in enumerate(zip(came, wanted, strict=False)):
        if (one is None) != (other is None):
            return [f"{place}[{position}]: {one}, alone {other}"]
        for token, entry in (one or {}).items():
            theirs = (other or {}).get(token)
            if theirs is None or abs(entry.logprob - theirs.logprob) > TOLERANCE:
                return [f"{place}[{position}][{token}]: {entry}, alone {theirs}"]
    return []


@dataclass(slots=True)
class Tally:
    """What a run of seeds came to."""

    num_workloads: int = 0
    num_requests: int = 0
    different: dict[int, list[str]] = field(default_factory=dict)
    refused: collections.Counter[str] = field(default_factory=collections.Counter)


def run(seeds: range, folders: Folders, seconds: float | None = None) -> Tally:
    """Compare workload after workload; stops early when `seconds` are over."""
    tally, engines, until = Tally(), dict[str, LLMEngine](), None
    if seconds is not None:
        until = time.monotonic() + seconds
    for seed in seeds:
        if until is not None and time.monotonic() > until:
            break
        work = workload(seed, folders)
        try:
            found = differences(work, engines)
        except Refused as error:
            tally.refused[str(error).partition(":")[0][:60]] += 1
            continue
        except Exception as error:
            found = [f"{type(error).__name__}: {error}"]
        tally.num_workloads += 1
        tally.num_requests += len(work.wishes)
        if found:
            tally.different[seed] = found
    return tally


def main() -> int:
    """Print what differs, what is refused, and a line that says how much was compared."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first one")
    parser.add_argument("--count", type=int, default=1000, help="how many workloads")
    parser.add_argument("--seconds", type=float, help="stop after this long")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seeds = range(asked.seed, asked.seed + asked.count)
        tally = run(seeds, Folders(Path(folder)), asked.seconds)
    for seed, found in tally.different.items():
        print(f"seed {seed}: {found[0][:300]}")
    for message, count in tally.refused.most_common():
        print(f"refused {count:5}: {message}")
    print(
        f"{tally.num_workloads} workloads, {tally.num_requests} requests: "
        f"{len(tally.different)} differ"
    )
    return 1 if tally.different else 0


if __name__ == "__main__":
    sys.exit(main())
