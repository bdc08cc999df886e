"""The experiments compute what their pages say, and the committed numbers are what they give."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from course.files import load_module
from course.learning import starters
from course.learning.labs import Lab

HERE = Path(__file__).resolve().parent


def load(name: str) -> ModuleType:
    return load_module(HERE / f"{name}.py")


evaluate = load("evaluate")
awq, gptq, heldout, schemes = (
    evaluate.awq, evaluate.gptq, evaluate.heldout, evaluate.schemes,
)  # fmt: skip
NO_INPUTS = schemes.Inputs(np.ones((4, 256), np.float32), False)
PROBE = (
    b"Return the number of blocks that a request of this length needs.\n\n"
    b"Args:\n    num_tokens: tokens of the prompt and of the output so far.\n"
)


@functools.cache
def saved(name: str) -> dict:
    return json.loads((HERE / "measured" / f"{name}.json").read_text(encoding="utf-8"))


@functools.cache
def held_out_files() -> dict[str, bytes]:
    return heldout.library(True)


def random_weight(shape=(32, 256), seed=0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# ------------------------------------------------------------------ E4M3


def test_the_bytes_of_e4m3_are_its_numbers():
    table = schemes.E4M3
    assert table[0x7E] == 448 and table[0x08] == 2.0**-6 and table[0x01] == 2.0**-9
    assert np.isnan(table[0x7F]) and table[0xB8] == -1.0
    finite = table[:127]
    assert (np.diff(finite) > 0).all()
    assert np.array_equal(schemes.e4m3_bytes(finite), np.arange(127))
    assert np.array_equal(schemes.to_e4m3(finite), finite)


def test_rounding_to_e4m3_takes_the_nearest_and_the_even_one_of_two():
    finite = schemes.E4M3[:127].astype(float)
    x = np.random.default_rng(0).uniform(-460, 460, 4000).astype(np.float32)
    x = np.concatenate([x, x / 1000, x / 30000])
    distance = np.abs(finite - np.abs(x)[:, None])
    assert np.allclose(np.abs(schemes.to_e4m3(x)), finite[distance.argmin(axis=1)])
    middles = ((finite[1:] + finite[:-1]) / 2).astype(np.float32)
    assert (schemes.e4m3_bytes(middles) % 2 == 0).all()
    assert schemes.to_e4m3(np.array([1e9, -1e9])).tolist() == [448.0, -448.0]


@pytest.mark.torch
def test_rounding_to_e4m3_is_torchs():
    import torch

    x = np.random.default_rng(0).uniform(-447, 447, 10_000).astype(np.float32)
    x = np.concatenate([x, x / 100, x / 10_000, x / 100_000])
    theirs = torch.from_numpy(x).to(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(schemes.to_e4m3(x), theirs)


# ------------------------------------------------------------------ schemes


@pytest.mark.parametrize("name", evaluate.SCHEMES)
def test_a_layer_of_codes_computes_what_its_decoded_matrix_computes(name):
    weight, x = random_weight(), random_weight((5, 256), 1)
    stored = evaluate.SCHEMES[name](weight, schemes.Inputs(random_weight((64, 256), 2), True))
    decoded, cached = schemes.Layer(stored), schemes.Layer(stored, cached=True)
    assert np.array_equal(decoded(x), cached(x))
    assert decoded(x).dtype == np.float32
    error = np.linalg.norm(decoded(x) - x @ weight.T) / np.linalg.norm(x @ weight.T)
    assert error == 0 if name == evaluate.BASE else 0.001 < error < 0.2


@pytest.mark.parametrize(
    ("name", "bits", "scale_bytes"),
    [
        ("int8 per tensor", 8, 4),
        ("int8 per channel", 8, 32 * 4),
        ("int4 g128", 4, 32 * 2 * 2),
        ("int4 g16", 4, 32 * 16 * 2),
        ("int4 g128, zero-points", 4, 32 * 2 * 2 + 32),
        ("FP8 per tensor", 8, 4),
        ("W8A8 static", 8, 8),
    ],
)
def test_bytes_are_those_of_codes_and_scales(name, bits, scale_bytes):
    stored = evaluate.SCHEMES[name](random_weight(), NO_INPUTS)
    assert stored.scale_bytes == scale_bytes
    assert stored.weight_bytes == 32 * 256 * bits // 8 + scale_bytes


def test_smoothing_changes_nothing_but_the_rounding():
    inputs = schemes.Inputs(random_weight((64, 256), 2), True)

    def exact(weight, known):
        return schemes.Stored(lambda: weight, 0, 0, lambda x: x)

    weight, x = random_weight(), random_weight((5, 256), 1).astype(np.float64)
    layer = schemes.Layer(schemes.smoothed(exact)(weight, inputs))
    assert np.allclose(layer(x), x @ weight.T, atol=1e-4)
    loud = inputs.sample.copy()
    loud[:, 7] *= 100
    plain, smooth = (
        scheme(weight, schemes.Inputs(loud, True))
        for scheme in (schemes.w8a8_static, schemes.smoothed(schemes.w8a8_static))
    )
    off = [
        np.linalg.norm(schemes.Layer(stored)(loud) - loud @ weight.T) for stored in (plain, smooth)
    ]
    assert off[1] < off[0] / 2


# ------------------------------------------------------------------ GPTQ and AWQ


def test_gptq_is_rounding_to_nearest_when_inputs_are_uncorrelated():
    weight = random_weight()
    q, scales = gptq.gptq(weight, np.eye(256), 64)
    plain, plain_scales = schemes.INT4.quantize_grouped(weight, 64)
    assert np.array_equal(q, plain) and np.array_equal(scales, plain_scales)


def test_gptq_moves_weights_further_and_outputs_less():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((512, 8)) @ rng.standard_normal((8, 64))
    x += 0.1 * rng.standard_normal(x.shape)
    weight = random_weight((32, 64))
    q, scales = gptq.gptq(weight, gptq.hessian(x), 32)
    ours = schemes.int4_stored(q, scales, 32).decode()
    nearest = schemes.int4_groups(32)(weight, NO_INPUTS).decode()
    assert gptq.rel(ours, weight) > gptq.rel(nearest, weight)
    output = [gptq.rel(x @ back.T, x @ weight.T) for back in (ours, nearest)]
    assert output[0] < output[1] / 2


def test_gptq_survives_dead_and_doubled_inputs():
    x = random_weight((64, 32), 3)
    x[:, 5] = 0
    x[:, 9] = x[:, 8]
    weight = random_weight((8, 32))
    weight[:, 16:] = 0
    q, scales = gptq.gptq(weight, gptq.hessian(x), 16)
    assert np.abs(q).max() <= 7 and np.isfinite(scales).all()


def test_awqs_exponent_zero_is_rounding_to_nearest():
    weight, x = random_weight(), np.abs(random_weight((64, 256), 2))
    assert np.array_equal(awq.factors(x, 0.0), np.ones(256, np.float32))
    nearest = schemes.int4_groups(128)(weight, NO_INPUTS).decode()
    found = awq.errors(weight, x, x, 128)
    assert found[0] == pytest.approx(gptq.rel(x @ nearest.T, x @ weight.T), abs=2e-6)


# ------------------------------------------------------------------ text and statistics


def test_the_held_out_rule_is_that_of_training():
    """Names that the model card's split keeps apart, and names it trains on."""
    assert heldout.is_held_out("stdlib/textwrap.py")
    assert not heldout.is_held_out("stdlib/argparse.py")
    names = set(held_out_files())
    assert "stdlib/textwrap.py" in names and len(names) >= 10
    assert not names & set(heldout.library(False, 60))


