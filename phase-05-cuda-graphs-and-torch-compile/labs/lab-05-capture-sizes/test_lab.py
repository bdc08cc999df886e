"""What lab 05-05 pins: the default ladder, rounding up to it, what that costs, and a better ladder.

Rules are compared with a recording of the real v0.22.1 configuration and dispatcher.
"""

from __future__ import annotations

import random
from collections import Counter
from itertools import combinations

from conformance import parts
from labkit import refused, same

CASES = parts.load("cudagraph_modes")
TRACE = [1, 3, 5, 9, 17, 33, 65, 33, 12]


# --- the ladder -----------------------------------------------------------------------------------


def test_ladder_shape(lab):
    same(
        lab.default_capture_sizes(64),
        [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64],
        "up to 64: 1, 2, 4, then every 8, the top included.",
    )
    for top, rungs in ((128, 19), (256, 35), (512, 51)):
        sizes = lab.default_capture_sizes(top)
        same((len(sizes), sizes[-1]), (rungs, top), f"rungs and largest rung up to {top}.")


def test_stride_changes_at_256(lab):
    sizes = lab.default_capture_sizes(512)
    around = [size for size in sizes if 232 <= size <= 304]
    same(
        around,
        [232, 240, 248, 256, 272, 288, 304],
        "steps of 8 below 256 and of 16 from there: every 8 up to 512 would be 67 rungs, and each "
        "rung costs startup time and memory.",
    )
    same(lab.default_capture_sizes(260)[-1], 256, "the next rung after 256 is 272, above 260.")


def test_small_max(lab):
    same(lab.default_capture_sizes(7), [1, 2, 4], "8 does not fit below a top of 7.")
    same(lab.default_capture_sizes(3), [1, 2], "4 does not fit below a top of 3.")
    same(lab.default_capture_sizes(1), [1], "one rung is the least.")
    same(lab.default_capture_sizes(100)[-2:], [88, 96], "100 is no multiple of 8.")
    refused(lambda: lab.default_capture_sizes(0), "max_size 0 (a ladder without a rung)")


def test_off_stride_budget_is_a_rung(lab):
    same(
        lab.default_capture_sizes(100, 100)[-2:],
        [96, 100],
        "no step is larger than a budget of 100, so 100 is worth a graph although off the stride.",
    )
    same(lab.default_capture_sizes(100, 2048)[-1], 96, "a budget above the top adds nothing.")
    same(lab.default_capture_sizes(64, 64).count(64), 1, "64 is on the stride already: once.")


def test_interactivity_captures_every_small_size(lab):
    sizes = lab.default_capture_sizes(256, performance_mode="interactivity")
    same(sizes[:34], [*range(1, 33), 40, 48], "every size up to 32, then the usual steps.")
    same(len(sizes), 60, "32 rungs up to 32, and 28 more up to 256.")
    same(
        lab.default_capture_sizes(5, performance_mode="interactivity"),
        [1, 2, 3, 4, 5],
        "not above the top, in this mode either.",
    )


def test_max_capture_size(lab):
    same(lab.max_capture_size(60), 120, "60 requests: twice a full decode batch.")
    same(lab.max_capture_size(256), 512, "256 requests reach the limit of 512 exactly.")
    same(lab.max_capture_size(1024), 512, "2,048 is cut to 512.")
    same(lab.max_capture_size(60, 3), 360, "each decode holds 3 tokens: 60 x 3 x 2.")
    same(lab.max_capture_size(256, 1, 100), 100, "a step of more than 100 tokens cannot happen.")


def test_default_ladders_of_the_real_engine(lab):
    for case in CASES:
        if case["kind"] != "ladder":
            continue
        seqs, tokens, q = case["max_num_seqs"], case["max_num_batched_tokens"], case["query_len"]
        top = lab.max_capture_size(seqs, q, tokens)
        sizes = lab.default_capture_sizes(top, tokens, case["performance_mode"])
        same(
            sizes,
            case["sizes"],
            f"vLLM v0.22.1 with max_num_seqs {seqs}, decode_query_len {q}, max_num_batched_tokens "
            f"{tokens}, {case['performance_mode']} captures other sizes (your top: {top}).",
        )


