"""Adapters of embedding and head as the pinned wrappers compute them, and where those are wrong.

What they gave is in `recordings/parts/lora_embeddings.jsonl.gz`, by `lora_embeddings.py`, and in
`lora_kernels.jsonl.gz` beside it, by the Triton kernels and `lora_kernels.py`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from conformance import parts
from conformance.mutants import edited
from mini_vllm.batch import ForwardBatch
from mini_vllm.lora import layers, weights
from mini_vllm.models.config import expected_shapes
from mini_vllm.models.transformer import ModelConfig, Transformer, embedded
from mini_vllm.tests.lora_support import write_adapter

CASES = parts.load("lora_embeddings")
RIGHT = [case for case in CASES if not case["kind"].startswith("faults")]
FAULTS, ONE_SLOT = (case for case in CASES if case["kind"].startswith("faults"))
KERNELS, KERNEL_FAULTS, KERNEL_ONE_SLOT = parts.load("lora_kernels")
HALF = 5e-3
"""Of the largest value of a step, against kernels in float16, which round each of weights, rows,
base and delta by up to 5e-4; 8e-4 is the most that was seen, and a mutant is off by 0.7."""
TOLERANCE = 1e-5
"""Of the largest value of a step: both sides are float32, and sums differ in their order."""


class _Ends(Transformer):
    """A model of an embedding and a head: it notes the first and computes the second."""

    embedded: np.ndarray
    hidden: np.ndarray

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        rows = batch.inputs_embeds
        if rows is None:  # base requests alone
            rows = embedded(self.embed_tokens, batch.token_ids)
        self.embedded = rows[np.argsort(batch.positions)]
        return self.lm_head(self.hidden)


class Replay:
    """A case's model with our layers around it, and its adapters loaded from folders."""

    def __init__(
        self, case: dict[str, Any], folder: Path,
        layers: ModuleType = layers, weights: ModuleType = weights,
    ) -> None:  # fmt: skip
        tied = "tied" in case["kind"]
        self.config = ModelConfig(
            case["vocab_size"], case["hidden_size"], 4, 1, 1, 1, 4, 64, tie_word_embeddings=tied
        )
        held = {name: np.zeros(shape) for name, shape in expected_shapes(self.config).items()}
        held["model.embed_tokens.weight"] = np.array(case["embedding"])
        if not tied:
            held["lm_head.weight"] = np.array(case["head"])
        self.wanted = weights.projections(self.config)
        ends = {name: self.wanted[name] for name in (weights.EMBEDDING, weights.HEAD)}
        self.model = layers.AdaptedModel(_Ends(self.config, held), ends, case["max_loras"])
        self.adapters, self.weights, self.base = {}, weights, layers.BASE
        for number, adapter in enumerate(case["adapters"], start=1):
            keys = {key: adapter[key] for key in ("r", "lora_alpha", "use_rslora")}
            tensors = {name: np.array(tensor) for name, tensor in adapter["tensors"].items()}
            path = write_adapter(
                folder / str(number), config=self.config, target_modules=(), tensors=tensors, **keys
            )
            self.adapters[number] = weights.load_adapter(path, self.wanted, 8)

    def step(self, step: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
        """What our layers give: rows of the embedding, and logits."""
        for slot, number in enumerate(step["slots"]):
            loaded = {} if number is None else self.adapters[number]
            pairs = {name: self.weights.pack(each, loaded) for name, each in self.wanted.items()}
            self.model.set_slot(slot, {n: pair for n, pair in pairs.items() if pair is not None})
        requests = step["requests"]
        counts = np.array([len(r["tokens"]) for r in requests])
        ends = np.cumsum(counts)
        rows = [np.arange(e - r["rows"], e) for e, r in zip(ends, requests, strict=True)]
        slots = [step["slots"].index(r["adapter"]) if r["adapter"] else self.base for r in requests]
        self.model.step.slots = np.array(slots)
        total = int(ends[-1])
        ours = self.model.transformer
        ours.hidden = np.array(step["hidden"], np.float32)
        logits = self.model.forward(
            ForwardBatch(
                token_ids=np.array([t for r in requests for t in r["tokens"]]),
                positions=np.arange(total),
                slot_mapping=np.arange(total),
                query_start_loc=np.concatenate([[0], ends]),
                seq_lens=counts,
                block_tables=np.zeros((len(requests), 1), np.int64),
                logits_indices=np.concatenate(rows),
            )
        )
        return ours.embedded, logits


def difference(ours: np.ndarray, recorded: Any) -> float:
    """The largest difference, as a part of the largest recorded value."""
    theirs = np.array(recorded)
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def differences(case: dict[str, Any], folder: Path, **modules: ModuleType) -> tuple[float, float]:
    """The largest of all steps: of the embedding, and of the logits."""
    replay = Replay(case, folder, **modules)
    found = [(replay.step(step), step) for step in case["steps"]]
    return (
        max(difference(rows, step["embedded"]) for (rows, _), step in found),
        max(difference(logits, step["logits"]) for (_, logits), step in found),
    )


@pytest.mark.parametrize("case", RIGHT, ids=lambda case: f"{case['kind']} {case['vocab_size']}")
def test_embedding_and_head_give_what_the_pinned_wrappers_give(case, tmp_path):
    """Mixed steps, rows of drafts, slots that are taken over, heads of three kinds."""
    assert max(differences(case, tmp_path)) < TOLERANCE


def test_embedding_and_head_give_what_the_pinned_kernels_give(tmp_path):
    """The Triton kernels, interpreted: float16 there, float32 here."""
    assert max(differences(KERNELS, tmp_path)) < HALF


MUTANTS = {
    "the scaling left out": (weights, "        b *= scaling\n", ""),
    "the scaling in A as well": (weights, "b *= scaling", "a *= scaling\n        b *= scaling"),
    "the rank's root forgotten": (weights, "(math.sqrt(rank) if rslora else rank)", "rank"),
    "A and B swapped": (
        weights, 'found[module] = a, b\n',
        'found[module] = (b, a) if a.shape == b.shape else (a, b)\n',
    ),
    "the delta in the place of the base's row": (
        layers, "rows[start:end] += embedded(a.T", "rows[start:end] = embedded(a.T",
    ),
    "the pair of the slot before": (
        layers, "            pair = self.slots[slot]\n            if pair is not None:\n",
        "            pair = self.slots[slot - 1]\n            if pair is not None:\n",
    ),
    "A looked up by the token before": (
        layers, "embedded(a.T, token_ids[start:end])", "embedded(a.T, token_ids[start:end] - 1)",
    ),
    "A looked up before the tokens are sorted": (
        layers,
        "        batch = group_by_slot(batch, self.step)\n"
        "        if self.step.segments and self.embedding is not None:\n"
        "            batch = replace(batch, inputs_embeds=self.embedding(batch.token_ids))\n",
        "        tokens = batch.token_ids\n        batch = group_by_slot(batch, self.step)\n"
        "        if self.step.segments:\n"
        "            batch = replace(batch, inputs_embeds=self.embedding(tokens))\n",
    ),
    "rows of logits by the first tokens": (
        layers, "token_slots[batch.logits_indices]", "token_slots[: len(batch.logits_indices)]",
    ),
    "rows of logits by the sorted tokens": (
        layers, "token_slots[batch.logits_indices]", "np.sort(token_slots)[batch.logits_indices]",
    ),
    "one row of logits for each request": (
        layers, "token_slots[batch.logits_indices]",
        "np.resize(slots, len(batch.logits_indices))",
    ),
    "a head that is not reset": (
        layers, "self.head.slots[slot] = pairs.get(HEAD)",
        "self.head.slots[slot] = pairs.get(HEAD, self.head.slots[slot])",
    ),
    "an embedding that is not reset": (
        layers, "self.embedding.slots[slot] = pairs.get(EMBEDDING)",
        "self.embedding.slots[slot] = pairs.get(EMBEDDING, self.embedding.slots[slot])",
    ),
    "a tied head with the embedding's delta": (
        layers, "self.head.slots[slot] = pairs.get(HEAD)",
        "ends = pairs.get(EMBEDDING)\n            "
        "self.head.slots[slot] = pairs.get(HEAD) or (ends and (ends[1].T, ends[0].T))",
    ),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_is_seen(name, tmp_path):
    """By one of the cases; the recordings, not our own other code, say so."""
    module, old, new = MUTANTS[name]
    made = edited(module, old, new)
    modules = {module.__name__.rpartition(".")[2]: made}
    found = [
        differences(case, tmp_path / str(number), **modules) for number, case in enumerate(RIGHT)
    ]
    assert max(max(each) for each in found) > 100 * TOLERANCE


# ------------------------------------------------------------------ where the pin is wrong


def base_rows(folder: Path, **modules: ModuleType) -> float:
    """With every slot taken, how far base rows are from those of the model without adapters."""
    step = FAULTS["steps"][0]
    rows, logits = Replay(FAULTS, folder, **modules).step(step)
    plain = np.array(step["hidden"]) @ np.array(FAULTS["head"]).T
    tokens = np.array([token for r in step["requests"] for token in r["tokens"]])
    of_token, of_row = adapters_of(step)
    return max(
        difference(rows[of_token == 0], np.array(FAULTS["embedding"])[tokens[of_token == 0]]),
        difference(logits[of_row == 0], plain[of_row == 0]),
    )


def adapters_of(step: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """The adapter of each token and of each row of logits."""
    adapters = [r["adapter"] for r in step["requests"]]
    return (
        np.repeat(adapters, [len(r["tokens"]) for r in step["requests"]]),
        np.repeat(adapters, [r["rows"] for r in step["requests"]]),
    )


def test_with_every_slot_taken_base_rows_are_the_bases(tmp_path):
    assert base_rows(tmp_path) < TOLERANCE


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (" if slot != BASE]", "]"),
        (
            "self.step.row_slots == slot)",
            "self.step.row_slots % len(self.slots) == slot)",
        ),
    ],
    ids=["tokens", "rows of logits"],
)
def test_a_mutant_that_gives_the_base_the_last_slots_delta_is_seen(old, new, tmp_path):
    assert base_rows(tmp_path, layers=edited(layers, old, new)) > 100 * TOLERANCE


def test_with_every_slot_taken_the_pinned_form_for_processors_adapts_base_rows(tmp_path):
    """Its embedding looks A up in the first slot and B in the last; its head uses the last."""
    step = FAULTS["steps"][0]
    rows, logits = Replay(FAULTS, tmp_path).step(step)
    of_token, of_row = adapters_of(step)
    theirs, their_logits = np.array(step["embedded"]), np.array(step["logits"])
    tokens = np.array([token for r in step["requests"] for token in r["tokens"]])
    assert difference(rows[of_token != 0], theirs[of_token != 0]) < TOLERANCE
    assert difference(logits[of_row != 0], their_logits[of_row != 0]) < TOLERANCE
    first, last = (FAULTS["adapters"][number]["tensors"] for number in (0, 2))
    name = "base_model.model.model.embed_tokens.lora_embedding_"
    a, b = np.array(first[f"{name}A"]), np.array(last[f"{name}B"])
    wrong = np.array(FAULTS["embedding"])[tokens] + a[: b.shape[1], tokens].T @ b.T
    assert difference(theirs[of_token == 0], wrong[of_token == 0]) < TOLERANCE
    name = "base_model.model.lm_head.lora_"
    a, b = np.array(last[f"{name}A.weight"]), np.array(last[f"{name}B.weight"])
    hidden = np.array(step["hidden"])
    wrong = hidden @ np.array(FAULTS["head"]).T + hidden @ a.T @ b.T
    assert difference(their_logits[of_row == 0], wrong[of_row == 0]) < TOLERANCE


def test_a_token_behind_the_vocabulary_reads_another_slot_at_the_pin_or_fails(tmp_path):
    """Input checks let one such id through; ours leaves its row at zero, as the base has it."""
    replay = Replay(FAULTS, tmp_path / "several")
    base, first, last = FAULTS["steps"][1:4]
    assert not np.any(base["embedded"][0])
    tensors = FAULTS["adapters"][1]["tensors"]  # its A stands in the next slot
    a = np.array(tensors["base_model.model.model.embed_tokens.lora_embedding_A"])[:, 0]
    tensors = FAULTS["adapters"][0]["tensors"]
    b = np.array(tensors["base_model.model.model.embed_tokens.lora_embedding_B"]) * 2
    assert difference(b @ a[: b.shape[1]], first["embedded"][0]) < TOLERANCE
    assert last["embedded"] == "IndexError"
    assert ONE_SLOT["steps"][0]["embedded"] == "IndexError", "a base request, and one slot"
    for step in (base, first, last):
        assert not replay.step(step)[0][0].any()


def test_prompt_rows_have_no_slot_of_their_own_at_the_pin(tmp_path):
    """One entry a request in the mapping, several rows: it raises here; on a GPU, by reading, rows
    behind the entries get no delta."""
    step = FAULTS["steps"][4]
    assert step["logits"] == "RuntimeError"
    _, logits = Replay(FAULTS, tmp_path).step(step)
    plain = np.array(step["hidden"]) @ np.array(FAULTS["head"]).T
    changed = np.abs(logits - plain).max(axis=1) > 0.1
    assert changed.tolist() == [True] * 3 + [False] * 3, "adapter 2 leaves the head as it is"


def test_the_pinned_kernels_leave_base_rows_alone_and_have_the_two_other_faults(tmp_path):
    """A row of a prompt behind the mapping's entries gets no delta, and no error says so."""
    replay = Replay(KERNEL_FAULTS, tmp_path)
    full, base, first, last, prompts = KERNEL_FAULTS["steps"]
    for ours, recorded in zip(replay.step(full), (full["embedded"], full["logits"]), strict=True):
        assert difference(ours, recorded) < HALF
    assert not np.any(base["embedded"][0]) and np.any(first["embedded"][0])
    assert last["embedded"] == KERNEL_ONE_SLOT["steps"][0]["embedded"] == "IndexError"
    _, logits = replay.step(prompts)
    plain = np.array(prompts["hidden"]) @ np.array(KERNEL_FAULTS["head"]).T
    assert difference(logits[0], prompts["logits"][0]) < HALF
    assert difference(plain[1:3], prompts["logits"][1:3]) < HALF
    assert difference(logits[1:3], prompts["logits"][1:3]) > 0.1


@pytest.mark.upstream
def test_the_pin_refuses_a_head_of_more_tokens():
    from conformance.features.lora import lora_embeddings

    case = lora_embeddings.made("llama", 0) | {"vocab_size": 258_049, "hidden_size": 2}
    case |= {name: np.zeros((258_049, 2), np.float32).tolist() for name in ("embedding", "head")}
    with (
        lora_embeddings.on_a_processor(),
        pytest.raises(ValueError, match="vocab size must be <= 258048"),
    ):
        lora_embeddings.manager_of(case)
