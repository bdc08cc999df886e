"""What lab 14-06 pins: rules that fill every row, a layer with a twist, real vLLM's texts."""

from __future__ import annotations

import functools
import gzip
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest

from labkit import environment, same
from labkit.modules import sibling
from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.models.mapping import check_rules, load_parameters, places_of

checkpoint = sibling(__file__, "checkpoint")
ROOT = Path(__file__).resolve().parents[3]
FILE = Path(__file__).parent / "recordings" / "texts.jsonl.gz"
C = checkpoint.CONFIG
Q, KV = C["num_attention_heads"] * C["head_dim"], C["num_key_value_heads"] * C["head_dim"]
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, temperature=0, logprobs=5)


@functools.cache
def recorded():
    """Prompts, and what the real engine said of them with the architecture as a plugin."""
    with gzip.open(FILE, "rt") as file:
        return json.loads(file.read())


def loaded(lab, held=None):
    """The parameters, by the learner's rules, of the checkpoint or of other tensors."""
    held = checkpoint.tensors() if held is None else held
    config = lab.parse(C, Path("config.json"))
    shapes = {name: array.shape for name, array in held.items()}
    rules = check_rules(lab.rules(config))
    return load_parameters(shapes, held.__getitem__, lab.parameters(config), rules, "file")


def model(lab):
    """The model in float64, where the shape of a batch changes no token."""
    return lab.ParallelLlama(lab.parse(C, Path("config.json")), loaded(lab), "float64")


# --- what config.json says ------------------------------------------------------------------------


def test_the_config_is_read(lab):
    """A field under another name, or a number that is not taken as it stands."""
    config = lab.parse(C, Path("config.json"))
    for name in lab.Config.__dataclass_fields__:
        same(getattr(config, name), C[name], f"{name}, as config.json has it")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 0), ("num_hidden_layers", "3"), ("vocab_size", None), ("head_dim", 33),
        ("num_key_value_heads", 3), ("rms_norm_eps", float("nan")), ("residual_multiplier", None),
        ("parallel_block", False), ("tie_word_embeddings", False), ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 4.0}), ("attention_bias", True),
        ("mlp_bias", True), ("sliding_window", 128), ("quantization_config", {"bits": 4}),
    ],
)  # fmt: skip
def test_what_would_be_another_model_is_refused(lab, field, value):
    """A field that is read past: the model loads, and talks nonsense (A1)."""
    try:
        got = lab.parse(C | {field: value}, Path("folder/config.json"))
    except ValueError as refusal:
        said = str(refusal)
    else:
        said = f"no ValueError, but {got}"
    assert field in said and "folder/config.json" in said, (
        f"config.json with {field}={value!r}\n"
        f"expected a ValueError that names the file and {field}\ncame     {said}"
    )


# --- names and rows -------------------------------------------------------------------------------


def test_names_and_rows(lab):
    """A norm that takes another's name; keys and values in the rows of queries."""
    rules = lab.rules(lab.parse(C, Path("config.json")))
    for tensor, parameter, rows in (
        ("tok_embeddings", "model.embed_tokens", None), ("norm", "model.norm", None),
        ("layers.2.norm", "model.layers.2.input_layernorm", None),
        ("layers.1.attention.wq", "model.layers.1.self_attn.qkv_proj", (0, Q)),
        ("layers.1.attention.wkv", "model.layers.1.self_attn.qkv_proj", (Q, Q + 2 * KV)),
        ("layers.0.attention.wo", "model.layers.0.self_attn.o_proj", None),
        ("layers.0.feed_forward.w1", "model.layers.0.mlp.gate_up_proj", (0, 96)),
        ("layers.0.feed_forward.w3", "model.layers.0.mlp.gate_up_proj", (96, 192)),
        ("layers.0.feed_forward.w2", "model.layers.0.mlp.down_proj", None),
    ):  # fmt: skip
        [place] = places_of(f"transformer.{tensor}.weight", rules)
        got = place.parameter, place.rows and (place.rows.start, place.rows.stop)
        same(got, (f"{parameter}.weight", rows), f"where transformer.{tensor}.weight goes")


