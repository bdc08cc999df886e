"""What lab 10-02 pins: shares in bytes, a log read rank by rank, two processes in lock-step."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest

from labkit import refused, same
from labkit.modules import load_module, sibling

GIB = 2**30
OPT = {
    "hidden_size": 2048, "ffn_dim": 8192, "num_hidden_layers": 24, "num_attention_heads": 32,
    "vocab_size": 50272, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
BYTE_LLAMA = json.loads(
    (Path(__file__).parents[3] / "models" / "byte-llama" / "config.json").read_text("utf-8")
)
LOG = """\
(EngineCore pid=41) INFO 11-23 05:43:03 [core.py:112] Initializing a V1 LLM engine (v0.22.1)
(Worker pid=51) INFO 11-23 05:43:20 [pynccl.py:113] vLLM is using nccl==2.27.5
(Worker pid=51) INFO 11-23 05:43:31 [cuda_communicator.py:225] Using ['CUSTOM', 'PYNCCL'] \
all-reduce backends (in dispatch order) for group 'tp:0' out of potential backends: \
['NCCL_SYMM_MEM', 'QUICK_REDUCE', 'FLASHINFER', 'CUSTOM', 'SYMM_MEM', 'PYNCCL'].
(Worker pid=51) INFO 11-23 05:43:37 [parallel_state.py:1735] rank 0 in world size 2 is assigned as \
DP rank 0, PP rank 0, PCP rank 0, TP rank 0, EP rank N/A, EPLB rank N/A
(Worker_TP1 pid=52) (Worker_TP0 pid=51) INFO 11-23 05:43:38 [gpu_model_runner.py:5132] Model \
loading took 1.23 GiB memory and 2.534512 seconds
INFO 11-23 05:43:38 [gpu_model_runner.py:4900] Starting to load model facebook/opt-1.3b...
(Worker_TP1 pid=52) INFO 11-23 05:43:39 [backends.py:9] Using cache directory
(Worker_TP0 pid=51) INFO 11-23 05:43:50 [gpu_worker.py:466] Available KV cache memory: 15.86 GiB
(EngineCore pid=41) INFO 11-23 05:43:51 [kv_cache_utils.py:1733] GPU KV cache size: 173,040 tokens
(EngineCore pid=41) INFO 11-23 05:43:51 [kv_cache_utils.py:1734] Maximum concurrency for 2,048 \
tokens per request: 84.49x
"""
ONE_RANK = """\
(EngineCore pid=61) INFO 11-23 05:50:03 [core.py:112] Initializing a V1 LLM engine (v0.22.1)
(EngineCore pid=61) INFO 11-23 05:50:37 [parallel_state.py:1735] rank 0 in world size 1 is assigned
(EngineCore pid=61) INFO 11-23 05:50:38 [gpu_model_runner.py:5132] Model loading took 2.46 GiB \
memory and 3.1 seconds
(EngineCore pid=61) INFO 11-23 05:50:51 [kv_cache_utils.py:1733] GPU KV cache size: 78,752 tokens
"""
harness = sibling(__file__, "harness")


class Counting:
    """A weight that counts what is read of it."""

    def __init__(self, whole):
        self._whole, self.shape, self.read = whole, whole.shape, []

    def rows(self, start, stop):
        self.read.append(("rows", start, stop))
        return self._whole[start:stop].copy()

    def columns(self, start, stop):
        self.read.append(("columns", start, stop))
        return self._whole[:, start:stop].copy()


# --- bytes ----------------------------------------------------------------------------------------


def test_worked_example(lab):
    for tp, expected in ((1, 2_631_647_232), (2, 1_320_321_024), (4, 664_657_920)):
        same(
            lab.opt_weight_bytes_per_rank(OPT, tp), expected,
            f"opt-1.3b in 2 bytes, {tp} ranks: bytes on each. The padded vocabulary has 50,304 "
            "rows, and is the head too; positions, norms and the biases of out and fc2 are whole",
        )  # fmt: skip
    for tp, expected in ((1, 196_608), (2, 98_304)):
        same(lab.kv_bytes_per_token_per_rank(OPT, tp), expected, f"K and V of a token, {tp} ranks")


def test_what_is_not_cut_is_held_twice(lab, record_property):
    one, two, four = (lab.opt_weight_bytes_per_rank(OPT, tp) for tp in (1, 2, 4))
    same(
        2 * two - one,
        8_994_816,
        "two ranks together less one: a second copy of what is not cut (W1)",
    )
    same(4 * four - one, 3 * 8_994_816, "four ranks: three copies more")
    record_property("measured.replicated", (2 * two - one) / 2**20)
    same(
        lab.opt_weight_bytes_per_rank(OPT, 2, 4), 2 * two,
        "numbers of 4 bytes: twice as much, all of it",
    )  # fmt: skip


def test_bytes_of_a_llama(lab):
    same(lab.llama_weight_bytes_per_rank(LLAMA_8B, 1), 16_060_522_496, "an 8B in 2 bytes: 16.06 GB")
    same(
        [lab.llama_weight_bytes_per_rank(LLAMA_8B, tp) for tp in (2, 8, 16)],
        [8_030_527_488, 2_008_031_232, 1_037_836_288],
        "2, 8, 16 ranks: with 8 KV heads, 16 ranks hold each of them twice",
    )
    tied = {**LLAMA_8B, "tie_word_embeddings": True}
    same(
        lab.llama_weight_bytes_per_rank(LLAMA_8B, 2) - lab.llama_weight_bytes_per_rank(tied, 2),
        128256 * 4096 * 2 // 2,
        "a head that is the table of tokens is not counted again",
    )
    same(
        [lab.llama_weight_bytes_per_rank(BYTE_LLAMA, tp, 4) for tp in (1, 2, 4)],
        [12_919_808, 6_464_512, 3_499_008],
        "the shipped model in 4 bytes: 257 tokens padded to 320 rows",
    )


def test_kv_of_few_heads(lab, record_property):
    same(
        [lab.kv_bytes_per_token_per_rank(LLAMA_8B, tp) for tp in (1, 2, 4, 8, 16, 32)],
        [131072, 65536, 32768, 16384, 16384, 16384],
        "8 KV heads on 1 to 32 ranks: no rank has less than one head (W1)",
    )
    one, four = (lab.kv_bytes_per_token_per_rank(BYTE_LLAMA, tp, 4) for tp in (1, 4))
    same((one, four), (4096, 2048), "the shipped model, 2 KV heads, on 1 rank and on 4")
    record_property("measured.kv_four", 100 * four / one)


def test_blocks_of_a_card(lab, record_property):
    card = (22.03 * GIB, 0.8, 0.75 * GIB)
    tokens = {}
    for tp, expected in ((1, 4923), (2, 10679)):
        weights, kv = (
            lab.opt_weight_bytes_per_rank(OPT, tp),
            lab.kv_bytes_per_token_per_rank(OPT, tp),
        )
        blocks = lab.plan_blocks(*card, weights, kv)
        same(
            blocks, expected,
            f"a card of 22.03 GiB at 0.8 with 0.75 GiB of other things, {tp} ranks: blocks of each "
            "rank, whole ones only (W2)",
        )  # fmt: skip
        tokens[tp] = 16 * blocks
    ratio = tokens[2] / tokens[1]
    assert ratio > 2, (
        "tokens of two ranks against one: each holds half of every token, and half of the weights "
        f"too\nexpected more than 2\ncame     {ratio:.3f}"
    )
    record_property("measured.ratio", ratio)
    same(lab.plan_blocks(1000, 1.0, 0, 0, 10, 16), 6, "6.25 blocks are 6")
    same(
        lab.plan_blocks(1000, 0.5, 100, 300, 10, 1),
        10,
        "half of 1,000, less 100, less 300: 100 are left",
    )


def test_a_claim_that_cannot_be(lab):
    kv = lab.kv_bytes_per_token_per_rank(OPT, 2)
    same(
        (lab.claim_fits(28_500, kv, 16, 24e9), lab.claim_fits(10_679, kv, 16, 22.03 * 0.8 * GIB)),
        (False, True),
        "28,500 blocks on a card of 24 GB want 41.7 GiB; 10,679 want 15.6. The blocks of two ranks "
        "are the same blocks, and are not added up",
    )
    same(
        (lab.claim_fits(10, 64, 16, 10_240), lab.claim_fits(10, 64, 16, 10_239)), (True, False),
        "10 blocks of 16 tokens of 64 bytes want 10,240 bytes, not one less",
    )  # fmt: skip


def test_what_cannot_be_cut_is_refused(lab):
    for call, why in (
        (lambda: lab.opt_weight_bytes_per_rank(OPT, 3), "32 heads on 3 ranks"),
        (
            lambda: lab.opt_weight_bytes_per_rank({**OPT, "ffn_dim": 8194}, 4),
            "8,194 units, 4 ranks",
        ),
        (lambda: lab.llama_weight_bytes_per_rank(LLAMA_8B, 64), "32 heads on 64 ranks"),
        (
            lambda: lab.kv_bytes_per_token_per_rank({**LLAMA_8B, "num_key_value_heads": 6}, 4),
            "6 KV, 4 ranks",
        ),
        (lambda: lab.kv_bytes_per_token_per_rank(BYTE_LLAMA, 0), "no rank"),
        (lambda: lab.plan_blocks(GIB, 0, 0, 0, 64), "a utilization of 0"),
        (lambda: lab.plan_blocks(GIB, 1.2, 0, 0, 64), "more than the card"),
        (lambda: lab.plan_blocks(GIB, 0.5, 0, GIB, 64), "weights that do not fit"),
    ):
        refused(call, why)


# --- the log --------------------------------------------------------------------------------------


def test_a_start_of_two_ranks(lab):
    said = lab.parse_log(LOG)
    for name, expected in (
        ("world_size", 2), ("pids", {0: 51, 1: 52}), ("kv_tokens", 173_040), ("concurrency", 84.49),
        ("backends", ["CUSTOM", "PYNCCL"]), ("nccl", "2.27.5"),
    ):  # fmt: skip
        same(getattr(said, name), expected, f"{name} of a start with two ranks")


def test_a_line_belongs_to_its_last_prefix(lab):
    said = lab.parse_log(LOG)
    same(
        said.loaded_gib, {0: 1.23},
        "processes share a terminal: of '(Worker_TP1 pid=52) (Worker_TP0 pid=51) INFO ...' the "
        "message is rank 0's, and the text of rank 1 comes on the next line",
    )  # fmt: skip


def test_what_one_rank_says_is_nobody_elses(lab):
    said = lab.parse_log(LOG)
    same(said.available_gib, {0: 15.86}, "one-off lines come from the first rank only (W3)")
    other = LOG.replace("Worker_TP0 pid=51", "Worker_TP3 pid=54")
    same(lab.parse_log(other).available_gib, {3: 15.86}, "said by rank 3")


def test_what_is_not_said_is_none(lab):
    said = lab.parse_log("INFO nothing of interest\n")
    for name, expected in (
        ("world_size", None), ("pids", {}), ("loaded_gib", {}), ("available_gib", {}),
        ("kv_tokens", None), ("concurrency", None), ("backends", None), ("nccl", None),
    ):  # fmt: skip
        same(getattr(said, name), expected, f"{name} of a log that does not say it (W3)")


def test_the_last_start_counts(lab):
    said = lab.parse_log(LOG + ONE_RANK)
    same(
        (said.world_size, said.pids, said.loaded_gib, said.kv_tokens, said.backends),
        (1, {}, {0: 2.46}, 78_752, None),
        "two starts in one log: what the first one said is not the second one's; an engine of one "
        "rank names no TP rank, and what it says is rank 0's",
    )


# --- two processes --------------------------------------------------------------------------------


def test_a_process_reads_its_shard_only(lab):
    rng = np.random.default_rng(1)
    w1, w2 = rng.standard_normal((12, 5)), rng.standard_normal((7, 12))
    for world in (1, 2, 3):
        for rank in range(world):
            one, other = Counting(w1), Counting(w2)
            up, down = lab.load_shard(one, other, rank, world)
            a, b = rank * 12 // world, (rank + 1) * 12 // world
            same(
                (one.read, other.read), ([("rows", a, b)], [("columns", a, b)]),
                f"rank {rank} of {world}: what is read of W1 and of W2 (W1)",
            )  # fmt: skip
            same((up.shape, down.shape), ((b - a, 5), (7, b - a)), "shapes of the shards")
    refused(lambda: lab.load_shard(Counting(w1), Counting(w2), 0, 5), "12 hidden units on 5 ranks")


def test_a_step_sums_once(lab):
    rng = np.random.default_rng(2)
    x, w1, w2 = (rng.integers(-3, 4, shape).astype(float) for shape in ((3, 5), (8, 5), (6, 8)))
    asked = []

    def sums(part):
        asked.append(np.array(part))
        return part + 100

    came = lab.rank_mlp(x, w1, w2, sums)
    dense = np.maximum(x @ w1.T, 0) @ w2.T
    same([part.tolist() for part in asked], [dense.tolist()], "what was handed over, and how often")
    same(came.tolist(), (dense + 100).tolist(), "what comes back is what all ranks have together")


def test_lock_step(lab):
    slots, calls = np.full((3, 2), -99.0), []

    def barrier():
        calls.append(slots[1].tolist())
        if len(calls) == 1:  # all have written
            slots[0], slots[2] = [1, 2], [100, 200]
        else:  # all have read: the others are in the next step already
            slots[0], slots[2] = [-7, -7], [-7, -7]

    came = lab.shared_all_reduce(np.array([10.0, 20]), slots, 1, barrier)
    same(calls[:1], [[10.0, 20.0]], "rank 1's slot when it comes to the first barrier (W4)")
    same(len(calls), 2, "barriers: before reading, and before anybody writes again (W4)")
    same(
        np.asarray(came).tolist(),
        [111.0, 222.0],
        "the sum of what stood there between the barriers",
    )
    assert not np.shares_memory(came, slots), "expected an array of its own; came shared memory"


def test_all_ranks_get_the_same_bits(lab):
    parts = [0.1, 0.2, 0.3]
    bits = []
    for rank in range(3):
        slots = np.array(parts)[:, None] * (np.arange(3)[:, None] == rank)

        def all_have_written(slots=slots):
            slots[:, 0] = parts

        came = lab.shared_all_reduce(np.array([parts[rank]]), slots, rank, all_have_written)
        bits.append(float(np.asarray(came)[0]).hex())
    same(
        len(set(bits)), 1,
        f"results of three ranks that add up 0.1, 0.2 and 0.3, as bits: {bits}. Ranks whose logits "
        "differ in the last place may choose different tokens, and then hang (W4)",
    )  # fmt: skip


@pytest.mark.slow
def test_two_processes_and_one_result(lab, record_property):
    rng = np.random.default_rng(3)
    w1, w2 = rng.standard_normal((256, 64)), rng.standard_normal((64, 256))
    xs = [rng.standard_normal((4, 64)) for _ in range(20)]
    try:
        reports = harness.run(Path(lab.__file__), xs, w1, w2)
    except RuntimeError as error:
        raise AssertionError(
            f"two processes with your functions: expected two reports; came {error}"
        ) from None
    same(len({report["pid"] for report in reports}), 2, "processes")
    same(
        [report["bytes_read"] for report in reports], [131_072, 131_072],
        "bytes of both weights that each process has read, of 262,144 (W1)",
    )  # fmt: skip
    same([report["waits"] for report in reports], [40, 40], "barriers of 20 steps: two in each")
    same(reports[0]["ys"] == reports[1]["ys"], True, "whether both ranks have the same bits")
    for step, x in enumerate(xs):
        dense = np.maximum(x @ w1.T, 0) @ w2.T
        most = float(np.abs(np.array(reports[0]["ys"][step]) - dense).max())
        assert most < 1e-10, (
            f"step {step}: furthest off the dense result, float64, sums in another order\n"
            f"expected below 1e-10\ncame     {most:.3g}"
        )


@pytest.mark.gpu
def test_two_gpus_and_one_engine(lab, gpu_device):
    """What run.py does on two GPUs, asked of one start."""
    import torch

    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU: two ranks need two")
    run = load_module(Path(__file__).with_name("run.py"))
    came = run.launch(Namespace(model=str(run.MODEL), util=0.5, file=None), 2)[1]
    expected = lab.llama_weight_bytes_per_rank(BYTE_LLAMA, 2)
    same(len({each["pid"] for each in came["ranks"]}), 2, "processes")
    for each in came["ranks"]:
        assert abs(each["weight_bytes"] / expected - 1) < 0.03, (
            f"rank {each['rank']}, bytes of weights within 3 %: expected {expected:,}; "
            f"came {each['weight_bytes']:,}"
        )
