"""The studies compute what their page says, and their files are what they give today."""

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


trap, codes, drift = load("metric_trap"), load("code_points"), load("drift")
tools = trap.common


def saved(name: str) -> dict:
    return json.loads((HERE / "measured" / name).read_text(encoding="utf-8"))


def close(got, expected):
    """Whether two results are equal but for the last digits of their floats."""
    if isinstance(expected, dict):
        return got.keys() == expected.keys() and all(close(got[k], expected[k]) for k in expected)
    if isinstance(expected, list):
        return len(got) == len(expected) and all(map(close, got, expected))
    if isinstance(expected, float):
        return got == pytest.approx(expected, rel=1e-4, abs=1e-9)
    return got == expected


# ------------------------------------------------------------------ what the studies share


def test_the_whole_text_in_one_pass_gives_the_engines_next_byte():
    from mini_vllm import LLMEngine, SamplingParams

    tokens = tools.text_of("prose")[:120]
    logits = tools.logits_of(tools.model_of(), tokens)
    for length in (17, 64, 120):
        engine = LLMEngine(dtype="float64")
        params = SamplingParams(max_tokens=1, ignore_eos=True)
        (output,) = engine.generate([bytes(tokens[:length]).decode()], params)
        assert output.outputs[0].token_ids == [int(logits[length - 1].argmax())]


def test_bits_per_byte_by_hand():
    logits = np.log2(np.array([[1, 1, 2], [4, 2, 2], [1, 1, 1]])) * np.log(2)
    assert tools.bits_per_byte(logits, [0, 2, 1]) == pytest.approx((1 + 2) / 2)
    assert tools.divergence(logits, logits) == 0
    flat, certain = np.zeros((1, 2)), np.array([[40.0, 0.0]])
    assert tools.divergence(certain, flat) == pytest.approx(1)


# ------------------------------------------------------------------ the metric trap


def test_a_loud_row_hides_what_it_does_to_the_others():
    rows = {row["times"]: row for row in trap.loud_row()}
    assert rows[1000]["whole"] < 1.1 * rows[1]["whole"], "as good as an unharmed matrix, it seems"
    assert rows[1000]["zero rows"] == 63 and rows[1000]["others"] == pytest.approx(1, abs=1e-3)


def test_total_error_falls_while_quiet_channels_die():
    rows = trap.loud_channels()
    whole = [row["whole"] for row in rows]
    assert max(whole) == whole[trap.LOUDNESS.index(80)] > 3 * whole[-1]
    quiet = [row["quiet"] for row in rows]
    assert quiet == sorted(quiet) and quiet[-1] > 0.999 and rows[-1]["codes"] == 1


def test_the_trap_script_gives_the_saved_file_today(tmp_path, capsys):
    trap.main(["--out", str(tmp_path)])
    found = json.loads((tmp_path / "metric-trap.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out == trap.table(found) + "\n"
    assert close(found, saved("metric-trap.json"))


def test_equal_norms_are_not_equal_losses():
    table, gate, *_ = saved("metric-trap.json")["tensors"]
    assert table["whole"] < 1.1 * gate["whole"], "the norms agree within a tenth"
    assert gate["zero rows"] > 50 and table["zero rows"] == 0
    for text in ("prose", "code"):
        assert table["divergence"][text] > 10 * gate["divergence"][text]


# ------------------------------------------------------------------ code points


def test_the_grids_by_hand():
    assert codes.grid("E2M1").tolist() == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    e4m3, e5m2 = codes.grid("E4M3"), codes.grid("E5M2")
    assert (len(e4m3), e4m3[1], e4m3[8], e4m3[-1]) == (127, 2.0**-9, 2.0**-6, 448)
    assert (len(e5m2), e5m2[1], e5m2[4], e5m2[-1]) == (124, 2.0**-16, 2.0**-14, 57344)
    for name in codes.FORMATS:
        assert (np.diff(codes.grid(name)) > 0).all()


def test_rounding_takes_the_nearest_and_ties_go_to_the_even_code():
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 5.1, 100, -0.75, -0.1])
    expected = [0, 1, 1, 2, 2, 4, 4, 6, 6, -1, 0]
    assert codes.round_to(x, "E2M1").tolist() == expected
    assert codes.round_to(np.array([0.5, 1.5, 2.5, -3.5, 300]), "int8").tolist() == [
        0, 2, 2, -4, 127,
    ]  # fmt: skip


