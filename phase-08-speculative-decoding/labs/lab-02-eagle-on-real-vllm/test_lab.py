"""What lab 08-02 pins: counters, the log's line, and the sums that may be made of them."""

from __future__ import annotations

import pytest

from labkit import refused, same

HEAD = "SpecDecoding metrics: "
RECORDED = (
    # k, runs, seconds, and the line that SpecDecodingLogging of the pinned tree makes of them
    (
        3, [(3, 3), (3, 0), (0, 0), (2, 1)], 2.0,
        HEAD + "Mean acceptance length: 2.33, Accepted throughput: 2.00 tokens/s, Drafted "
        "throughput: 4.00 tokens/s, Accepted: 4 tokens, Drafted: 8 tokens, Per-position "
        "acceptance rate: 0.667, 0.333, 0.333, Avg Draft acceptance rate: 50.0%",
    ),
    (
        1, [(1, 1)] * 7, 0.5,
        HEAD + "Mean acceptance length: 2.00, Accepted throughput: 14.00 tokens/s, Drafted "
        "throughput: 14.00 tokens/s, Accepted: 7 tokens, Drafted: 7 tokens, Per-position "
        "acceptance rate: 1.000, Avg Draft acceptance rate: 100.0%",
    ),
    (
        8, [(8, 0)] * 3, 10.0,
        HEAD + "Mean acceptance length: 1.00, Accepted throughput: 0.00 tokens/s, Drafted "
        "throughput: 2.40 tokens/s, Accepted: 0 tokens, Drafted: 24 tokens, Per-position "
        "acceptance rate: 0.000, 0.000, 0.000, 0.000, 0.000, 0.000, 0.000, 0.000, "
        "Avg Draft acceptance rate: 0.0%",
    ),
)  # fmt: skip
STAMP = "INFO 01-02 03:04:05 [metrics.py:102] "


def near(got, expected, why, within=1e-9):
    right = isinstance(got, int | float) and abs(got - expected) <= within
    assert right, f"{why}\nexpected {expected} within {within:g}\ncame     {got}"


# --- counting -------------------------------------------------------------------------------------


def test_counters_by_hand(lab):
    for (k, runs), expected in (
        ((3, [(3, 3), (3, 0), (0, 0), (2, 1)]), (3, 8, 4, [2, 1, 1])),
        ((2, [(0, 0)] * 5), (0, 0, 0, [0, 0])),
        ((4, [(1, 1), (4, 2)]), (2, 5, 3, [2, 1, 0, 0])),
        ((1, []), (0, 0, 0, [0])),
    ):
        names = (
            "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_accepted_tokens_per_pos"
        )  # fmt: skip
        same(
            lab.count_runs(runs, k),
            dict(zip(names, expected, strict=True)),
            f"count_runs({runs}, {k}): a run without drafts counts nowhere; position i is accepted "
            "in every run that accepts more than i",
        )


def test_impossible_runs_are_refused(lab):
    for runs, why in (
        ([(2, 3)], "accepts more than it carries"), ([(4, 1)], "carries more than k"),
        ([(2, -1)], "accepts -1"), ([(3, 3), (-1, -1)], "carries -1"),
    ):  # fmt: skip
        refused(lambda runs=runs: lab.count_runs(runs, 3), f"count_runs({runs}, 3): a run {why}")


def test_tokens_per_run_count_every_run(lab, record_property):
    runs = [(3, 3), (3, 0), (0, 0), (2, 1)]
    near(lab.tokens_per_run(runs), 2.0, f"{runs}: 4 accepted and 4 of the target's own, 4 runs")
    near(lab.tokens_per_run([(0, 0)] * 3), 1.0, "no drafts: plain decoding")
    refused(lambda: lab.tokens_per_run([]), "tokens_per_run([])")
    few = [(4, 4)] + [(0, 0)] * 9
    near(lab.tokens_per_run(few), 1.4, "one run of ten carries drafts, and accepts four")
    counters = lab.count_runs(few, 4)
    record_property("measured.length", 1 + counters["num_accepted_tokens"] / counters["num_drafts"])


# --- the line -------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", RECORDED, ids=["mixed", "all accepted", "none accepted"])
def test_the_line_is_the_engines(lab, case):
    k, runs, seconds, line = case
    got = lab.log_line(lab.count_runs(runs, k), seconds)
    assert got == line, (
        f"k {k}, runs {runs}, {seconds} seconds: the mean acceptance length is 1 + accepted over "
        f"drafts, per-position rates are over drafts, the last rate over draft tokens\n"
        f"expected {line}\ncame     {got}"
    )


