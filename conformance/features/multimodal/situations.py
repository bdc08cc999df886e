"""How often each situation of pictures occurs in the recordings with pictures.

Everything is read off the recordings alone; `python -m conformance.situations` counts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from conformance.steps import Situations, Step, counted

Item = Mapping[str, Any]


def _end(item: Item) -> int:
    return int(item["offset"] + item["length"])


def _size(item: Item) -> int:
    return sum(item["is_embed"]) if "is_embed" in item else int(item["length"])


@dataclass(frozen=True, slots=True)
class _Step(Step):
    """One step of a recording, and what its chunks cover."""

    def items(self, request_id: str) -> Sequence[Item]:
        return self.adds[request_id]["mm"] if request_id in self.adds else ()

    @property
    def is_async(self) -> bool:
        return bool(self.config.get("async_scheduling"))

    def chunks(self) -> Iterator[tuple[str, int, int]]:
        """Each scheduled request, where its chunk starts and where it ends."""
        for request_id, count in self.now["num_scheduled_tokens"].items():
            end = self.now["num_computed_tokens"][request_id]
            yield request_id, end - count, end

    def covered(self) -> Iterator[tuple[str, int, Item, int, int]]:
        """Each picture that a chunk overlaps: request, number, picture, the chunk's two ends."""
        for request_id, start, end in self.chunks():
            for number, item in enumerate(self.items(request_id)):
                if item["offset"] < end and _end(item) > start:
                    yield request_id, number, item, start, end

    @property
    def encoded(self) -> dict[str, list[int]]:
        return dict(self.now["encoder_inputs"])

    def hashes(self) -> list[str]:
        """Of the pictures that are encoded in this step."""
        return [self.items(r)[i]["hash"] for r, which in self.encoded.items() for i in which]

    def encoded_before(self) -> set[str]:
        """Hashes of the pictures encoded in an earlier step."""
        return {
            self.adds[r]["mm"][i]["hash"]
            for step in self.entry["steps"][: self.index]
            for r, which in step["encoder_inputs"].items() for i in which
        }  # fmt: skip

    def is_outside(self, mm_hash: str, step: int | None = None) -> bool:
        """Whether the rows of a picture are outside at this step, or at another."""
        at = self.index if step is None else step
        changes = self.config.get("ec_has", {}).get(mm_hash, ())
        return sum(change <= at for change in changes) % 2 == 1

    @property
    def loaded(self) -> list[str]:
        """Hashes of the pictures whose rows the worker is told to load."""
        return [mm_hash for mm_hash, _ in self.now.get("ec_loads", ())]

    @property
    def left(self) -> int:
        """Tokens of the step's budget that nobody got."""
        return int(
            self.config["max_num_batched_tokens"] - sum(self.now["num_scheduled_tokens"].values())
        )

    def cut(self) -> Iterator[tuple[str, Item]]:
        """Requests whose chunk ends where a picture begins, though budget and threshold allow
        more."""
        threshold = self.config["long_prefill_token_threshold"]
        for request_id, start, end in self.chunks():
            for item in self.items(request_id):
                if item["offset"] == end and self.left and (end - start) != threshold:
                    yield request_id, item

    def found(self) -> Iterator[tuple[str, Item]]:
        """Pictures a chunk enters whose encoder does not run, and nothing loads: their rows are
        there."""
        for request_id, number, item, start, _ in self.covered():
            mine = self.encoded.get(request_id, [])
            same = any(self.items(request_id)[i]["hash"] == item["hash"] for i in mine)
            came = same or item["hash"] in self.loaded
            if start <= item["offset"] and number not in mine and not came:
                yield request_id, item

    def live(self) -> set[str]:
        """Requests that run, or have run and are not gone."""
        return set(self.now["running"])


def _blocked(step: _Step) -> bool:
    """A running request whose prompt is not computed gets nothing, though budget is left."""
    got = step.now["num_scheduled_tokens"]
    computed = step.now["num_computed_tokens"]
    return bool(step.left) and any(
        r not in got and any(_end(item) > computed.get(r, 0) for item in step.items(r))
        for r in step.now["running"]
    )


def _revived(step: _Step) -> bool:
    """The rows of a picture are there, and no other request that lives has the picture."""
    return any(
        not any(
            item["hash"] == other["hash"]
            for r in step.live() - {request_id} for other in step.items(r)
        )
        for request_id, item in step.found() if request_id in step.now["new"]
    )  # fmt: skip


def _second_place_encoded_again(step: _Step) -> bool:
    """A request's picture is encoded for its second place, after it was for its first."""
    for request_id, which in step.encoded.items():
        items = step.items(request_id)
        for i in which:
            first = [j for j in range(i) if items[j]["hash"] == items[i]["hash"]]
            if first and items[i]["hash"] in step.encoded_before():
                return True
    return False