@pytest.mark.torch
@pytest.mark.parametrize("name", ["E4M3", "E5M2"])
def test_floats_agree_with_torch(name):
    import torch

    dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[name]
    rng = np.random.default_rng(0)
    x = rng.standard_normal(50_000) * 10.0 ** rng.integers(-6, 3, 50_000)
    x = x[np.abs(x) <= codes.grid(name)[-1]].astype(np.float32)
    assert np.array_equal(codes.round_to(x, name), torch.from_numpy(x).to(dtype).float().numpy())
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float().numpy()
    assert np.array_equal(every[: len(codes.grid(name))], codes.grid(name))


@pytest.mark.upstream
def test_nvfp4_is_the_pinned_reference_bit_for_bit():
    import torch
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import ref_nvfp4_quant

    W = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    W[3, 16:32], W[5] = 0, W[5] * 1e-4
    whole = torch.tensor(448 * 6 / np.abs(W).max(), dtype=torch.float32)
    values, scales = ref_nvfp4_quant(torch.from_numpy(W.copy()), whole, 16)
    expected = values.reshape(64, 16, 16) * (scales[..., None] / whole)
    assert np.array_equal(codes.nvfp4(W), expected.reshape(64, 256).numpy())


def test_mxfp4_by_hand():
    W = np.zeros((1, 64))
    W[0, :4] = [7.9, 4.9, 0.3, -1.0]  # largest in [4, 8): scale 1, so 7.9 is cut to 6
    W[0, 32:34] = [12.0, 1.0]  # in [8, 16): scale 2
    got = codes.mxfp4(W)
    assert got[0, :4].tolist() == [6, 4, 0.5, -1] and got[0, 32:34].tolist() == [12, 1]
    assert not got[0, 4:32].any()


def test_the_code_point_script_gives_the_saved_file_today(tmp_path, capsys):
    codes.main(["--out", str(tmp_path)])
    found = json.loads((tmp_path / "code-points.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out == codes.table(found) + "\n"
    assert close(found, saved("code-points.json"))


def test_one_spike_ruins_int8_and_leaves_floats_alone():
    rows = {row["scheme"]: row for row in saved("code-points.json")["real"]}
    assert rows["int8, tensor"]["with one spike"] > 15 * rows["int8, tensor"]["error"]
    for name in ("E4M3, tensor", "NVFP4", "MXFP4"):
        assert rows[name]["with one spike"] < 1.05 * rows[name]["error"]


# ------------------------------------------------------------------ drift


def test_a_static_scale_clips_above_and_starves_below():
    rows = {row["factor"]: row for row in drift.loudness()}
    assert rows[4.0]["clipped"] > 0.2 and rows[0.25]["clipped"] == 0
    assert rows[4.0]["static"] > 10 * rows[1.0]["static"] > 2 * rows[0.25]["static"]
    assert len({round(row["dynamic"], 6) for row in rows.values()}) == 1


def test_one_loud_token_costs_its_neighbours_with_a_shared_dynamic_scale():
    rows = drift.one_loud_token()
    assert rows["dynamic tensor"]["total"] < 0.05 < 0.3 < rows["dynamic tensor"]["quiet tokens"]
    assert rows["static"]["quiet tokens"] < 0.015 < 0.9 < rows["static"]["loud token"]
    assert max(rows["dynamic token"].values()) < 0.015


def test_moved_channels_make_smoothing_harmful():
    rows = drift.moved_channels(4)
    assert rows["same channels"]["worse"] == 0 and rows["moved channels"]["worse"] == 4


def test_the_saved_drift_is_what_the_script_gives_today():
    found = saved("drift.json")
    assert close(tools.rounded(drift.loudness()), found["loudness"])
    assert close(tools.rounded(drift.one_loud_token()), found["loud token"])
    assert close(tools.rounded(drift.moved_channels()), found["moved"])
    again = drift.texts(["german"])["german"]
    for mode in drift.MODES:  # a rounding that tips over changes the model a little
        got, was = again[mode]["divergence"], found["texts"]["german"][mode]["divergence"]
        assert got == pytest.approx(was, rel=0.1)


def test_per_token_scales_are_the_best_on_every_text():
    for row in saved("drift.json")["texts"].values():
        losses = {mode: row[mode]["divergence"] for mode in drift.MODES}
        assert min(losses, key=lambda mode: losses[mode]) == "dynamic token"


def test_the_drift_script_prints_the_table_of_what_it_writes(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(
        drift, "texts", lambda names: {n: saved("drift.json")["texts"][n] for n in names}
    )
    drift.main(["--texts", "prose", "--seeds", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "drift.json").read_text(encoding="utf-8"))
    assert capsys.readouterr().out == drift.table(found) + "\n"


def test_all_values_of_a_format_can_be_printed(capsys):
    codes.main(["--dump", "E4M3"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 127 and lines[126].split() == ["126", "448"]