def test_bits_are_those_of_the_probabilities():
    model = heldout.model("float64")
    tokens = np.array([heldout.EOS, *PROBE[:40]])
    scores = heldout.logits(model, tokens[:-1])
    p = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    expected = -np.log2(p[np.arange(40), tokens[1:]]).sum()
    assert heldout.bits_of(model, PROBE[:40]) == pytest.approx(expected)


def test_windows_score_every_byte_once(monkeypatch):
    monkeypatch.setattr(heldout, "CONTEXT", 16)
    scored = []

    def uniform(_, tokens):
        scored.append(len(tokens))
        return np.zeros((len(tokens), 257))

    monkeypatch.setattr(heldout, "logits", uniform)
    for length in (1, 15, 16, 17, 24, 25, 100):
        bits = heldout.bits_of(None, b"x" * length)
        assert bits == pytest.approx(length * np.log2(257)), length
    assert max(scored) == 16


def test_the_interval_sees_what_pairing_sees():
    rng = np.random.default_rng(0)
    sizes = {str(n): 1000 for n in range(30)}
    base = {name: float(rng.uniform(500, 3000)) for name in sizes}  # files differ widely
    shifted = {name: bits + 10 + rng.normal(0, 2) for name, bits in base.items()}
    mean, low, high = evaluate.interval(shifted, base, sizes)
    assert low < mean < high and mean == pytest.approx(0.010, abs=0.001)
    assert high - low < 0.003, "the spread of the files must cancel"
    assert evaluate.interval(base, base, sizes) == (0.0, 0.0, 0.0)


def test_planted_outliers_change_no_output():
    tokens = np.array(list(PROBE))
    plain, planted = heldout.model("float64"), heldout.plant(heldout.model("float64"))
    worst = np.abs(heldout.logits(plain, tokens) - heldout.logits(planted, tokens)).max()
    assert worst < 1e-9
    loud = heldout.capture(planted, [PROBE])["layers.2.gate_up_proj"]
    size = np.abs(loud).max(axis=0)
    assert set(np.argsort(size)[-2:].tolist()) == set(heldout.OUTLIERS)


# ------------------------------------------------------------------ the committed results