def _covers_no_row(step: _Step) -> bool:
    """A chunk covers only tokens of a picture that take no row, and its encoder does not run."""
    for request_id, number, item, start, end in step.covered():
        if "is_embed" not in item or number in step.encoded.get(request_id, []):
            continue
        if not _takes_rows(item, start, end):
            return True
    return False


def _inside_hit(step: _Step) -> bool:
    return any(
        item["offset"] < start < _end(item)
        for request_id, start, _ in step.chunks() if request_id in step.admitted
        for item in step.items(request_id)
    )  # fmt: skip


def _hit_behind(step: _Step) -> bool:
    return any(
        _end(item) <= start
        for request_id, start, _ in step.chunks() if request_id in step.now["new"]
        for item in step.items(request_id)
    )  # fmt: skip


def _heads(step: _Step, key: str) -> bool:
    """Two prompts begin with the same tokens up to a picture's block, under different `key`."""
    size = step.config["block_size"]
    first: dict[tuple[int, ...], set[Any]] = {}
    for add in step.adds.values():
        prompt = tuple(add["prompt_token_ids"][:size])
        inside = [item for item in add["mm"] if item["offset"] < size]
        if len(prompt) == size and inside:
            first.setdefault(prompt, set()).add(inside[0][key])
    return step.index == 0 and any(len(values) > 1 for values in first.values())


def _shared(step: _Step) -> bool:
    """A newcomer adopts a block that holds a picture."""
    size = step.config["block_size"]
    return any(
        item["offset"] < start // size * size
        for request_id, start, _ in step.chunks() if request_id in step.now["new"]
        for item in step.items(request_id)
    )  # fmt: skip


def _same_twice(step: _Step) -> bool:
    return step.index == 0 and any(
        len({item["hash"] for item in add["mm"]}) < len(add["mm"]) for add in step.adds.values()
    )


def _once_for_both(step: _Step) -> bool:
    """A chunk covers two places of a picture, and its encoder runs once."""
    places: dict[tuple[str, str], int] = {}
    for request_id, _, item, *_ in step.covered():
        places[request_id, item["hash"]] = places.get((request_id, item["hash"]), 0) + 1
    return any(
        count > 1 and item["hash"] == mm_hash
        for (request_id, mm_hash), count in places.items()
        for item in (step.items(request_id)[i] for i in step.encoded.get(request_id, []))
    )


def _budget_used_up(step: _Step) -> bool:
    used = sum(_size(step.items(r)[i]) for r, which in step.encoded.items() for i in which)
    return bool(used) and used == step.config["encoder_compute_budget"]


def _ghost(step: _Step) -> bool:
    """A chunk takes rows of a picture whose encoder has run neither now nor before."""
    computed = step.encoded_before() | set(step.hashes())
    computed |= {h for s in step.entry["steps"][: step.index + 1] for h, _ in s.get("ec_loads", ())}
    return step.config.get("ec_role") != "ec_producer" and any(
        item["hash"] not in computed and _takes_rows(item, start, end)
        for *_, item, start, end in step.covered()
    )


def _takes_rows(item: Item, start: int, end: int) -> bool:
    """Whether a chunk covers a token of a picture that takes a row."""
    low, high = max(0, start - item["offset"]), min(item["length"], end - item["offset"])
    return any(item.get("is_embed", [1] * item["length"])[low:high])


def _waits_for_budget(step: _Step) -> bool:
    """A chunk ends before a picture whose rows are outside and for which the cache has room."""
    return not step.config["disable_chunked_mm_input"] and any(
        step.is_outside(item["hash"]) and step.now["encoder_free"][1] >= _size(item)
        for _, item in step.cut()
    )


def _victim_loaded(step: _Step) -> bool:
    """What a preempted request alone would take is loaded all the same."""
    victims = step.now["preempted"]
    planned = {i["hash"] for r in step.now["num_scheduled_tokens"] for i in step.items(r)}
    theirs = {item["hash"] for r in victims for item in step.items(r)}
    return bool(theirs & set(step.loaded) - planned)


def _skipped_by_producer(step: _Step) -> bool:
    """An engine that does not consume enters a picture whose rows are outside: no encoder runs."""
    return step.config.get("ec_role") == "ec_producer" and any(
        step.is_outside(item["hash"]) for _, item in step.found()
    )


def _with_pictures(step: _Step, ids: Sequence[str]) -> list[str]:
    return [r for r in ids if step.items(r)]


