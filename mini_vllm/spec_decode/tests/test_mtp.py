"""A module that reads the target's hidden states drafts what it would if it saw the whole text."""

from __future__ import annotations

import inspect
import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.batch import ForwardBatch
from mini_vllm.models.transformer import Transformer
from mini_vllm.sampler import probabilities, softmax
from mini_vllm.spec_decode import mtp as mtp_module
from mini_vllm.spec_decode.mtp import HiddenStatesModel, MtpModule, MtpProposer
from mini_vllm.spec_decode.tests.test_spec_decode import LIMIT, module_folder, tiny

K = 3


def mtp(**more: Any) -> dict[str, Any]:
    return {"method": "mtp", "model": module_folder(), "num_speculative_tokens": K, **more}


def at_once(
    model: HiddenStatesModel, token_ids: np.ndarray, inputs: np.ndarray | None = None
) -> np.ndarray:
    """Hidden states [num_tokens, hidden_size] of one sequence from position 0, in a new cache."""
    n = len(token_ids)
    inner, positions = model.model, np.arange(n)
    batch = ForwardBatch(
        token_ids, positions, positions, np.array([0, n]), np.array([n]), np.zeros((1, 1), int),
        np.array([n - 1]), block_size=n, inputs_embeds=inputs,
        kv_cache=np.zeros((len(inner.layers), 2, 1, n, 1, 8)),
    )  # fmt: skip
    model.forward(batch)
    return model.take_hidden_states()


class Whole:
    """The drafts without a cache: everything is computed again for each."""

    def __init__(self, module: MtpModule) -> None:
        self.module, self.target = module, HiddenStatesModel(tiny())
        self.read_instead: dict[str, dict[int, int]] = {}
        """Per request and position the token that was read there, where it is not the next one."""

    def laws(self, request_id: str, known: list[int]) -> np.ndarray:
        """[K, vocab_size] what the drafts behind the `known` tokens are the likeliest of."""
        hidden = at_once(self.target, np.array(known[:-1]))
        token_ids = np.array(known[1:])
        for position, token in self.read_instead.get(request_id, {}).items():
            token_ids[position] = token
        laws: list[np.ndarray] = []
        for _ in range(K):
            inputs = self.module.inputs_embeds(token_ids, np.arange(len(token_ids)), hidden)
            own = at_once(self.module, token_ids, inputs)
            laws.append(softmax(self.module.model.lm_head(own[-1:])[0]))
            hidden = np.concatenate((hidden, own[-1:]))
            token_ids = np.append(token_ids, laws[-1].argmax())
        return np.array(laws)


class Watched:
    """An engine whose drafts are compared with those of `Whole`, step by step, by their laws: an
    argmax forgives much."""

    def __init__(self, **knobs: Any) -> None:
        config = mtp(draft_sample_method="probabilistic")
        self.engine = LLMEngine(
            tiny(), dtype="float64", speculative_config=config, block_size=4, **knobs
        )
        proposer = self.engine.feature("spec_decode").proposer
        assert isinstance(proposer, MtpProposer)
        self.whole, self.propose = Whole(proposer.module), proposer.propose
        self.laws = proposer.laws
        self.seen: dict[str, int] = dict.fromkeys(("drafts", "wrong", "chunks", "hits"), 0)
        proposer.propose = self.checked  # type: ignore[method-assign]

    def checked(self, plan: Any, contexts: Any) -> dict[str, list[int]]:
        for request in plan.scheduled_requests:
            request_id, start = request.request_id, plan.num_computed_tokens[request.request_id]
            read = self.whole.read_instead.setdefault(request_id, {})
            for position in [p for p in read if p >= start]:
                del read[position]
            if request_id not in contexts and not request.is_finished:
                last = start + plan.num_scheduled_tokens[request_id] - 1
                read[last] = request.all_token_ids[-1]
                self.seen["chunks"] += 1
        self.seen["hits"] += sum(map(bool, plan.num_cached_tokens.values()))
        drafts: dict[str, list[int]] = self.propose(plan, contexts)
        for request_id, mine in drafts.items():
            known = list(contexts[request_id])
            # Positions without a slot are written to the null block: those drafts are not compared.
            room = 4 * len(plan.block_ids[request_id]) - (len(known) - 1)
            count = max(1, min(K, room + 1))
            self.seen["drafts"] += count
            wanted, got = self.whole.laws(request_id, known)[:count], self.laws[request_id][:count]
            assert mine[:count] == got.argmax(axis=1).tolist()
            self.seen["wrong"] += not np.allclose(got, wanted, rtol=0, atol=1e-12)
        return drafts