def test_decode_sizes_stop_at_max_num_seqs(lab):
    sizes = lab.default_capture_sizes(120)
    got = lab.decode_capture_sizes(sizes, 60)
    same(
        got[-2:],
        [48, 56],
        "with 60 requests a decode batch of 64 cannot be, so there is no full graph for it.",
    )
    same(lab.decode_capture_sizes([1, 2, 4, 8, 16], 4, 3), [4, 8], "3 <= rung <= 4 x 3.")
    same(lab.decode_capture_sizes([8, 1, 64, 4], 8), [8, 1, 4], "kept in the order they came in.")
    for case in CASES:
        if case["kind"] == "dispatch" and case["mode"] == "FULL_DECODE_ONLY":
            got = lab.decode_capture_sizes(case["sizes"], case["max_num_seqs"])
            same(
                got,
                case["passes"][0][1][::-1],
                f"vLLM with max_num_seqs {case['max_num_seqs']} captures other decode sizes.",
            )


# --- rounding up ----------------------------------------------------------------------------------


def test_exact_rung_pays_nothing(lab):
    sizes = lab.default_capture_sizes(512)
    for rung in sizes:
        got = (lab.select_capture_size(rung, sizes), lab.padded_tokens(rung, sizes))
        same(got, (rung, 0), f"a batch of {rung} is a rung: that graph, no padding.")


def test_between_rungs_rounds_up(lab):
    sizes = lab.default_capture_sizes(512)
    for batch, rung, rows in ((33, 40, 7), (250, 256, 6), (257, 272, 15), (9, 16, 7), (5, 8, 3)):
        got = (lab.select_capture_size(batch, sizes), lab.padded_tokens(batch, sizes))
        same(
            got,
            (rung, rows),
            f"{batch} tokens fit into {rung}, the next rung up; a smaller graph has no room.",
        )


def test_oversize_batch_runs_eager(lab):
    sizes = lab.default_capture_sizes(64)
    got = (lab.select_capture_size(65, sizes), lab.padded_tokens(65, sizes))
    same(
        got,
        (None, 0),
        "65 tokens do not fit into a graph of 64: no graph, and nothing is padded.",
    )
    same(lab.padded_tokens(600, sizes), 0, "600 tokens: no rung, no padding, never less than 0.")


def test_unsorted_sizes(lab):
    shuffled = [64, 8, 1, 32, 4, 2, 16]
    same(
        [lab.select_capture_size(batch, shuffled) for batch in (1, 3, 9, 33, 65)],
        [1, 4, 16, 64, None],
        "sizes come from a user's list; their order must not matter.",
    )
    same(shuffled, [64, 8, 1, 32, 4, 2, 16], "the caller's list must stay as it was.")


def test_batch_below_one_is_refused(lab):
    refused(lambda: lab.select_capture_size(0, [1, 2, 4]), "a step of 0 tokens")
    refused(lambda: lab.padded_tokens(-1, [1, 2, 4]), "a step of -1 tokens")


def test_padding_bounded_by_gap(lab):
    rng = random.Random(5)
    for _ in range(300):
        sizes = rng.sample(range(1, 200), rng.randint(1, 12))
        batch = rng.randint(1, 220)
        rung, rows = lab.select_capture_size(batch, sizes), lab.padded_tokens(batch, sizes)
        fits = [size for size in sizes if size >= batch]
        same(rung, min(fits) if fits else None, f"batch {batch}, sizes {sizes}: the rung.")
        same(rows, min(fits) - batch if fits else 0, f"batch {batch}, sizes {sizes}: the padding.")


def test_upstream_table_equivalence(lab):
    for case in CASES:
        if case["kind"] != "dispatch" or case["mode"] != "PIECEWISE":
            continue
        for batch, (mixed, *_) in enumerate(case["found"], start=1):
            expected = None if mixed[0] == "NONE" else mixed[1]
            same(
                lab.select_capture_size(batch, case["sizes"]),
                expected,
                f"vLLM's dispatcher, max_num_seqs {case['max_num_seqs']}, {batch} tokens, mode "
                "PIECEWISE.",
            )


# --- what it costs --------------------------------------------------------------------------------


def test_trace_accounting(lab):
    sizes = lab.default_capture_sizes(64)
    same(
        lab.trace_waste(TRACE, sizes),
        36,
        f"trace {TRACE}: 0 + 1 + 3 + 7 + 7 + 7 + 0 + 7 + 4; the step of 65 runs without a graph "
        "and pads nothing.",
    )


def test_finer_ladder_trades_graphs_for_padding(lab):
    ladders = {
        "powers of two": [2**i for i in range(7)],
        "default": lab.default_capture_sizes(64),
        "every 4": [1, 2, *range(4, 65, 4)],
    }
    got = {name: (len(sizes), lab.trace_waste(TRACE, sizes)) for name, sizes in ladders.items()}
    same(
        got,
        {"powers of two": (7, 92), "default": (11, 36), "every 4": (18, 16)},
        f"(rungs, padding) on {TRACE}: more rungs, less padding.",
    )