_SITUATIONS: Situations[_Step] = {
    "an encoder runs": ("a chunk reaches a picture", lambda s: s.encoded),
    "encoders of several requests": (
        "one budget for all of them", lambda s: len(s.encoded) > 1,
    ),
    "several pictures of a request": (
        "in one step", lambda s: any(len(which) > 1 for which in s.encoded.values()),
    ),
    "the budget is used up": ("to the last embedding", _budget_used_up),
    "a chunk ends inside a picture": (
        "the encoder has run for all of it",
        lambda s: any(end < _end(item) for *_, item, _, end in s.covered()),
    ),
    "a chunk begins inside a picture": (
        "the rows are there from a step before",
        lambda s: any(start > item["offset"] for *_, item, start, _ in s.covered()),
    ),
    "a chunk is cut before a picture": (
        "it cannot be encoded now: the text in front of it goes on", lambda s: any(s.cut()),
    ),
    "cut to keep a picture whole": (
        "`disable_chunked_mm_input`",
        lambda s: s.config["disable_chunked_mm_input"] and any(s.cut()),
    ),
    "a running request gets nothing": (
        "its chunk would begin with a picture that cannot be encoded", _blocked,
    ),
    "rows from the cache": ("a chunk enters a picture, no encoder runs", lambda s: any(s.found())),
    "rows of a request that is gone": ("nobody else that lives has the picture", _revived),
    "an eviction": ("room is needed", lambda s: s.now["freed_encoder_hashes"]),
    "several evictions": (
        "in one step: their order matters", lambda s: len(s.now["freed_encoder_hashes"]) > 1,
    ),
    "evicted for nothing": (
        "room was made, and no encoder runs",
        lambda s: s.now["freed_encoder_hashes"] and not s.encoded,
    ),
    "evicted and encoded in one step": (
        "the worker is told to drop what it is told to compute (52482)",
        lambda s: set(s.now["freed_encoder_hashes"]) & set(s.hashes()),
    ),
    "encoded again": (
        "its rows had been evicted, or are only counted",
        lambda s: set(s.hashes()) & s.encoded_before(),
    ),
    "two places of a picture": ("in one prompt", _same_twice),
    "encoded once for both places": ("in one chunk", _once_for_both),
    "encoded again for its second place": (
        "the reference went with the first (54284)", _second_place_encoded_again,
    ),
    "a picture with a mask": (
        "some of its tokens take no row",
        lambda s: any("is_embed" in s.items(r)[i] for r, w in s.encoded.items() for i in w),
    ),
    "a chunk covers no row": ("only tokens of a picture that take none", _covers_no_row),
    "a hit behind a picture": ("its K and V are there, no encoder runs", _hit_behind),
    "a hit ends inside a picture": ("the encoder runs for the rest", _inside_hit),
    "a block with a picture is shared": ("a newcomer adopts it", _shared),
    "same tokens, another picture": ("in the first block", lambda s: _heads(s, "hash")),
    "a preemption": (
        "of a request with pictures", lambda s: _with_pictures(s, s.now["preempted"]),
    ),
    "a preemption under priority": (
        "the victim may have been planned already",
        lambda s: not s.is_fcfs and _with_pictures(s, s.now["preempted"]),
    ),
    "rows that were never computed": (
        "a victim that had been planned is withdrawn, its pictures stay counted as cached", _ghost,
    ),
    "an abort": ("of a request with pictures that runs",
        lambda s: set(_with_pictures(s, list(s.aborted))) & set(s.before.get("running", ())),
    ),
    "rows are outside": (
        "an `ec_connector` has those of a request that lives or waits",
        lambda s: any(
            s.is_outside(item["hash"])
            for r in (*s.now["running"], *s.now["waiting"]) for item in s.items(r)
        ),
    ),
    "rows are loaded": ("no encoder runs", lambda s: s.loaded),
    "rows of several pictures are loaded": ("in one step", lambda s: len(s.loaded) > 1),
    "loaded and encoded in one step": (
        "of two pictures one is outside", lambda s: s.loaded and s.encoded,
    ),
    "loaded after it was encoded here": (
        "its rows had been evicted, and are outside now",
        lambda s: set(s.loaded) & s.encoded_before(),
    ),
    "encoded since its rows are gone outside": (
        "they were there at an earlier step",
        lambda s: any(s.is_outside(h, at) for h in s.hashes() for at in range(s.index)),
    ),
    "waits for the encoder's budget, though its rows are outside": (
        "the connector is asked last", _waits_for_budget,
    ),
    "loaded for a victim": ("it was planned, and is withdrawn", _victim_loaded),
    "a producer leaves out what is outside": (
        "nothing is loaded there either", _skipped_by_producer,
    ),
    "the next step is planned already": (
        "a picture is released by the update of an older plan",
        lambda s: s.is_async and s.encoded and s.before.get("num_scheduled_tokens"),
    ),
}  # fmt: skip

COUNTED = counted(
    "multimodal-situations",
    ("encoder", "encoder_dense", "encoder_async", "encoder_ec"),
    _Step,
    _SITUATIONS,
)
