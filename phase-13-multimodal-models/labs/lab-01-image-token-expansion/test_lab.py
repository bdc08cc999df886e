"""What lab 13-01 pins: the arithmetic of patches, and a prompt whose lengths add up."""

from __future__ import annotations

import random

from labkit import refused, same
from mini_vllm import LLMEngine, SamplingParams
from mini_vllm.multimodal.processor import expand

IMG = -100


def test_worked_example(lab):
    """Offsets counted in the prompt as it was written; the counts handed out backwards."""
    ids, ranges = lab.expand_prompt([IMG, 7, IMG, IMG, 8], [2, 3, 1])
    same(
        (ids, [(r.offset, r.length) for r in ranges]),
        ([IMG, IMG, 7, IMG, IMG, IMG, IMG, 8], [(0, 2), (3, 3), (6, 1)]),
        "[IMG, 7, IMG, IMG, 8] with pictures of 2, 3 and 1 tokens (P1, P2)",
    )


def test_patch_arithmetic(lab, record_property):
    """A patch at the edge dropped, or the merge taken on the product of both sides."""
    expected = {
        (336, 336): 144, (337, 337): 169, (337, 336): 156, (14, 14): 1, (1, 1): 1, (28, 28): 1,
        (29, 28): 2, (672, 672): 576, (1344, 1344): 2304, (1280, 960): 1610, (640, 480): 414,
    }  # fmt: skip
    for (width, height), tokens in expected.items():
        same(lab.image_token_count(width, height), tokens, f"tokens of {width} x {height} pixels")
    same(lab.image_token_count(336, 336, merge_size=1), 576, "LLaVA's 336 x 336, nothing merged")
    record_property("measured.one_pixel", lab.image_token_count(337, 337))
    for bad in ((0, 5), (5, 0), (5, 5, 0), (5, 5, 14, 0), (-1, 5)):
        refused(lambda bad=bad: lab.image_token_count(*bad), f"image_token_count{bad}")


def test_two_ceilings_are_one(lab):
    """A floor in one of the two stages."""
    for side in range(1, 200):
        for patch, merge in ((14, 2), (16, 1), (7, 3)):
            same(
                lab.image_token_count(side, 1, patch, merge),
                -(-side // (patch * merge)),
                f"{side} pixels in patches of {patch}, {merge} to a token, in one row",
            )


def test_resolution_is_quadratic_cost(lab):
    """Tokens that grow with a side, not with the area."""
    for side in (28, 336, 672, 1260):
        one, four = (lab.image_token_count(s, s) for s in (side, 2 * side))
        same(four, 4 * one, f"twice the side of {side} pixels is four times the tokens")


def test_mismatched_counts_are_refused(lab):
    """A marker left standing, or a picture that nobody asked about."""
    for ids, counts in (([1, IMG], []), ([1, 2], [4]), ([IMG, IMG], [4]), ([IMG], [2, 2])):
        refused(lambda i=ids, c=counts: lab.expand_prompt(i, c), f"{ids} with counts {counts} (P3)")
    refused(lambda: lab.expand_prompt([1, IMG], [0]), "a picture without tokens")
    same(lab.expand_prompt([1, 2], []), ([1, 2], []), "a text stays what it is")


def test_random_prompts_add_up(lab):
    """Any prompt: nothing lost, nothing moved, every id of a picture in its range."""
    rng = random.Random(13)
    for _ in range(300):
        given = [rng.choice((IMG, rng.randint(0, 9))) for _ in range(rng.randint(0, 12))]
        counts = [rng.randint(1, 9) for _ in range(given.count(IMG))]
        kept, said = list(given), list(counts)
        ids, ranges = lab.expand_prompt(given, counts)
        what = f"{kept} with counts {said}"
        same((given, counts), (kept, said), f"{what}: what was given must not change")
        same([r.length for r in ranges], counts, f"{what}: lengths of the ranges, in order")
        inside = {p for r in ranges for p in range(r.offset, r.offset + r.length)}
        same(len(inside), sum(counts), f"{what}: positions in ranges; no two overlap (P2)")
        same({p for p, t in enumerate(ids) if t == IMG}, inside, f"{what}: where the ids stand")
        text = [t for p, t in enumerate(ids) if p not in inside]
        same(text, [t for t in kept if t != IMG], f"{what}: the text without its pictures (P1)")
        theirs, places = expand(kept, IMG, 4, len(counts))
        mine, ours = lab.expand_prompt(kept, [4] * len(counts))
        same(
            (mine, [(r.offset, r.length) for r in ours]),
            (theirs, [(p.offset, p.length) for p in places]),
            f"{kept}: the mini engine's own door, pictures of 4 tokens",
        )


def test_blocks(lab):
    """A block too many where the last is full, one too few where it is not."""
    for tokens, blocks in ((0, 0), (1, 1), (16, 1), (17, 2), (576, 36), (595, 38)):
        same(lab.kv_blocks_needed(tokens), blocks, f"blocks of 16 for {tokens} tokens")
    same(lab.kv_blocks_needed(5, 1), 5, "blocks of one token")
    refused(lambda: lab.kv_blocks_needed(-1), "-1 tokens")
    refused(lambda: lab.kv_blocks_needed(4, 0), "blocks of 0 tokens")


def test_the_scheduler_sees_only_the_expanded_length(lab, record_property):
    """The marker kept beside its placeholders: one token too many."""
    ids, _ = lab.expand_prompt([*range(19), IMG], [576])
    same(len(ids), 595, "19 words and a picture of 576 tokens")
    same(lab.kv_blocks_needed(len(ids)), 38, "blocks of that; 20 words have 2")
    engine = LLMEngine(model="toy", num_blocks=64, max_num_batched_tokens=256, max_num_seqs=2)
    name = engine.add_request([max(0, t) % 50 for t in ids], SamplingParams(max_tokens=1))
    steps, held = 0, 0
    while engine.requests.get(name) is not None and not engine.requests[name].is_finished:
        engine.step()
        steps += 1
        held = max(held, 63 - engine.scheduler.kv.block_pool.get_num_free_blocks())
        if steps > 9:
            break
    same(steps, 3, "steps to the first token with a budget of 256 tokens: 595 = 256 + 256 + 83")
    record_property("measured.steps", steps)