def test_committed_bytes_are_those_of_the_schemes():
    rows = saved("evaluation")["rows"]
    assert list(rows) == list(evaluate.SCHEMES)
    assert list(saved("evaluation")["planted"]) == [n for n in rows if n in evaluate.PLANTED]
    model = heldout.model()
    inputs = evaluate.inputs_of(model, [PROBE])
    for name in ("16 bits, as shipped", "int8 per channel", "int4 g128", "int4 g128, zero-points"):
        stored = evaluate.quantize(model, evaluate.SCHEMES[name], inputs).values()
        assert rows[name]["weight_bytes"] == sum(layer.weight_bytes for layer in stored)
        assert rows[name]["scale_bytes"] == sum(layer.scale_bytes for layer in stored)
    assert evaluate.other_bytes() == saved("evaluation")["other_bytes"]


@pytest.mark.parametrize("name", ["16 bits, as shipped", "int8 per channel", "int4 g128"])
def test_a_committed_file_reads_again_with_the_same_bits(name):
    """One short file that older and newer Pythons share word for word."""
    file = "stdlib/encodings/cp852.py"
    sizes = saved("evaluation")["text"]["sizes"]
    text = held_out_files().get(file, b"")
    if len(text) != sizes[file]:
        pytest.skip(f"this Python's {file} differs from the one measured")
    model = heldout.model()
    stored = evaluate.quantize(model, evaluate.SCHEMES[name], evaluate.inputs_of(model, [PROBE]))
    evaluate.install(model, lambda layer: schemes.Layer(stored[layer], cached=True))
    committed = saved("evaluation")["rows"][name]["bits"][file]
    assert heldout.bits_of(model, text) == pytest.approx(committed, rel=1e-4)


def test_the_findings_of_the_pages_hold_in_the_committed_numbers():
    data = saved("evaluation")
    sizes = data["text"]["sizes"]

    def change(name: str, part: str = "rows") -> float:
        rows = data[part]
        return 1000 * evaluate.interval(rows[name]["bits"], rows[evaluate.BASE]["bits"], sizes)[0]

    assert abs(change("int8 per channel")) < 1 < change("FP8 per tensor") < 4
    groups = [change(f"int4 {name}") for name in ("g16", "g32", "g64", "g128", "per channel")]
    assert groups == sorted(groups)
    gptq_bits, plain_bits = (data["rows"][f"int4 {n}"]["bits"] for n in ("g128, GPTQ", "g32"))
    assert evaluate.interval(gptq_bits, plain_bits, sizes)[2] < 0, "better than g = 32, for sure"
    assert change("W8A8 static", "planted") > 1000 > 20 > change("W8A8 static, smoothed", "planted")
    assert change("W8A8 per token", "planted") > 20 * change("W8A8 per token, smoothed", "planted")
    for row in saved("gptq")["layers"].values():
        assert row["gptq_weight"] > row["weight"] and row["gptq_output"] < row["output"]


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("nowhere.py", "there is no file nowhere.py"),
        ("{lab}/test_lab.py", "defines no Linear"),
        ("{lab}/solution.py:Quantizer", "defines no Quantizer"),
        ("{lab}/as-shipped.py", "Linear is not written yet"),
    ],
)
def test_a_file_without_a_layer_is_refused_before_anything_is_measured(
    argument, words, tmp_path, capsys
):
    lab = HERE.parent / "labs" / "lab-03-int4-groups-and-packing"
    for name in ("test_lab.py", "solution.py"):
        (tmp_path / name).write_text((lab / name).read_text(encoding="utf-8"), encoding="utf-8")
    shipped = starters.required(Lab(lab, "06-03"))
    (tmp_path / "as-shipped.py").write_text(shipped, encoding="utf-8")
    argument = argument.format(lab=tmp_path)
    with pytest.raises(SystemExit):
        evaluate.main(["--out", str(tmp_path / "out"), "--mine", argument])
    assert words in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "out").exists()


def test_whatever_is_asked_for_is_compared_with_the_model_as_shipped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(heldout, "library", lambda held_out, limit=None: {"probe": PROBE})
    monkeypatch.setattr(evaluate, "tokens_per_second", lambda model: 1.0)
    evaluate.main(["--out", str(tmp_path), "--only", "int4 g128"])
    said = capsys.readouterr().out
    kept = json.loads((tmp_path / "evaluation.json").read_text(encoding="utf-8"))
    assert list(kept["rows"]) == [evaluate.BASE, "int4 g128"]
    assert evaluate.table(kept) in said


def test_a_class_of_ones_own_gets_a_row():
    lab = HERE.parent / "labs" / "lab-03-int4-groups-and-packing" / "solution.py"
    name, layer = evaluate.layer_class(str(lab))
    assert name == "yours, lab-03"
    texts = {"probe": PROBE}
    inputs = evaluate.inputs_of(heldout.model(), [PROBE])
    rows = [
        evaluate.measure_row(heldout.model, scheme, inputs, inputs, texts, speed=False)
        for scheme in (evaluate.scheme_of(layer), evaluate.SCHEMES["int4 g128"])
    ]
    assert rows[0] == rows[1]
    assert rows[0]["weight_bytes"] == 1_622_016
