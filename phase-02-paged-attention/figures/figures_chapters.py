"""The figures of the chapters of phase 02.

What shows engine behaviour comes from `mini_vllm`: the film from `course.site.film`, the rest from
managers and engines run here. No upstream counterpart.
"""

from __future__ import annotations

import functools
import textwrap
from collections.abc import Callable

from course.site.film import BlockState, Frame, pool_film
from course.truth.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PURPLE,
    RED,
    Svg,
)
from course.truth.plots import Axes
from mini_vllm.block_pool import ROOT_HASH, BlockPool, hash_block_tokens
from mini_vllm.config import SamplingParams
from mini_vllm.engine import LLMEngine
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.observe.trace import traced_steps
from mini_vllm.request import Request

OWNERS = {"A": BLUE, "B": ORANGE, "C": PURPLE, "D": GREEN}


def request(name: str, token_ids: list[int]) -> Request:
    """A request that only its tokens matter of."""
    return Request(name, token_ids, SamplingParams(max_tokens=64, ignore_eos=True))


def admit(kv: KVCacheManager, new: Request) -> int:
    """Prefill the whole prompt in one step; returns the cached tokens."""
    hits, new.num_computed_tokens = kv.get_computed_blocks(new)
    num_cached = new.num_computed_tokens
    assert kv.allocate_slots(new, new.num_tokens - num_cached, hits) is not None
    new.num_computed_tokens = new.num_tokens
    return num_cached


def decode(kv: KVCacheManager, running: Request, token: int = 1) -> None:
    """One more token."""
    running.append_output_token(token)
    assert kv.allocate_slots(running, 1) is not None
    running.num_computed_tokens += 1


# ------------------------------------------------------------------ the film


@functools.cache
def frames() -> list[Frame]:
    """The film's frames, recorded once per run."""
    return pool_film()["frames"]


def film_frame(number: int) -> str:
    """One frame: the call, the pool, the free queue, the index, the tables."""
    frame = frames()[number]
    call = frame["call"] + (f"  →  {frame['returns']}" if frame["returns"] else "")
    svg = Svg(780, 380, f"Frame {number}: {call}", frame["say"])
    svg.text(16, 24, call, bold=True, size=14, css="ink mono")
    svg.text(764, 24, f"{number} of {len(frames()) - 1}", anchor="end", size=12, css="soft")
    for row, words in enumerate(textwrap.wrap(frame["say"], 116)):
        svg.text(16, 46 + row * 17, words, size=12.5)
    for column, block in enumerate(frame["blocks"]):
        draw_block(svg, 16 + column * 75.2, 80, block, frame)
    svg.text(16, 204, "free queue", size=12, css="soft")
    for place, block_id in enumerate(frame["free_queue"]):
        x, state = 100 + place * 52, frame["blocks"][block_id]
        svg.rect(x, 186, 36, 28, fill=color_of(state), opacity=0.3, radius=4)
        svg.text(x + 18, 205, str(block_id), anchor="middle", bold=True)
        if place:
            svg.line(x - 14, 200, x - 3, 200)
    words = "front: handed out first" if frame["free_queue"] else "empty"
    svg.text(100, 230, words, size=11, css="soft")
    svg.text(16, 262, "index", size=12, css="soft")
    for place, (name, ids) in enumerate(frame["index"].items()):
        words = f"{name}: {', '.join(map(str, ids))}"
        svg.rect(100 + place * 78, 246, 66, 24, fill=GREY, opacity=0.18, radius=4)
        svg.text(133 + place * 78, 263, words, anchor="middle", size=12, css="ink mono")
    if not frame["index"]:
        svg.text(100, 263, "empty", size=12, css="soft")
    svg.text(16, 304, "tables", size=12, css="soft")
    for row, (name, ids) in enumerate(frame["tables"].items()):
        y = 288 + row * 32
        svg.text(100, y + 16, name, bold=True)
        for place, block_id in enumerate(ids):
            opacity = 0.28 if frame["blocks"][block_id]["ref_cnt"] == 1 else 0.6
            svg.rect(124 + place * 42, y, 36, 24, fill=BLUE, opacity=opacity, radius=4)
            svg.text(142 + place * 42, y + 17, str(block_id), anchor="middle")
    if not frame["tables"]:
        svg.text(100, 304, "none", size=12, css="soft")
    svg.text(764, 370, legend(frame), anchor="end", size=11, css="soft")
    return svg.render()