TEXT = [1, 2, 3, 4, 5, 6, 7] * 3
PROMPTS = [[*TEXT[:n], 9, n] for n in (3, 9, 15, 20)]
WISH = SamplingParams(max_tokens=18, ignore_eos=True)


@pytest.mark.slow
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize(
    "knobs",
    [
        {"num_blocks": 14, "max_num_batched_tokens": 16, "enable_prefix_caching": False},
        {"num_blocks": 64, "max_num_batched_tokens": 256},
    ],
    ids=["chunks and preemptions", "hits"],
)
def test_the_drafts_are_those_of_a_module_that_reads_the_whole_text(knobs, is_async):
    watched = Watched(max_num_seqs=4, async_scheduling=is_async, **knobs)
    preempted = 0

    def count(plan: Any) -> None:
        nonlocal preempted
        preempted += len(plan.preempted_req_ids)

    watched.engine.observers.append(count)
    for prompts in (PROMPTS, [[*prompt, 11, 12] for prompt in PROMPTS]):
        watched.engine.generate(prompts, WISH)
    assert not watched.seen["wrong"]
    assert watched.seen["drafts"] > 150
    assert watched.engine.feature("spec_decode").stats.num_accepted_tokens > 0
    if knobs["num_blocks"] == 64:
        assert watched.seen["hits"]
    else:
        assert preempted and watched.seen["chunks"]