def test_waste_histogram(lab):
    got = lab.waste_histogram(iter(TRACE), lab.default_capture_sizes(64))
    expected = {
        1: (1, 0),
        4: (1, 1),
        8: (1, 3),
        16: (2, 11),
        24: (1, 7),
        40: (2, 14),
        None: (1, 0),
    }
    same(got, expected, "rung -> (steps, padding); None holds the step of 65 above the top.")
    same(
        lab.waste_histogram([65, 600, 3], [4, 64]),
        {None: (2, 0), 4: (1, 1)},
        "two steps above the top are two steps under None.",
    )


def test_number_of_graphs(lab):
    sizes = lab.default_capture_sizes(512)
    decode = lab.decode_capture_sizes(sizes, 256)
    same(
        lab.num_graphs(sizes, decode, 12),
        698,
        "12 layers: each of 51 rungs holds 13 pieces (before, between and after 12 attentions), "
        "and each of 35 decode rungs one full graph.",
    )
    same(lab.num_graphs([8, 4], [], 4), 10, "no decode graphs: 2 rungs of 5 pieces.")


# --- a ladder for your traffic --------------------------------------------------------------------


def waste(histogram, sizes) -> int:
    """Padding, counted without the lab."""
    return sum(
        count * (min(size for size in sizes if size >= batch) - batch)
        for batch, count in histogram.items()
    )


def checked(lab, histogram, k):
    sizes = lab.optimal_sizes(histogram, k)
    assert isinstance(sizes, list) and sizes == sorted(set(sizes)) and 1 <= len(sizes) <= k, (
        f"optimal_sizes({histogram}, {k}) must be at most {k} ascending rungs; came {sizes}"
    )
    assert sizes[-1] >= max(histogram), (
        f"optimal_sizes({histogram}, {k}): a batch of {max(histogram)} has no rung in {sizes}. "
        "Padding that is not paid because there is no graph is no saving"
    )
    return sizes


def test_optimal_sizes_on_paper(lab):
    histogram = {2: 10, 3: 10, 9: 1, 10: 5}
    same(lab.optimal_sizes(histogram, 1), [10], "one rung must hold the largest batch.")
    same(
        lab.optimal_sizes(histogram, 2),
        [3, 10],
        "[3, 10] pads 10 x 1 + 1 x 1 = 11; [2, 10] pads 10 x 7 + 1 = 71; [9, 10] pads 130.",
    )
    same(lab.optimal_sizes(histogram, 4), [2, 3, 9, 10], "a rung for every size pads nothing.")
    same(lab.optimal_sizes(histogram, 9), [2, 3, 9, 10], "further rungs would never be used.")


def test_optimal_sizes_beat_every_choice(lab):
    rng = random.Random(3)
    for _ in range(60):
        values = rng.sample(range(1, 40), rng.randint(1, 9))
        histogram = {value: rng.choice([1, 2, 5, 40]) for value in values}
        k = rng.randint(1, 5)
        sizes, top = checked(lab, histogram, k), max(values)
        below = [value for value in values if value != top]
        least = min(
            waste(histogram, [*chosen, top])
            for count in range(min(k, len(values)))
            for chosen in combinations(below, count)
        )
        same(waste(histogram, sizes), least, f"padding of {sizes} on {histogram}, k = {k}.")


def test_optimal_sizes_beat_the_default_ladder(lab):
    rng = random.Random(7)
    trace = [max(1, min(128, round(rng.gauss(23, 5)))) for _ in range(3000)]
    trace += [max(1, min(128, round(rng.gauss(97, 9)))) for _ in range(1500)]
    histogram = Counter(trace)
    default = [1, 2, 4, *range(8, 129, 8)]
    at_default = waste(histogram, default)
    sizes = checked(lab, histogram, len(default))
    assert waste(histogram, sizes) < at_default / 2, (
        f"{len(default)} rungs chosen for this traffic must pad less than half of what the "
        f"default's {len(default)} do, {at_default}; came {waste(histogram, sizes)} with {sizes}"
    )


def test_optimal_sizes_refuse_nothing_to_do(lab):
    refused(lambda: lab.optimal_sizes({}, 3), "an empty histogram")
    refused(lambda: lab.optimal_sizes({4: 1}, 0), "k = 0")
