"""What releases of vLLM keep of a request's pictures, and what they give up.

    python -m conformance.features.multimodal.frees FILE
    python -m conformance.features.multimodal.frees --rollbacks 1000

The first writes the file of lab 13-06. Each line is a story: calls on a release's own
`EncoderCacheManager`, in the orders in which a scheduler makes them, with the counts after each;
or one call of a release's own `Scheduler._free_encoder_inputs`. The second looks in random
workloads with drafts, pictures and plans ahead for what the third part of the lab is about: a
picture that was released and stands behind the counter again.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from conformance.features.multimodal import recorder
from conformance.features.spec_decode.recorder import with_drafts
from conformance.real_core import RealCore, core_of
from conformance.real_core.answers import Place
from conformance.recorders.run import Run, Stalled

RELEASES = ("0.22.1", "0.27.1", "0.33.0")
SEEDS = range(60)
SIZES = {"A": 4, "B": 4, "C": 3, "D": 6, "E": 1}
"""Embeddings of each picture."""


def request_of(name: str, pictures: str) -> Any:
    """What a manager reads of a request: pictures by letter, one after another."""
    places, at = [], 0
    for letter in pictures:
        places.append(Place(at, SIZES[letter], None))
        at += SIZES[letter] + 1
    features = [
        SimpleNamespace(identifier=letter, mm_hash=letter, mm_position=place)
        for letter, place in zip(pictures, places, strict=True)
    ]
    return SimpleNamespace(
        request_id=name, mm_features=features, has_encoder_inputs=True,
        get_num_encoder_embeds=lambda i: SIZES[pictures[i]],
    )  # fmt: skip


def manager_of(version: str, size: int) -> Any:
    """The release's own class, as its scheduler makes it."""
    workload = recorder.generate(0)
    workload["config"] |= {"encoder_cache_size": size, "encoder_compute_budget": size}
    made = core_of(version).make_scheduler(workload["config"]).encoder_cache_manager
    return type(made)(size)


def story(version: str, seed: int) -> dict[str, Any]:
    """Passes of a scheduler in which requests meet pictures, are computed, refused, and leave.

    A call is [what, request, index of the picture]; `said` is what it answers, and what is there
    after it: free, freeable, cached (in order), and who may be evicted (in order).
    """
    rng = random.Random(seed)
    size = rng.choice((6, 8, 11))
    manager = manager_of(version, size)
    requests = {
        f"r{i}": "".join(rng.choice("ABCDE") for _ in range(rng.choice((1, 2, 2, 3, 4))))
        for i in range(4)
    }
    if seed % 3 == 0:
        requests["r0"] = "ABA"
    real = {name: request_of(name, letters) for name, letters in requests.items()}
    reached: dict[str, int] = dict.fromkeys(requests, 0)
    done: dict[str, int] = dict.fromkeys(requests, 0)
    calls: list[list[Any]] = []

    def call(what: str, name: str = "", index: int = 0) -> Any:
        if what == "enter":  # as a scheduler does for a picture that a chunk reaches
            said: Any = manager.check_and_update_cache(real[name], index)
            if not said and (said := manager.can_allocate(real[name], index, size, 0)):
                manager.allocate(real[name], index)
                said = "encode"
        elif what == "computed":
            said = manager.free_encoder_input(real[name], index)
        elif what == "leaves":
            said = manager.free(real[name])
        else:
            said = manager.get_freed_mm_hashes()
        calls.append([[what, name, index], said, manager.num_free_slots, manager.num_freeable_slots,
                      list(manager.cached), list(manager.freeable)])  # fmt: skip
        return said

    for _ in range(14):
        for name in rng.sample(list(requests), rng.choice((1, 2, 3))):
            while reached[name] < len(requests[name]) and rng.random() < 0.7:
                if call("enter", name, reached[name]) is False:
                    break
                reached[name] += 1
            if rng.random() < 0.12:
                call("leaves", name)
                reached[name] = done[name] = 0
        call("pass ends")
        for name in requests:
            while done[name] < reached[name] and rng.random() < 0.6:
                call("computed", name, done[name])
                done[name] += 1
            if done[name] == len(requests[name]) and rng.random() < 0.4:
                call("leaves", name)
                reached[name] = done[name] = 0
    return {"seed": seed, "size": size, "requests": requests, "calls": calls}