MUTANTS = {
    "reads the next token where a prompt is cut": ("token_ids[-1] = known[-1]", "pass"),
    "reads the token of the position itself": ("known[start + 1 : ", "known[start : "),
    "reads another request's hidden states": ("first_row += planned", "first_row += count"),
    "reads the first hidden state for every draft": (
        "logits, hidden_states = self._run(step, chosen", "logits, _ = self._run(step, chosen",
    ),
    "stays at one position": ("length - 2 + position", "length - 2"),
    "reads rejected drafts": ("min(planned, len(known) - 1 - start)", "planned"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_proposer_that_reads_something_else_shows(name, monkeypatch):
    right, wrong = MUTANTS[name]
    source = inspect.getsource(MtpProposer)
    assert source.count(right) == 1
    scope = dict(vars(mtp_module))
    exec("from __future__ import annotations\n" + source.replace(right, wrong), scope)
    for method in ("propose", "_continue"):
        monkeypatch.setattr(MtpProposer, method, getattr(scope["MtpProposer"], method))
    watched = Watched(max_num_seqs=4, num_blocks=40, max_num_batched_tokens=16)
    try:
        watched.engine.generate(PROMPTS, WISH)
    except (IndexError, ValueError):
        return  # it asks for rows that are not there
    assert watched.seen["wrong"]


def test_without_the_dropped_block_a_hit_brings_what_another_text_went_on_with():
    """The last position of a block has read the token behind it, which its hash does not know."""
    first, second = [*TEXT[:12], 50, 51], [*TEXT[:12], 90, 91]
    for use_eagle in (True, False):
        watched = Watched(num_blocks=64)
        watched.engine.scheduler.kv.use_eagle = use_eagle
        for prompt in (first, second):
            watched.engine.generate([prompt], SamplingParams(max_tokens=2, ignore_eos=True))
        assert watched.seen["hits"] == 1
        assert bool(watched.seen["wrong"]) == (not use_eagle)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["greedy", "probabilistic"])
def test_sampled_output_has_the_targets_law(how):
    """Three tokens behind a prompt, the target's four likeliest each time, in 4,000 draws."""
    draws, most = 4000, 4
    wish = SamplingParams(temperature=0.5, top_k=most, max_tokens=3, ignore_eos=True)
    engine = LLMEngine(
        tiny(), dtype="float64", num_blocks=2000, max_num_seqs=100, max_num_batched_tokens=2000,
        speculative_config=mtp(draft_sample_method=how), seed=11,
    )  # fmt: skip
    outputs = engine.generate([[1, 2, 3]] * draws, wish)
    stats = engine.feature("spec_decode").stats
    assert stats.num_drafts >= draws and stats.num_accepted_tokens > 20
    counts = Counter(tuple(output.outputs[0].token_ids) for output in outputs)

    def law(text: list[int]) -> np.ndarray:
        hidden = at_once(HiddenStatesModel(tiny()), np.array(text))
        return probabilities(tiny().lm_head(hidden[-1:])[0], wish)

    square, cells = 0.0, 0
    for first in np.flatnonzero(p := law([1, 2, 3])):
        for second in np.flatnonzero(q := law([1, 2, 3, int(first)])):
            r = law([1, 2, 3, int(first), int(second)])
            for third in np.flatnonzero(r):
                expected = draws * p[first] * q[second] * r[third]
                seen = counts.pop((int(first), int(second), int(third)), 0)
                square, cells = square + (seen - expected) ** 2 / expected, cells + 1
    assert not counts  # nothing that the target cannot say
    assert (square - (cells - 1)) / (2 * (cells - 1)) ** 0.5 < LIMIT


def test_the_drafters_own_context_switches_off_everybodys_drafts():
    """One sequence of the batch comes within k of it: zeros for all, as at the pin."""
    config = mtp(max_model_len=32)
    engine = LLMEngine(tiny(), dtype="float64", speculative_config=config)
    lengths, drafted = [], []

    def count(plan: Any) -> None:
        longest = max(
            (plan.num_computed_tokens[r] + n for r, n in plan.num_scheduled_tokens.items()),
            default=0,
        )
        lengths.append(longest)
        drafted.append(dict(plan.spec_token_ids))

    engine.observers.append(count)
    wish = SamplingParams(max_tokens=20, ignore_eos=True)
    got = engine.generate([[1, 2, 3], list(range(24))], wish)
    plain = LLMEngine(tiny(), dtype="float64").generate([[1, 2, 3], list(range(24))], wish)
    assert [r.outputs for r in got] == [r.outputs for r in plain]
    pairs = [(n, d) for n, d in zip(lengths, drafted[1:], strict=False) if d]
    assert any(n + K > 32 for n, _ in pairs) and any(n + K <= 32 for n, _ in pairs)
    for longest, drafts in pairs:
        zeros = [set(d) == {0} for d in drafts.values()]
        assert all(zeros) if longest + K > 32 else not any(zeros)


def test_what_the_module_cannot_serve_is_refused_by_name(tmp_path):
    def words(match: str, model: Any = None, **knobs: Any) -> None:
        config = {**mtp(), **knobs.pop("config", {})}
        with pytest.raises(ValueError, match=match):
            LLMEngine(model or tiny(), dtype="float64", speculative_config=config, **knobs)

    words("model=None: method mtp needs", config={"model": None})
    words("needs the folder of a module", config={"model": tiny()})
    words("method='mtp' with <class", model="toy")
    words("method='mtp' with Qwen3MoeForCausalLM", model="byte-moe")
    words("hidden_size=16: need the target's 256", model="byte-llama")
    words("architectures=.*for method mtp", config={"model": "models/byte-draft"})
    words("max_model_len=200: need at most 128", config={"max_model_len": 200})
    words("enable_lora=True with method='mtp'", enable_lora=True)
    words("speculative_config=", model="byte-window")
    files = {p.name: p.read_bytes() for p in module_folder().iterdir()}
    two = json.loads(files["config.json"]) | {"num_nextn_predict_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(two))
    words("num_nextn_predict_layers=2: need 1", config={"model": tmp_path})
    (tmp_path / "config.json").write_bytes(files["config.json"])
    save_file({"lm_head.weight": np.zeros((257, 16), np.float32)}, tmp_path / "model.safetensors")
    words("lacks model.mtp_layers.0", config={"model": tmp_path})


def test_a_model_put_in_the_targets_place_is_named():
    engine = LLMEngine(tiny(), dtype="float64", speculative_config=mtp())
    engine.model = Transformer.__new__(Transformer)
    engine.model.__dict__.update(tiny().__dict__)
    with pytest.raises(RuntimeError, match=r"engine\.model was replaced"):
        engine.generate([[1, 2, 3]], WISH)