def legend(frame: Frame) -> str:
    """What the outlines of this frame mean."""
    told = "blue: in use, strong: shared, green: free and cached, grey: free and empty"
    if frame["changed"]:
        return told + "; red outline: changed by this call"
    return told + ("; purple outline: hit" if frame["hits"] else "; nothing changed")


def color_of(block: BlockState) -> str:
    """A block's colour by its state, the same as in the book's film."""
    if block["ref_cnt"]:
        return BLUE
    return GREEN if block["hash"] else GREY


def draw_block(svg: Svg, x: float, y: float, block: BlockState, frame: Frame) -> None:
    """One block of the pool, 70 wide."""
    free = block["id"] in frame["free_queue"]
    color = color_of(block)
    opacity = 0.12 if color == GREY else 0.22 if free else 0.28 if block["ref_cnt"] == 1 else 0.6
    outline = None
    if block["id"] in frame["changed"]:
        outline = RED
    elif block["id"] in frame["hits"]:
        outline = PURPLE
    svg.rect(x, y, 70, 88, fill=color, opacity=opacity, radius=6)
    if outline:
        svg.rect(x, y, 70, 88, stroke=outline, radius=6)
        svg.rect(x + 1, y + 1, 68, 86, stroke=outline, radius=5)
    middle = x + 35
    svg.text(middle, y + 17, f"block {block['id']}", anchor="middle", size=11, css="soft")
    if block["is_null"]:
        svg.text(middle, y + 46, "null", anchor="middle", size=13)
        return
    words = block["tokens"].replace(" ", "·") or "-"
    stale = free and not block["hash"]
    css = "soft mono" if stale else "ink mono"
    svg.text(middle, y + 42, words, anchor="middle", size=15, css=css)
    svg.text(middle, y + 62, f"ref {block['ref_cnt']}", anchor="middle", size=12)
    svg.text(middle, y + 79, block["hash"] or "no hash", anchor="middle", size=11, css="soft")


# ------------------------------------------------------------------ from traces


def memory() -> str:
    """Four requests in 256 slots: reserved rooms above, blocks from a real pool below."""
    prompts, outputs = {"A": 21, "B": 5, "C": 44, "D": 14}, {"A": 9, "B": 4, "C": 8, "D": 4}
    kv = KVCacheManager(num_blocks=17, block_size=16)
    live = {}
    for index, (name, length) in enumerate(prompts.items()):
        live[name] = request(name, [index * 100 + i for i in range(length)])
        admit(kv, live[name])
    for step in range(max(outputs.values())):
        for name, running in live.items():
            if step < outputs[name]:
                decode(kv, running)
    used = {name: running.num_tokens for name, running in live.items()}
    total = sum(used.values())
    blocks = sum(len(kv.get_block_ids(name)) for name in live)
    svg = Svg(
        780, 400, "The same four requests in 256 slots, reserved and paged",
        f"Reserved rooms of 64 slots: four requests fill the memory, {total} slots of 256 hold a "
        f"token. Blocks of 16: the same requests hold {blocks} of 16 blocks, and "
        f"{16 - blocks} are free for others.",
    )  # fmt: skip
    svg.text(16, 24, "reserved: one room of 64 slots per request", bold=True)
    svg.text(764, 24, f"{256 - total} slots idle, 0 free", anchor="end", size=12)
    svg.text(16, 214, "paged: blocks of 16 slots, handed out on demand", bold=True)
    svg.text(
        764, 214, f"{blocks * 16 - total} idle, {256 - blocks * 16} free", anchor="end", size=12
    )  # fmt: skip
    cell = 748 / 64
    for row, (name, count) in enumerate(used.items()):
        y = 36 + row * 36
        svg.rect(16, y, 748, 30, stroke=OWNERS[name], radius=4)
        svg.rect(16, y, count * cell, 30, fill=OWNERS[name], opacity=0.45, radius=4)
        svg.text(24, y + 20, f"{name}: {count} tokens", size=12, bold=True)
    for row in range(4):
        for column in range(4):
            svg.rect(16 + column * 188, 226 + row * 36, 184, 30, css="paper", radius=4)
    for name, count in used.items():
        for index, block_id in enumerate(kv.get_block_ids(name)):
            row, column = divmod(block_id - 1, 4)
            x, y = 16 + column * 188, 226 + row * 36
            held = min(16, count - index * 16)
            svg.rect(x, y, 184, 30, stroke=OWNERS[name], radius=4)
            svg.rect(x, y, 184 * held / 16, 30, fill=OWNERS[name], opacity=0.45, radius=4)
            svg.text(x + 8, y + 20, f"{name}, {held} of 16", size=12, bold=True)
            svg.text(x + 176, y + 20, f"block {block_id}", anchor="end", size=11, css="soft")
    free = [b.block_id for b in kv.block_pool.free_queue.get_all_free_blocks()]
    for block_id in free:
        row, column = divmod(block_id - 1, 4)
        words = f"block {block_id}, free"
        svg.text(192 + column * 188, 246 + row * 36, words, anchor="end", size=11, css="soft")
    svg.text(16, 390, "strong: holds a token; outlined: taken and idle", size=12, css="soft")
    return svg.render()