def test_a_line_is_read_back(lab):
    line = STAMP + RECORDED[0][3]
    expected = {
        "mean_acceptance_length": 2.33,
        "accepted_throughput": 2.0,
        "drafted_throughput": 4.0,
        "accepted": 4,
        "drafted": 8,
        "per_position": [0.667, 0.333, 0.333],
        "acceptance_rate": 0.5,
    }
    for end in ("", "\n"):
        got = lab.parse_spec_line(line + end)
        same(got, expected, f"the numbers in {line + end!r}")
    kinds = {
        name: type(value).__name__ for name, value in got.items() if name in ("accepted", "drafted")
    }
    same(kinds, {"accepted": "int", "drafted": "int"}, "counts of tokens are whole numbers")
    near(
        lab.parse_spec_line(line.replace(" 50.0%", " 47.7%"))["acceptance_rate"],
        0.477,
        "47.7% is .477",
    )
    same(lab.parse_spec_line(RECORDED[1][3])["per_position"], [1.0], "k = 1: one position, a list")
    same(len(lab.parse_spec_line(RECORDED[2][3])["per_position"]), 8, "k = 8: eight positions")
    same(lab.parse_spec_line(RECORDED[1][3])["acceptance_rate"], 1.0, "100.0% is 1.0")


def test_other_lines_are_refused(lab):
    whole = RECORDED[0][3]
    for line in (
        "", "Engine 000: Avg prompt throughput: 1.0 tokens/s", whole[: whole.index(", Accepted:")],
        whole.removesuffix(" 50.0%"), whole.replace(" 0.667, 0.333, 0.333,", ""),
        whole.replace("Drafted: 8 tokens", "Drafted: eight tokens"), whole + " and more",
    ):  # fmt: skip
        refused(lambda line=line: lab.parse_spec_line(line), f"parse_spec_line({line!r})")


@pytest.mark.upstream
@pytest.mark.parametrize("case", RECORDED, ids=["mixed", "all accepted", "none accepted"])
def test_the_pinned_tree_logs_this_line(lab, case, monkeypatch):
    from vllm.v1.spec_decode import metrics

    k, runs, seconds, _ = case
    stats = metrics.SpecDecodingStats.new(k)
    for drafted, accepted in runs:
        if drafted:
            stats.observe_draft(drafted, accepted)
    logging = metrics.SpecDecodingLogging()
    logging.observe(stats)
    logging.last_log_time = 0.0
    monkeypatch.setattr(metrics.time, "monotonic", lambda: seconds)
    said: list[str] = []
    logging.log(lambda form, *values: said.append(form % values))
    counters = lab.count_runs(runs, k)
    same(counters, {name: getattr(stats, name) for name in counters}, "SpecDecodingStats itself")
    same(lab.log_line(counters, seconds), said[0], "SpecDecodingLogging itself")


# --- what follows ---------------------------------------------------------------------------------


def test_time_per_token(lab):
    near(lab.tpot(2.64, 0.1, 128), 0.02, "2.64 s, the first token after .1: 127 tokens in 2.54 s")
    near(lab.tpot(0.5, 0.5, 2), 0.0, "both tokens at once")
    for arguments in ((1.0, 1.1, 5), (1.0, -0.1, 5), (1.0, 0.1, 1)):
        refused(lambda a=arguments: lab.tpot(*a), f"tpot{arguments}")


def test_a_measurement_is_reconciled(lab, record_property):
    got = lab.reconcile(18.2, 9.6, 2.8, 5)
    for name, expected in (
        ("speedup", 1.8958), ("run", 26.88), ("run_steps", 1.4769), ("extra_steps", 0.4769),
        ("draft_cost", 0.09538),
    ):  # fmt: skip
        near(
            (got or {}).get(name),
            expected,
            f"reconcile(18.2, 9.6, 2.8, 5)[{name!r}]: a run gives 2.8 tokens, its own among them, "
            "so it lasts 2.8 x 9.6 ms",
            1e-4,
        )
    record_property("measured.cost", got["draft_cost"])
    slower = lab.reconcile(10.0, 12.0, 1.5, 3)
    near(slower["speedup"], 10 / 12, "slower with drafts: a speedup below 1")
    near(slower["extra_steps"], 0.8, "1.5 tokens in 18 ms: the drafts cost .8 steps of 10 ms")
    impossible = lab.reconcile(10.0, 2.0, 2.5, 4)
    assert impossible["extra_steps"] < 0, (
        "five times faster with 2.5 tokens a run cannot be: a run would take half a step. The sum "
        f"must show it\nexpected below 0\ncame     {impossible['extra_steps']}"
    )


def test_what_cannot_be_measured_is_refused(lab):
    for arguments in (
        (0.0, 9.6, 2.8, 5), (18.2, -1.0, 2.8, 5), (18.2, 9.6, 0.9, 5), (18.2, 9.6, 6.1, 5),
        (18.2, 9.6, 1.0, 0),
    ):  # fmt: skip
        refused(lambda a=arguments: lab.reconcile(*a), f"reconcile{arguments}")
