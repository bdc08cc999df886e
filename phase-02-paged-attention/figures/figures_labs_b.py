"""The figures of labs 02-03, 02-04 and 02-06.

What shows block tables, slots, splits or block counts is computed by the labs' reference solutions,
not typed. No upstream counterpart.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from course.files import load_module
from course.truth.figures import BLUE, GREEN, GREY, ORANGE, RED, Svg

LABS = Path(__file__).resolve().parents[1] / "labs"


def solution(folder: str) -> ModuleType:
    """The reference solution of a lab as a module of its own."""
    return load_module(LABS / folder / "solution.py")


# ------------------------------------------------------------------ lab 06


def write_and_read() -> str:
    """One sequence of 36 tokens over blocks 4, 1, 7: one slot written, 36 slots read."""
    lab = solution("lab-06-paged-attention-numpy")
    table, block_size, num_tokens, num_blocks = [4, 1, 7], 16, 36, 9
    slots = lab.build_slot_mapping(table, block_size, 0, num_tokens).tolist()
    position_of = {slot: position for position, slot in enumerate(slots)}
    svg = Svg(
        780,
        452,
        "The write map and the read map of one sequence",
        "Positions 0 to 35 of a sequence in three logical blocks; the block table 4, 1, 7; nine "
        "physical blocks of 16 slots. The new token at position 35 is written to slot "
        f"{slots[35]}. Its attention reads the {num_tokens} slots that hold positions 0 to 35, "
        "in blocks 4, 1 and 7, and none of the 12 unused slots of block 7.",
    )
    colors = (BLUE, GREEN, ORANGE)
    cell, left = 13.5, 112.0

    svg.text(16, 30, "positions", bold=True)
    for position in range(num_tokens):
        block = position // block_size
        x = left + position * cell + block * 10
        new = position == num_tokens - 1
        svg.rect(x, 16, cell - 2, 20, fill=RED if new else colors[block], opacity=0.85, radius=2)
    for block in range(3):
        x = left + block * (block_size * cell + 10)
        svg.text(x, 52, f"{block * block_size} ...", size=11, css="soft")
    svg.text(left + 35 * cell + 20 + cell + 4, 31, "35, new", size=12, fill=RED)

    svg.text(16, 92, "block table", bold=True)
    for block, physical in enumerate(table):
        x = left + block * (block_size * cell + 10)
        svg.rect(x, 74, 40, 28, fill=colors[block], opacity=0.25, stroke=colors[block], radius=4)
        svg.text(x + 20, 93, str(physical), anchor="middle", bold=True)
        svg.text(x + 48, 93, f"positions {block * 16}-{block * 16 + 15}", size=11, css="soft")

    svg.text(16, 140, "physical blocks: 16 slots each", bold=True)
    top, pitch = 154.0, 27.0
    for block in range(num_blocks):
        y = top + block * pitch
        used = block in table
        label = "0, null" if block == 0 else str(block)
        svg.text(left - 8, y + 15, label, size=12, anchor="end", css="ink" if used else "soft")
        for offset in range(block_size):
            slot = block * block_size + offset
            position = position_of.get(slot)
            x = left + offset * cell * 1.35
            if position is None:
                edge = ORANGE if block == table[-1] else None
                svg.rect(x, y, cell * 1.35 - 2, 20, css="paper", stroke=edge, radius=2)
                continue
            color = RED if position == num_tokens - 1 else colors[position // block_size]
            tip = f"slot {slot}: position {position}"
            svg.rect(x, y, cell * 1.35 - 2, 20, fill=color, opacity=0.85, radius=2, tip=tip)
        svg.text(
            left + block_size * cell * 1.35 + 6,
            y + 15,
            f"slots {block * block_size}-{block * block_size + block_size - 1}",
            size=11,
            css="soft",
        )
    x, y = 524.0, 172.0
    svg.box(x, y, 244, 84, ["write one row", "position 35: table entry 2, offset 3"], fill=RED)
    svg.text(x + 122, y + 74, f"7 x 16 + 3 = slot {slots[35]}", size=12, anchor="middle")
    y = 282.0
    svg.box(x, y, 244, 84, ["read 36 rows", "the same formula for 0, 1, ... 35"], fill=GREY)
    first, middle = slots[0], slots[16]
    svg.text(x + 122, y + 74, f"slots {first}-79, {middle}-31, 112-115", size=12, anchor="middle")
    svg.text(
        16,
        430,
        "The 12 empty slots of block 7 belong to the sequence and hold what the block's last owner "
        "left there.",
        size=12,
        css="soft",
    )
    return svg.render()


# ------------------------------------------------------------------ lab 03


def memory_to_blocks() -> str:
    """A card of 24 GiB at two settings: what is fixed, what becomes blocks, what the log says."""
    lab = solution("lab-03-real-vllm-blocks")
    total_gib, fixed_gib = 24, 1
    size = lab.bytes_per_block(12, 12, 64, 2, 16)
    utils = (0.5, 0.9)
    plans = [lab.plan(total_gib * 2**30, u, fixed_gib * 2**30, size, 16, 2048) for u in utils]
    ratio = plans[1].num_blocks / plans[0].num_blocks
    svg = Svg(
        780,
        330,
        "From a memory budget to blocks",
        f"A card of {total_gib} GiB with {fixed_gib} GiB of fixed cost and blocks of {size:,} "
        f"bytes. At 0.5 the cache has {plans[0].num_blocks:,} blocks, at 0.9 "
        f"{plans[1].num_blocks:,}: {ratio:.2f} times as many, more than 0.9 / 0.5.",
    )
    left, width = 60.0, 690.0
    pixels = width / total_gib
    svg.text(16, 28, f"A device of {total_gib} GiB (invented), OPT-125m, blocks of 16", bold=True)
    for row, (util, planned) in enumerate(zip(utils, plans, strict=True)):
        y = 62.0 + row * 110
        allowed = util * total_gib
        svg.text(left - 12, y + 26, f"{util}", anchor="end", bold=True)
        svg.rect(left, y, width, 40, css="paper", radius=4)
        svg.rect(left, y, fixed_gib * pixels, 40, fill=ORANGE, opacity=0.85, radius=2)
        start = left + fixed_gib * pixels
        svg.rect(start, y, (allowed - fixed_gib) * pixels, 40, fill=BLUE, opacity=0.7, radius=2)
        middle = start + (allowed - fixed_gib) * pixels / 2
        svg.text(
            middle,
            y + 25,
            f"{planned.num_blocks:,} blocks of 576 KiB",
            anchor="middle",
            bold=True,
        )
        svg.line(left + allowed * pixels, y - 8, left + allowed * pixels, y + 48, width=2)
        svg.text(
            left + allowed * pixels,
            y - 12,
            f"ceil({util} x {total_gib} GiB)",
            size=12,
            anchor="middle",
        )
        svg.text(
            left,
            y + 62,
            f"the log: {planned.printed_tokens:,} tokens, {planned.max_concurrency:.2f}x at 2,048 "
            "tokens per request",
            size=12,
            css="ink mono",
        )
    svg.rect(left, 276, 14, 14, fill=ORANGE, opacity=0.85)
    svg.text(
        left + 20, 288, "fixed: weights, activations, CUDA graphs, context (here 1 GiB)", size=12
    )
    svg.rect(left + 400, 276, 14, 14, css="paper")
    svg.text(left + 420, 288, "not the engine's", size=12)
    svg.text(
        left,
        314,
        f"0.9 / 0.5 is 1.8, the blocks grow {ratio:.3f} times: the fixed part comes off both.",
        size=12,
        css="soft",
    )
    return svg.render()


# ------------------------------------------------------------------ lab 04


def split_and_merge() -> str:
    """One KV head of one request, 4,096 keys: what version one and version two do with it."""
    lab = solution("lab-04-triton-paged-attn")
    context, num_seqs, kv_heads, group, sms = 4096, 64, 8, 4, 132
    plan = lab.plan_splits(num_seqs, kv_heads, context, sms)
    starts = list(range(0, context, plan.keys_per_split))
    sizes = [min(plan.keys_per_split, context - start) for start in starts]
    first_version, second_version = (
        num_seqs * kv_heads * group,
        num_seqs * kv_heads * plan.num_splits,
    )
    svg = Svg(
        780,
        436,
        "Two ways to share out the keys of one KV head",
        f"A KV head of one request with {context:,} keys and {group} query heads. Version one: "
        f"{group} programs, one for each query head, and each walks over all keys. Version two: "
        f"{plan.num_splits} programs, each for all {group} heads over "
        f"{' or '.join(str(n) for n in sorted(set(sizes), reverse=True))} keys, then a merge of "
        f"{plan.num_splits} partial results for each head.",
    )
    left, width = 150.0, 610.0

    svg.text(16, 26, "Version one: a program for each query head", bold=True)
    for head in range(group):
        y = 40 + head * 28
        svg.text(left - 10, y + 15, f"query head {head}", size=12, anchor="end")
        svg.rect(left, y, width, 20, fill=BLUE, opacity=0.75, radius=3)
        for entry in range(1, 32):
            x = left + width * entry / 32
            svg.line(x, y, x, y + 20, css="grid-line")
    svg.text(
        left,
        166,
        f"the same {context:,} keys and values read {group} times, one block of 16 at a time; "
        f"{first_version:,} programs at batch {num_seqs}",
        size=12,
        css="soft",
    )

    svg.text(16, 206, "Version two: a program for each KV head and split", bold=True)
    svg.text(left - 10, 246, f"query heads 0-{group - 1}", size=12, anchor="end")
    colors = (GREEN, ORANGE, BLUE, RED, GREY)
    for index, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        x = left + width * start / context
        length = width * size / context - 3
        color = colors[index % len(colors)]
        svg.rect(x, 222, length, 40, fill=color, opacity=0.75, radius=3)
        for turn in range(1, -(-size // lab.TILE)):
            at = x + length * turn * lab.TILE / size
            svg.line(at, 222, at, 262, css="grid-line")
        svg.text(x + length / 2, 280, f"{size} keys", size=12, anchor="middle")
        svg.line(x + length / 2, 286, x + length / 2, 302, width=1.4, arrow=True)
        svg.box(x + 6, 306, length - 12, 40, ["partial", "result, lse"], fill=color, size=12)
        svg.line(x + length / 2, 348, left + width / 2, 372, width=1.2)
    svg.box(left + width / 2 - 120, 374, 240, 36, ["merge: weights 2 ** lse"], fill=GREY)
    svg.text(left - 10, 330, "in fp32", size=12, anchor="end", css="soft")
    svg.text(
        16,
        428,
        f"each key loaded once for {group} heads, {lab.TILE} at a time; "
        f"{second_version:,} programs at batch {num_seqs}, "
        f"{kv_heads * lab.plan_splits(1, kv_heads, context, sms).num_splits} at batch 1 where "
        f"version one has {kv_heads * group}",
        size=12,
        css="soft",
    )
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "lab-03-memory-to-blocks.svg": memory_to_blocks,
    "lab-04-split-and-merge.svg": split_and_merge,
    "lab-06-write-and-read.svg": write_and_read,
}