def growth() -> str:
    """Slots held over time: tokens, blocks, and what reservation would hold."""
    engine = LLMEngine(model="toy", num_blocks=65, block_size=16, max_model_len=256)
    arrivals = {0: [(40, 60), (12, 20)], 15: [(90, 30)], 30: [(25, 45), (60, 12)]}
    for length, outputs in arrivals[0]:
        engine.add_request([length] * length, SamplingParams(max_tokens=outputs, ignore_eos=True))
    rows: list[tuple[int, int, int]] = []
    for record in traced_steps(engine):
        held = [r for r in record.block_ids if record.block_ids[r]]
        tokens = sum(record.num_computed_tokens[r] + record.num_scheduled_tokens[r] for r in held)
        slots = 16 * sum(len(record.block_ids[r]) for r in held)
        rows.append((tokens, slots, 256 * len(held)))
        for length, outputs in arrivals.get(record.step + 1, []):
            params = SamplingParams(max_tokens=outputs, ignore_eos=True)
            engine.add_request([length] * length, params)
    svg = Svg(
        780, 330, "Slots taken over the steps of a run",
        "The slots taken in blocks stay within one block per request of the tokens computed; "
        "reserving 256 slots per request would hold several times as much.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 560, 230), (0, len(rows)), (0, 1400))
    axes.frame(
        "step", "KV slots taken",
        range(0, len(rows) + 1, 15), range(0, 1401, 200),
    )  # fmt: skip
    for column, (color, words) in enumerate(
        ((BLUE, "tokens"), (ORANGE, "blocks of 16"), (GREY, "256 per request"))
    ):
        points: list[tuple[float, float]] = []
        for step, row in enumerate(rows):
            points += [(step, row[column]), (step + 1, row[column])]
        axes.curve(points, color, width=2.5, dash="6 4" if color == GREY else None)
        svg.text(764, 70 + column * 22, words, anchor="end", size=12, fill=color, bold=True)
    total = [sum(row[column] for row in rows) for column in range(3)]
    svg.text(764, 200, "in use, of taken:", anchor="end", size=12, css="soft")
    svg.text(764, 220, f"blocks {total[0] / total[1]:.0%}", anchor="end", size=12)
    svg.text(764, 240, f"reserved {total[0] / total[2]:.0%}", anchor="end", size=12)
    return svg.render()


def saw_tooth() -> str:
    """Cached tokens of a prompt's second run, over its length."""
    lengths, size = range(1, 84), 16
    hits = []
    for length in lengths:
        engine = LLMEngine(model="toy", num_blocks=16, block_size=size)
        prompt = list(range(length))
        engine.generate([prompt], SamplingParams(max_tokens=1))
        name = engine.add_request(prompt, SamplingParams(max_tokens=1))
        hits.append(next(iter(traced_steps(engine))).num_cached_tokens[name])
    wrong = [n for n, hit in zip(lengths, hits, strict=True) if hit != (n - 1) // size * size]
    assert not wrong, wrong
    svg = Svg(
        780, 350, "Cached tokens of a repeated prompt, over its length, block size 16",
        "A staircase: nothing up to 16 tokens, 16 from 17 to 32, 32 from 33 to 48 and so on. The "
        "rest, computed again, is a saw-tooth between 1 and 16.",
    )  # fmt: skip
    axes = Axes(svg, (60, 40, 690, 250), (0, 84), (0, 84))
    axes.frame(
        "prompt length, tokens", "tokens",
        range(0, 84, 16), range(0, 84, 16),
    )  # fmt: skip
    pairs = list(zip(lengths, hits, strict=True))
    axes.bars(
        [pair for pair in pairs if pair[1]], GREEN, opacity=0.45,
        tips=[f"length {n}: {hit} cached" for n, hit in pairs if hit],
    )  # fmt: skip
    axes.bars(
        [(n, n - hit) for n, hit in pairs], ORANGE, base=hits, opacity=0.55,
        tips=[f"length {n}: {n - hit} computed again" for n, hit in pairs],
    )  # fmt: skip
    axes.label(61, 20, "cached", dy=0)
    axes.label(25, 40, "computed again: 1 to 16", dx=-170, dy=-20)
    words = "each bar is measured: a prompt sent twice to the engine"
    svg.text(750, 30, words, size=12, css="soft", anchor="end")
    return svg.render()


def chain() -> str:
    """Three prompts of three blocks, each block with the hash mini_vllm gives it."""
    texts = {"A": "Be kind.Hell", "B": "Be kind.Why ", "X": "Oh! ind.Hell"}
    notes = {
        "A": "first in the cache",
        "B": "shares two blocks with A, then leaves",
        "X": "its second and third block hold A's words, after another start",
    }
    svg = Svg(
        780, 290, "A block's hash covers everything before it",
        "A and B have equal hashes in their first two blocks. X repeats the words of A's second "
        "and third block after a different first one, and no hash is equal.",
    )  # fmt: skip
    seen: dict[int, str] = {}
    for row, (name, text) in enumerate(texts.items()):
        y, parent = 44 + row * 84, ROOT_HASH
        svg.text(16, y + 30, name, bold=True, size=15)
        svg.text(16, y - 8, notes[name], size=12, css="soft")
        for place in range(3):
            words = text[place * 4 : place * 4 + 4]
            parent = hash_block_tokens(parent, list(words.encode()))
            known = parent in seen
            x = 48 + place * 246
            svg.rect(x, y, 196, 50, fill=GREEN if known else BLUE, opacity=0.25, radius=6)
            svg.text(x + 12, y + 31, words.replace(" ", "·"), size=16, css="ink mono")
            short = f"…{parent & 0xFFFFFF:06x}"
            svg.text(x + 184, y + 21, short, anchor="end", size=12, css="ink mono")
            said = "a hit" if known else "new"
            svg.text(x + 184, y + 40, said, anchor="end", size=11, css="soft")
            if place < 2:
                svg.line(x + 198, y + 25, x + 243, y + 25, width=1.5, arrow=True)
                svg.text(x + 220, y + 18, "parent", anchor="middle", size=10, css="soft")
            seen.setdefault(parent, name)
    return svg.render()


def queue_order() -> str:
    """Two identical requests freed tail first and head first, then a stranger."""

    class HeadFirst(BlockPool):
        def free_blocks(self, ordered_blocks):  # type: ignore[no-untyped-def]
            super().free_blocks(reversed(list(ordered_blocks)))

    svg = Svg(
        780, 258, "The order of freeing decides what survives",
        "Freed tail first, the queue reads 8, 9, 7 down to 1; a stranger takes 8 and 9, and 28 "
        "tokens of the prefix can still be hit. Freed head first it reads 8, 1, 2 up to 9; the "
        "stranger takes 8 and 1, and nothing can be hit.",
    )  # fmt: skip
    cases: list[tuple[str, type[BlockPool]]] = [
        ("tail first, as vLLM does", BlockPool), ("head first", HeadFirst),
    ]  # fmt: skip
    for row, (name, pool) in enumerate(cases):
        kv, prompt = KVCacheManager(10, 4, block_pool=pool), list(range(32))
        a, b = request("A", prompt), request("B", prompt)
        for new in (a, b):
            admit(kv, new)
        for old in (a, b):
            kv.free(old)
        queue = [block.block_id for block in kv.block_pool.free_queue.get_all_free_blocks()]
        hashed = {block.block_id for block in kv.block_pool.blocks if block.block_hash is not None}
        stranger = request("C", list(range(100, 108)))
        admit(kv, stranger)
        taken = kv.get_block_ids("C")
        hits, num_cached = kv.get_computed_blocks(request("D", prompt))
        reachable = {block.block_id for block in hits}
        y = 50 + row * 110
        svg.text(16, y - 18, name, bold=True)
        svg.text(764, y - 18, f"the prompt again: {num_cached} tokens cached", anchor="end")
        for place, block_id in enumerate(queue):
            x = 16 + place * 84
            color = RED if block_id in taken else GREEN if block_id in reachable else GREY
            svg.rect(x, y, 72, 44, fill=color, opacity=0.3, radius=6)
            svg.text(x + 36, y + 20, str(block_id), anchor="middle", bold=True, size=15)
            words = "taken" if block_id in taken else "hit" if block_id in reachable else "lost"
            if block_id in taken and block_id in hashed:
                words = "evicted"
            svg.text(x + 36, y + 37, words, anchor="middle", size=10.5, css="soft")
            if place:
                svg.line(x - 11, y + 22, x - 2, y + 22)
    svg.text(
        16, 246,
        "front of the queue at the left; evicted: taken by the stranger; lost: cached, but "
        "behind one that is gone",
        size=12, css="soft",
    )  # fmt: skip
    return svg.render()


def layout() -> str:
    """One step's write map and read map, from the batch the runner builds."""
    engine = LLMEngine(model="toy", num_blocks=11, block_size=4)
    params = SamplingParams(max_tokens=8, ignore_eos=True)
    engine.add_request("paged", params)
    for _ in range(2):
        engine.step()
    engine.add_request("blocks", params)
    plan = engine.scheduler.schedule()
    kv = engine.scheduler.kv
    plan.bind(kv)
    batch = engine.runner.prepare_batch(plan)
    names = dict(zip(plan.num_scheduled_tokens, "AB", strict=True))
    owner = {block_id: names[name] for name in names for block_id in kv.get_block_ids(name)}
    svg = Svg(
        780, 330, "One step writes by slot and reads by table",
        "A decodes one token, which goes to slot 10; B prefills six tokens into slots 12 to 17. "
        "Each reads its own table up to its length, and nothing else.",
    )  # fmt: skip
    svg.text(16, 22, "write: slot = block × 4 + offset, one per token of this step", bold=True)
    svg.text(16, 228, "read: block table and length, one per request", bold=True)
    for block_id in range(1, 6):
        x = 16 + (block_id - 1) * 152
        name = owner.get(block_id, "")
        svg.text(x + 70, 188, f"block {block_id}", anchor="middle", size=12, css="soft")
        for offset in range(4):
            slot = block_id * 4 + offset
            svg.rect(
                x + offset * 35, 130, 33, 42, fill=OWNERS.get(name, GREY),
                opacity=0.25 if name else 0.1, radius=3,
            )  # fmt: skip
            svg.text(x + offset * 35 + 16, 155, str(slot), anchor="middle", size=11, css="soft")
    for index, (token, position, slot) in enumerate(
        zip(batch.token_ids, batch.positions, batch.slot_mapping, strict=True)
    ):
        owner_name = "A" if index < batch.query_start_loc[1] else "B"
        block_id, offset = divmod(int(slot), 4)
        x = 40 + index * 102
        target = 16 + (block_id - 1) * 152 + offset * 35 + 16
        svg.rect(x, 38, 88, 44, fill=OWNERS[owner_name], opacity=0.4, radius=5)
        words = chr(token) if 33 <= token < 127 else str(token)
        svg.text(x + 44, 56, f"{owner_name}[{position}] = {words}", anchor="middle", size=12)
        svg.text(x + 44, 74, f"slot {slot}", anchor="middle", size=12, bold=True)
        svg.line(x + 44, 84, target, 127, width=1.3, arrow=True)
    for row, name in enumerate("AB"):
        y, length = 244 + row * 42, int(batch.seq_lens[row])
        table = batch.block_tables[row][: -(-length // 4)]
        svg.text(16, y + 22, name, bold=True, fill=OWNERS[name])
        for place, block_id in enumerate(table):
            svg.rect(44 + place * 46, y, 40, 32, fill=OWNERS[name], opacity=0.4, radius=4)
            svg.text(64 + place * 46, y + 21, str(block_id), anchor="middle", bold=True)
        svg.text(
            200, y + 21,
            f"length {length}: one whole block, and {length % 4} slots of the second",
            size=12,
        )  # fmt: skip
    return svg.render()


# ------------------------------------------------------------------ drawings without data


def tables() -> str:
    """Two block tables over one pool."""
    held = {"A": [4, 1, 7], "B": [2, 9]}
    svg = Svg(
        780, 330, "Sequences are contiguous in their tables, not in memory",
        "A's positions 0 to 15, 16 to 31 and 32 to 34 lie in blocks 4, 1 and 7; B's 0 to 15 and "
        "16 to 24 in blocks 2 and 9. Block 0 is the null block; 3, 5, 6 and 8 are free.",
    )  # fmt: skip
    names = {"A": ["0 to 15", "16 to 31", "32 to 34"], "B": ["0 to 15", "16 to 24"]}
    owner = {block_id: name for name, ids in held.items() for block_id in ids}
    svg.text(16, 24, "what each request sees: positions in order", bold=True)
    svg.text(16, 316, "what the memory holds: blocks in any order", bold=True)
    column = 0
    for name, ids in held.items():
        left = 16 + column * 148
        words = f"{name}'s table: {ids}"
        svg.text(left, 124, words, size=13, css="ink mono", fill=OWNERS[name], bold=True)
        for place, block_id in enumerate(ids):
            x = 16 + column * 148
            svg.rect(x, 40, 140, 56, fill=OWNERS[name], opacity=0.3, radius=6)
            svg.text(x + 70, 64, names[name][place], anchor="middle", bold=True)
            svg.text(x + 70, 84, f"table[{place}] = {block_id}", anchor="middle", size=12)
            target = 16 + block_id * 75.2 + 35
            svg.line(x + 70, 134, target, 212, stroke=OWNERS[name], width=1.6, arrow=True)
            column += 1
    for block_id in range(10):
        x, who = 16 + block_id * 75.2, owner.get(block_id)
        svg.rect(x, 216, 70, 70, fill=OWNERS[who] if who else GREY, opacity=0.3 if who else 0.1,
                 radius=6)  # fmt: skip
        words = who or ("null" if block_id == 0 else "free")
        svg.text(x + 35, 240, str(block_id), anchor="middle", size=15, bold=True)
        svg.text(x + 35, 264, words, anchor="middle", size=12, css="soft")
    return svg.render()


def states() -> str:
    """The life of a block as a state machine."""
    svg = Svg(
        780, 350, "The life of a block",
        "A free empty block is handed out, fills up and is hashed, may be shared, and is freed "
        "with its hash. A free cached block is either revived by a hit or handed out again, which "
        "evicts its content. A block freed before it is full has no hash and returns to free and "
        "empty.",
    )  # fmt: skip
    svg.box(24, 60, 170, 66, ["free, empty", "ref 0, no hash", "in the queue"], fill=GREY, size=13)
    svg.box(310, 60, 170, 66, ["in use, filling", "ref 1, no hash", "in one table"], fill=BLUE)
    svg.box(590, 60, 170, 66, ["in use, full", "ref 1, hash", "in table and index"], fill=BLUE)
    svg.box(590, 220, 170, 66, ["shared", "ref 2 or more, hash", "in several tables"], fill=BLUE)
    svg.box(190, 220, 190, 66, ["free, cached", "ref 0, hash", "in queue and index"], fill=GREEN)
    svg.line(196, 82, 307, 82, width=1.6, arrow=True)
    svg.text(252, 74, "get_new_blocks", anchor="middle", size=11.5)
    svg.line(307, 108, 197, 108, width=1.4, arrow=True)
    svg.text(252, 124, "free before full", anchor="middle", size=11.5, css="soft")
    svg.line(482, 93, 587, 93, width=1.6, arrow=True)
    svg.text(535, 84, "16th token", anchor="middle", size=11.5)
    svg.text(535, 110, "hash it", anchor="middle", size=11.5, css="soft")
    svg.line(650, 128, 650, 217, width=1.6, arrow=True)
    svg.text(643, 178, "touch", anchor="end", size=11.5)
    svg.line(705, 217, 705, 129, width=1.6, arrow=True)
    svg.text(713, 170, "free by", size=11.5)
    svg.text(713, 184, "a sharer", size=11.5)
    svg.line(600, 128, 384, 222, width=1.6, arrow=True)
    svg.text(474, 168, "free: hash kept", anchor="end", size=11.5)
    svg.line(382, 262, 480, 262, width=1.6)
    svg.line(480, 262, 622, 130, width=1.6, arrow=True)
    svg.text(400, 280, "touch: revived", size=11.5)
    svg.line(300, 217, 370, 130, stroke=RED, width=1.6, arrow=True)
    svg.text(330, 158, "get_new_blocks:", anchor="end", size=11.5, fill=RED)
    svg.text(316, 174, "evicted", anchor="end", size=11.5, fill=RED)
    svg.text(24, 330, "in the queue = nobody holds it (I1); only full blocks have a hash (I3); "
             "a cached block may be free (I4)", size=12, css="soft")  # fmt: skip
    return svg.render()


def layers() -> str:
    """Which file of the pinned tree owns what."""
    svg = Svg(
        780, 430, "From the scheduler's question to a byte in memory",
        "The scheduler asks KVCacheManager, which asks a coordinator, which asks one manager per "
        "group of layers, which takes blocks from the pool with its queue and index. Block ids "
        "travel in SchedulerOutput to the worker, whose BlockTable makes block table and slot "
        "mapping for the kernels.",
    )  # fmt: skip
    svg.text(16, 24, "engine core: decides, on the CPU", bold=True)
    svg.text(764, 24, "worker: executes, with the GPU", bold=True, anchor="end")
    rows = [
        ("Scheduler.schedule", "sched/scheduler.py", GREY),
        ("KVCacheManager", "kv_cache_manager.py", BLUE),
        ("KVCacheCoordinator", "kv_cache_coordinator.py", BLUE),
        ("SingleTypeKVCacheManager", "single_type_kv_cache_manager.py", BLUE),
        ("BlockPool", "block_pool.py", ORANGE),
    ]
    asks = ["get_computed_blocks, allocate_slots, free", "the same, for all groups",
            "the same, for one group: tables", "get_new_blocks, touch, free_blocks"]  # fmt: skip
    for row, (name, path, color) in enumerate(rows):
        y = 40 + row * 68
        svg.box(16, y, 250, 44, [name, path], fill=color, size=12.5)
        if row:
            svg.line(141, y - 24, 141, y - 3, width=1.6, arrow=True)
            svg.text(152, y - 9, asks[row - 1], size=11.5, css="soft")
    small = ["FreeKVCacheBlockQueue", "BlockHashToBlockMap", "KVCacheBlock"]
    for place, (name, note) in enumerate(
        zip(small, ("order of reuse", "hash to blocks", "count, hash, links"), strict=True)
    ):
        svg.box(16 + place * 176, 376, 166, 44, [name, note], fill=ORANGE, size=11.5)
        svg.line(141, 358, 99 + place * 176, 373, css="soft-line", arrow=True)
    svg.box(
        530, 40, 234, 44, ["SchedulerOutput", "new block ids per request"], fill=GREY, size=12.5
    )
    svg.line(268, 62, 527, 62, width=1.6, arrow=True)
    svg.text(398, 54, "ids cross, no blocks", anchor="middle", size=11.5, css="soft")
    right = [
        ("BlockTable", "worker/block_table.py", PURPLE),
        ("block_table, slot_mapping", "int32 ids, int64 slots, on the GPU", PURPLE),
        ("write: reshape_and_cache_flash", "csrc/cache_kernels.cu", GREEN),
        ("read: flash_attn_varlen_func", "attention/backends/flash_attn.py", GREEN),
    ]
    for row, (name, note, color) in enumerate(right):
        y = 108 + row * 68
        svg.box(530, y, 234, 44, [name, note], fill=color, size=12.5)
        if row < 3:
            svg.line(647, y - 24, 647, y - 3, width=1.6, arrow=True)
    svg.line(766, 198, 774, 198, width=1.4)
    svg.line(774, 198, 774, 334, width=1.4)
    svg.line(774, 334, 767, 334, width=1.4, arrow=True)
    return svg.render()


FIGURES: dict[str, Callable[[], str]] = {
    "memory.svg": memory,
    "growth.svg": growth,
    "tables.svg": tables,
    "layout.svg": layout,
    "states.svg": states,
    "chain.svg": chain,
    "queue-order.svg": queue_order,
    "saw-tooth.svg": saw_tooth,
    "layers.svg": layers,
}
for _number in range(len(frames())):
    FIGURES[f"film-{_number:02}.svg"] = functools.partial(film_frame, _number)
