"""The experiments count and compute what their page says, and their files are what they give."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from course.files import load_module

HERE = Path(__file__).resolve().parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


traffic = load("measure_traffic")
precision = load("measure_precision")
mla = load("measure_mla")


def saved(name: str) -> dict:
    return json.loads((HERE / "measured" / name).read_text(encoding="utf-8"))


# ------------------------------------------------------------------ traffic


def test_a_decode_row_streams_every_block_once():
    Q, k_cache, v_cache, table = traffic.sequence(200, 16)
    lab = traffic.lab_03()
    lab.paged_causal_prefill_attention(Q[-1:], k_cache, v_cache, table, 199)
    assert k_cache.reads.tolist() == v_cache.reads.tolist() == [1] * 13
    assert k_cache.rows == v_cache.rows == 200, "rows beyond the sequence are not read"


def test_a_counting_cache_gives_out_one_block_at_a_time():
    cache = traffic.CountingCache(np.zeros((4, 2, 3)))
    assert cache[1, 0:1].shape == (1, 3)
    assert cache.reads.tolist() == [0, 1, 0, 0]
    for key in ([0, 1], slice(None), 2, (slice(0, 2), slice(None))):
        with pytest.raises((TypeError, ValueError)):
            cache[key]
    assert cache.reads.sum() == 1


@pytest.mark.parametrize(("tile", "chunk"), [(1, 13), (4, 13), (16, 13), (4, 5), (3, 1)])
def test_counted_reads_are_the_predicted_ones(tile, chunk):
    counted = traffic.count(13, 4, tile, chunk)["block_reads"]
    assert counted == traffic.predicted(13, 4, tile, chunk)
    if chunk == 13:
        assert counted == {1: 28, 4: 10, 16: 4}[tile]


def test_the_saved_traffic_is_what_arithmetic_says():
    found = saved("traffic.json")
    n, size = found["num_tokens"], found["block_size"]
    for row in found["tiles"]:
        assert row["block_reads"] == traffic.predicted(n, size, row["tile"], n)
    for row in found["chunks"]:
        assert row["block_reads"] == traffic.predicted(n, size, row["tile"], row["chunk"])
    assert found["heads"] == traffic.heads(n, size, 4, 16)
    by_tile = {row["tile"]: row["block_reads"] for row in found["tiles"]}
    assert [by_tile[tile] for tile in (1, 16, 64, 128)] == [132_096, 8_256, 2_112, 1_088]


def test_the_traffic_script_writes_what_its_table_reads(tmp_path, capsys):
    traffic.main(["--tokens", "40", "--block-size", "8", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "traffic.json").read_text())
    assert capsys.readouterr().out == traffic.table(found) + "\n"


# ------------------------------------------------------------------ precision


def test_bf16_rounds_to_nearest_with_ties_to_even():
    cases = {
        1.0: 1.0,
        1 + 2**-8: 1.0,  # a tie, down to even
        1 + 3 * 2**-8: 1 + 2**-6,  # a tie, up to even
        1 + 2**-8 + 2**-20: 1 + 2**-7,
        -3.14159: -3.140625,
        float("-inf"): float("-inf"),
    }
    got = precision.to_bf16(np.array(list(cases), dtype=np.float32))
    assert got.tolist() == list(cases.values())


@pytest.mark.torch
def test_bf16_agrees_with_torch():
    import torch

    values = np.random.default_rng(0).standard_normal(20_000).astype(np.float32)
    values *= 10.0 ** np.random.default_rng(1).integers(-20, 20, 20_000).astype(np.float32)
    expected = torch.from_numpy(values).bfloat16().float().numpy()
    assert np.array_equal(precision.to_bf16(values), expected)


def test_float64_sums_would_leave_no_error():
    q, k, v = precision.inputs(500, 0)
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    scores = q @ k.T / 8
    expected = np.stack([np.exp(s) @ v / np.exp(s).sum() for s in scores])
    assert np.abs(precision.exact(q, k, v) - expected).max() < 1e-13


def test_narrow_sums_get_worse_with_context_and_better_with_splits():
    short, long, split = precision.errors([(128, 1), (4096, 1), (4096, 16)], 1)
    for name in ("fp16", "bf16"):
        assert long[name] > 2 * short[name]
        assert split[name] < long[name] / 2
    assert long["bf16"] > 4 * long["fp16"] > 1000 * long["fp32"]
    assert long["fp32"] < 1e-5


def test_splits_change_bits_and_nothing_else():
    rows = precision.changed_bits(2048, [1, 2, 16], 2)
    assert rows[0] == {"splits": 1, "fp16": 0.0, "bf16": 0.0, "fp32": 0.0}
    for row in rows[1:]:
        assert row["fp32"] > 0.5 > 0.02 > row["fp16"]


def test_the_saved_precision_is_what_the_script_gives_today():
    found = saved("precision.json")
    cells = [(128, 1), (2048, 1)]
    for again in precision.errors(cells, 3):
        (row,) = (r for r in found["by_context"] if r["context"] == again["context"])
        for name in precision.ROUNDINGS:
            assert again[name] == pytest.approx(row[name], rel=0.2), (again["context"], name)


def test_the_model_says_the_same_with_splits_as_the_engine():
    from mini_vllm import LLMEngine, SamplingParams

    engine = LLMEngine(dtype="float64")
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    results = engine.generate(list(precision.PROMPTS), params)
    expected = [result.outputs[0].token_ids for result in results]
    for splits in (1, 5):
        outputs, logits = precision.model_run(splits, 6, "float64")
        assert outputs == expected
        assert [rows.argmax(axis=1).tolist() for rows in logits] == expected


def test_the_precision_script_writes_what_its_table_reads(tmp_path, capsys):
    arguments = ["--contexts", "64", "--splits", "1", "2", "--splits-context", "128"]
    arguments += [
        "--bits-context",
        "64",
        "--bits-seeds",
        "1",
        "--seeds",
        "1",
        "--tokens",
        "2",
        "--out",
        str(tmp_path),
    ]
    precision.main(arguments)
    found = json.loads((tmp_path / "precision.json").read_text())
    assert capsys.readouterr().out == precision.table(found) + "\n"


# ------------------------------------------------------------------ merging


def groupings(parts, merge):
    a, b, c = parts
    return merge(merge(a, b), c), merge(a, merge(b, c))


def make_parts(lse, outputs, dtype):
    return [(np.array(o, dtype=dtype), dtype(value)) for value, o in zip(lse, outputs, strict=True)]


@pytest.mark.parametrize(("dtype", "name"), [(np.float32, "fp32"), (np.float64, "fp64")])
def test_regrouping_stays_within_the_bound(dtype, name):
    hypothesis = pytest.importorskip("hypothesis")
    st = hypothesis.strategies
    unit = precision.EPSILON.get(name, 2.0**-53)
    numbers = st.floats(-10, 10, width=32)

    @hypothesis.settings(max_examples=300, deadline=None, derandomize=True, database=None)
    @hypothesis.given(
        st.lists(st.floats(-1000, 1000, width=32), min_size=3, max_size=3),
        st.lists(st.lists(numbers, min_size=2, max_size=2), min_size=3, max_size=3),
        st.floats(0.0625, 1, width=32),
    )
    def holds(lse, outputs, near):
        lse = [lse[0] + near * (value - lse[0]) / 50 for value in lse]  # close enough to matter
        parts = make_parts(lse, outputs, dtype)
        left, right = groupings(parts, precision.merge_lse)
        out_bound, lse_bound = precision.merge_bound(lse, np.array(outputs), unit)
        assert np.abs(left[0] - right[0]).max() <= out_bound
        assert abs(left[1] - right[1]) <= lse_bound
        swapped = precision.merge_lse(parts[1], parts[0])
        assert np.array_equal(precision.merge_lse(*parts[:2])[0], swapped[0]), (
            "commutes, to the bit"
        )

    holds()


def test_the_bound_is_not_idle():
    rng = np.random.default_rng(0)
    broken = {"average": 0, "larger lse": 0}

    def average(a, b):
        return (a[0] + b[0]) / 2, max(a[1], b[1])

    def forgets(a, b):
        out, _ = precision.merge_lse(a, b)
        return out, max(a[1], b[1])

    for _ in range(50):
        lse, outputs = rng.uniform(-3, 3, 3), rng.standard_normal((3, 2))
        bound, _ = precision.merge_bound(lse.tolist(), outputs, precision.EPSILON["fp32"])
        for name, merge in (("average", average), ("larger lse", forgets)):
            left, right = groupings(make_parts(lse, outputs, np.float64), merge)
            broken[name] += np.abs(left[0] - right[0]).max() > bound
    assert broken == {"average": 50, "larger lse": 50}


# ------------------------------------------------------------------ MLA


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 30), (7, 30), (30, 30)])
def test_both_forms_of_mla_agree(queries, keys):
    arguments = mla.case(mla.SMALL, queries, keys, queries)
    mha, mqa = mla.forward_mha(*arguments), mla.forward_mqa(*arguments)
    assert mha.shape == mqa.shape == (queries, mla.SMALL.heads, mla.SMALL.v)
    assert np.abs(mha - mqa).max() < 1e-12


def test_the_expanded_form_is_attention_head_by_head():
    q_nope, q_pe, kv_c, k_pe, weights = mla.case(mla.SMALL, 3, 9, 5)
    got = mla.forward_mha(q_nope, q_pe, kv_c, k_pe, weights)
    for head in range(mla.SMALL.heads):
        k = np.concatenate([kv_c @ weights.uk[:, head], k_pe], axis=1)
        v = kv_c @ weights.uv[:, head]
        for row in range(3):
            seen = 9 - 3 + row + 1
            q = np.concatenate([q_nope[row, head], q_pe[row, head]])
            p = np.exp(k[:seen] @ q / np.sqrt(20))
            assert np.allclose(got[row, head], p @ v[:seen] / p.sum(), atol=1e-12)


def test_a_scale_of_the_latent_would_be_wrong():
    arguments = mla.case(mla.SMALL, 2, 20, 1)
    q_nope, q_pe, *others = arguments
    wrong = (mla.SMALL.cached / (mla.SMALL.nope + mla.SMALL.rope)) ** -0.5
    scaled = mla.forward_mqa(q_nope * wrong, q_pe * wrong, *others)
    assert np.abs(scaled - mla.forward_mha(*arguments)).max() > 1e-3


def test_bytes_and_flop_by_hand():
    shape = mla.DEEPSEEK_V3
    assert (shape.cached, shape.expanded) == (576, 40_960)
    assert shape.cached * mla.LAYERS * 2 == 70_272
    assert round(shape.expanded * mla.LAYERS * 2 / 2**20, 2) == 4.77
    one_key_more = mla.flops_mqa(shape, 1, 2) - mla.flops_mqa(shape, 1, 1)
    assert one_key_more == 128 * 2 * (576 + 512)
    for keys in (1024, 131_072):
        turn = mla.crossover(shape, keys)
        assert mla.flops_mha(shape, turn, keys) < mla.flops_mqa(shape, turn, keys)
        assert mla.flops_mha(shape, turn - 1, keys) >= mla.flops_mqa(shape, turn - 1, keys)


def test_the_saved_mla_counts_are_what_the_script_gives_today():
    found = saved("mla.json")
    small = mla.agreement({"small": mla.SMALL})
    assert found.pop("agreement")[: len(small)] == small
    assert all(row["agree"] for row in small)
    assert found == json.loads(json.dumps(mla.counts()))


def test_the_mla_script_writes_what_its_table_reads(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(mla, "DEEPSEEK_V3", mla.SMALL)
    mla.main(["--out", str(tmp_path)])
    found = json.loads((tmp_path / "mla.json").read_text())
    assert capsys.readouterr().out == mla.table(found) + "\n"