def released(version: str, seed: int, core: RealCore | None = None) -> dict[str, Any]:
    """Which pictures `_free_encoder_inputs` gives up, of a request that stands somewhere.

    `num_output_placeholders` are tokens that are planned and not known: drafts of plans in flight,
    of which any may be rejected. `core` is the release's where it is loaded already.
    """
    rng = random.Random(seed)
    config = recorder.generate(0)["config"] | {
        "encoder_cache_size": 64, "encoder_compute_budget": 64,
    }  # fmt: skip
    scheduler = (core or core_of(version)).make_scheduler(config)
    letters = "".join(rng.sample("ABCDE", rng.choice((1, 2, 3))))
    request = request_of("r", letters)
    ends = [f.mm_position.offset + f.mm_position.length for f in request.mm_features]
    for index in range(len(letters)):
        assert scheduler.encoder_cache_manager.can_allocate(request, index, 64, 0)
        scheduler.encoder_cache_manager.allocate(request, index)
    request.num_computed_tokens = max(0, rng.choice(ends) + rng.choice((-2, -1, 0, 0, 1, 2, 5)))
    request.num_output_placeholders = rng.choice((0, 0, 1, 2, 4))
    scheduler._free_encoder_inputs(request)
    held = [letter for letter in letters if scheduler.encoder_cache_manager.cached[letter]]
    return {
        "seed": seed, "pictures": letters, "num_computed_tokens": request.num_computed_tokens,
        "num_output_placeholders": request.num_output_placeholders,
        "released": [i for i, letter in enumerate(letters) if letter not in held],
    }  # fmt: skip


def cases() -> Iterator[dict[str, Any]]:
    """Every story by every release."""
    for version in RELEASES:
        for seed in SEEDS:
            yield {"release": version, "story": story(version, seed)}
            yield {"release": version, "released": released(version, seed)}


def rollbacks(seeds: range, version: str = "0.22.1") -> tuple[int, int]:
    """Pictures released as computed in random workloads, and those of them that a rejected draft
    then brought back in front of the counter."""
    count = behind = 0
    for seed in seeds:
        workload = (recorder.generate_dense, recorder.generate)[seed % 2](seed)
        workload["config"]["async_scheduling"] = bool(seed % 3)
        run = Run(with_drafts(workload, bool(seed % 3)), core_of(version))
        scheduler = run.scheduler
        gone: dict[tuple[str, int], tuple[int, int]] = {}
        release, update = scheduler._free_encoder_inputs, scheduler.update_from_output

        def noted(request: Any, release: Any = release, gone: Any = gone) -> None:
            manager = scheduler.encoder_cache_manager  # noqa: B023
            before = manager.get_cached_input_ids(request)
            release(request)
            for index in before:
                place = request.mm_features[index].mm_position
                if (end := place.offset + place.length) <= request.num_computed_tokens:
                    gone[request.request_id, index] = end, request.num_preemptions

        def updated(*arguments: Any, update: Any = update, gone: Any = gone) -> Any:
            nonlocal behind
            result = update(*arguments)
            for (name, _), (end, preemptions) in gone.items():
                request = scheduler.requests.get(name)  # noqa: B023
                if request is not None and request.num_preemptions == preemptions:
                    behind += request.num_computed_tokens < end
            return result

        scheduler._free_encoder_inputs, scheduler.update_from_output = noted, updated
        with contextlib.suppress(Stalled):  # the drafter's spin of lab 13-05
            run.recorded()
        count += len(gone)
    return count, behind


def main(argv: list[str]) -> None:
    """Command line; see the module."""
    if argv[0] == "--rollbacks":
        count, behind = rollbacks(range(1000, 1000 + int(argv[1])))
        print(f"{count:,} pictures released as computed; {behind} stood behind the counter again")
        return
    with gzip.GzipFile(Path(argv[0]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")


if __name__ == "__main__":
    main(sys.argv[1:])