def test_every_row_is_filled_with_its_own(lab):
    """Gate and up exchanged, a head of its own, a parameter of another shape (A2)."""
    got, held = loaded(lab), checkpoint.tensors()
    for layer in range(C["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"transformer.layers.{layer}"
        for name, parts in (
            ("self_attn.qkv_proj", ("attention.wq", "attention.wkv")),
            ("mlp.gate_up_proj", ("feed_forward.w1", "feed_forward.w3")),
            ("mlp.down_proj", ("feed_forward.w2",)), ("self_attn.o_proj", ("attention.wo",)),
            ("input_layernorm", ("norm",)),
        ):  # fmt: skip
            want = np.concatenate([held[f"{theirs}.{part}.weight"] for part in parts])
            have = got[f"{ours}.{name}.weight"]
            same(have.shape, want.shape, f"the shape of {ours}.{name}.weight")
            assert np.array_equal(have, want), f"{ours}.{name}.weight: expected {parts}, in order"
    table = got["model.embed_tokens.weight"]
    assert np.array_equal(got["lm_head.weight"], table), "the head is the embedding: they are tied"


@pytest.mark.parametrize(
    ("tensor", "shape"),
    [
        ("layers.1.attention.wkv", None), ("layers.1.attention.wkv", (KV, 64)),
        ("layers.0.attention.wq", (Q + 2 * KV, 64)), ("layers.2.feed_forward.w3", (64, 96)),
        ("layers.2.norm", (1, 64)), ("norm", None), ("tok_embeddings", (256, 64)),
    ],
)  # fmt: skip
def test_a_damaged_checkpoint_is_refused_by_name(lab, tensor, shape, tmp_path):
    """A missing or a cut tensor that loads: the real loader lets some of these in (lab 14-02)."""
    name = f"transformer.{tensor}.weight"
    held = checkpoint.tensors()
    del held[name]
    if shape is not None:
        held[name] = np.zeros(shape, np.float32)
    lab.register()
    folder = checkpoint.write(tmp_path / "damaged", held)
    try:
        LLM(folder)
    except ValueError as refusal:
        said = str(refusal)
    else:
        said = "no ValueError"
    words = [name] if shape is None else [name, str(shape)]
    assert all(word in said for word in words), (
        f"a folder whose {name} is {'missing' if shape is None else f'of shape {shape}'}\n"
        f"expected a ValueError that names {' and '.join(words)}\ncame     {said}"
    )


# --- what the layers compute ----------------------------------------------------------------------


def plainly(prompt):
    """Logits [num_tokens, vocab_size] of a prompt without a cache, from the tensors on disk."""
    held = {name: array.astype(np.float64) for name, array in checkpoint.tensors().items()}
    length, heads, dim = len(prompt), C["num_attention_heads"], C["head_dim"]
    angles = np.arange(length)[:, None] * C["rope_theta"] ** (-np.arange(0, dim, 2) / dim)

    def norm(x, name):
        weight = held[f"transformer.{name}.weight"]
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + C["rms_norm_eps"]) * weight

    def turned(x):  # [length, heads, dim]
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        left, right = np.split(x, 2, axis=-1)
        return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

    x = held["transformer.tok_embeddings.weight"][prompt]
    for layer in range(C["num_hidden_layers"]):
        at = f"transformer.layers.{layer}"
        n = norm(x, f"layers.{layer}.norm")
        w = {k: held[f"{at}.{k}.weight"] for k in ("attention.wq", "attention.wkv", "attention.wo",
             "feed_forward.w1", "feed_forward.w2", "feed_forward.w3")}  # fmt: skip
        key, value = np.split((n @ w["attention.wkv"].T).reshape(length, -1, dim), 2, axis=1)
        query = turned((n @ w["attention.wq"].T).reshape(length, heads, dim))
        group = heads // C["num_key_value_heads"]
        key, value = np.repeat(turned(key), group, axis=1), np.repeat(value, group, axis=1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(dim)
        scores += np.triu(np.full((length, length), -np.inf), 1)
        odds = np.exp(scores - scores.max(-1, keepdims=True))
        odds /= odds.sum(-1, keepdims=True)
        mixed = np.einsum("hqk,khd->qhd", odds, value).reshape(length, -1) @ w["attention.wo"].T
        gate = n @ w["feed_forward.w1"].T
        inner = (gate / (1 + np.exp(-gate)) * (n @ w["feed_forward.w3"].T)) @ w["feed_forward.w2"].T
        x = x + C["residual_multiplier"] * (mixed + inner)
    return norm(x, "norm") @ held["transformer.tok_embeddings.weight"].T


def test_the_logits_are_those_of_the_formula(lab):
    """MLP behind attention, a scale that is left out, a rotation of queries alone."""
    prompt = recorded()["prompts"][2][:40]
    got = []

    class Keeps:
        def __init__(self, inner):
            self.inner, self.kv_specs, self.dtype = inner, inner.kv_specs, inner.dtype

        def forward(self, batch):
            got.append(self.inner.forward(batch))
            return got[-1]

    LLM(Keeps(model(lab)), num_blocks=20, dtype="float64").generate(
        [prompt], SamplingParams(max_tokens=1)
    )
    want = plainly(prompt)[-1:]
    same(got[0].shape, want.shape, "one row of logits, of the prompt's last token")
    gap = float(np.abs(got[0] - want).max())
    assert gap < 1e-9, (
        "logits of a prompt's last token, float64, beside the formula without a cache\n"
        f"expected a difference below 1e-9\ncame     {gap:.3g}"
    )


def test_the_texts_are_the_real_engines(lab, tmp_path):
    """A layer that is right for one prompt alone; positions counted per step."""
    lab.register()
    folder = checkpoint.write(tmp_path / "parallel-llama")
    llm = LLM(folder, num_blocks=200, max_num_seqs=4, max_num_batched_tokens=64, block_size=16)
    for number, result in enumerate(llm.generate(recorded()["prompts"][:6], GREEDY)):
        said, want = list(result.outputs[0].token_ids), recorded()["outputs"][number][:12]
        same(
            said,
            want,
            f"prompt {number}, greedy: tokens of real vLLM {recorded()['machine']['vllm']}",
        )
        first = result.outputs[0].logprobs[0]
        gap = max(abs(first[int(t)].logprob - p) for t, p in recorded()["first"][number].items())
        assert gap < 1e-4, (
            f"prompt {number}: log probabilities of the first token, float32\n"
            f"expected the real engine's to 1e-4\ncame     a difference of {gap:.2g}"
        )


def test_chunks_hits_and_company_change_no_token(lab):
    """K and V at the wrong slots, or of the chunk alone (A3)."""
    prompts = [list(range(60)), [*range(40), 7, 9], [5] * 33, list(range(60))]
    alone = LLMEngine(model(lab), num_blocks=99, enable_prefix_caching=False)
    want = [list(alone.generate([p], GREEDY)[0].outputs[0].token_ids) for p in prompts]
    tight = LLMEngine(model(lab), num_blocks=20, block_size=8, max_num_batched_tokens=13)
    for turn in ("first", "second, with hits"):
        got = [list(r.outputs[0].token_ids) for r in tight.generate(prompts, GREEDY)]
        same(got, want, f"chunks of 13, a pool of 19 blocks of 8, {turn} time: as each alone")


@pytest.mark.engine
def test_the_real_engine_serves_it(lab, tmp_path):
    """The plugin, now, with this file's `parse` and `rules`: the texts that are recorded."""
    found = environment.look(environment.folder(ROOT))
    assert found is not None, "course engine install"
    command = [str(found.python), "-m", "conformance.features.hybrid.plugin",
               str(tmp_path / "texts.jsonl.gz"), lab.__file__]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, env=environment.variables(found, ROOT), timeout=600, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, "\n".join(done.stdout.splitlines()[-30:])
    with gzip.open(tmp_path / "texts.jsonl.gz", "rt") as file:
        told = json.loads(file.read())
    same(told["architecture"], lab.NAME, "the architecture that the registry resolved")
    same(told["outputs"], recorded()["outputs"], "texts of the plugin in the real engine")
