"""Each release on its own parts: 0 differ; on the pin's, or with one rule less: some do."""

from __future__ import annotations

import dataclasses

import pytest

from conformance import hazard, parts, recording, releases, shadow
from conformance.features.core import check_stop
from conformance.real_core import core_of, why_not
from conformance.recorders import combined
from conformance.releases import __main__ as counts
from conformance.releases import differing, features, record, rules, survey
from conformance.replay import first_difference, replay, replay_files
from mini_vllm import LLM, SamplingParams
from mini_vllm.block_pool import BlockPool
from mini_vllm.parts import EngineParts
from mini_vllm.releases import PARTS, PIN, parts_of, v0_27_1, v0_33_0
from mini_vllm.releases.loads import LoadsReserve
from mini_vllm.request import Request, RequestStatus

EVERY = list(releases.RELEASES)
NGRAM = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_min": 2}


@pytest.mark.slow
@pytest.mark.parametrize("version", EVERY)
def test_all_kept_workloads_of_a_release(version):
    release = releases.release_of(version)
    build, make_request = releases.builders(version)
    result = replay_files([release.path], build, make_request, upstream=release.upstream)
    assert (result.num_workloads, len(result.differences)) == (len(releases.SEEDS), 0), result


def table_on(page):
    """The rows of the table on a page, by release."""
    text = (counts.ROOT / page).read_text(encoding="utf-8")
    lines = text.partition("<!-- releases -->")[2].partition("<!-- /releases -->")[0].split("\n")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    assert rows[0] == counts.HEADER
    return {row[0]: row for row in rows[2:]}


@pytest.mark.parametrize("page", counts.PAGES)
def test_the_table_on_a_page_has_every_release_and_says_its_rules(page):
    rows = table_on(page)
    assert tuple(rows) == counts.PAGES[page]
    assert all(row[2] == rules.named(rules.DECIDED_BY[version]) for version, row in rows.items())


@pytest.mark.parametrize("version", EVERY)
def test_the_rows_of_kept_releases_count_what_is_kept(version):
    pin = len(differing.kept(version)["pin"])
    row = [version, f"{pin:,}", counts.named(rules.DECIDED_BY[version]), "0"]
    for page in counts.PAGES:
        assert table_on(page)[version] == row, f"{page}: python -m conformance.releases --write"


@pytest.mark.slow
@pytest.mark.parametrize("version", EVERY)
def test_what_is_kept_of_differences_is_what_a_replay_finds(version):
    """One in eight; `python -m conformance.releases.differing` replays all."""
    release = releases.release_of(version)
    entries = list(recording.read(release.path, release.upstream, lambda line: line % 8 == 0))
    seeds = {entry["seed"] for entry in entries}
    found = {
        name: differing.seeds_of(entries, parts) for name, parts in differing.tried(version).items()
    }
    assert found == {name: of & seeds for name, of in differing.kept(version).items()}
    assert counts.differing(entries, rules.DECIDED_BY[version]) == 0


@pytest.mark.slow
@pytest.mark.parametrize("version", [v for v in rules.DECIDED_BY if v not in EVERY])
def test_a_share_of_the_other_releases_is_decided_by_their_rules(version):
    if problem := why_not(version):
        pytest.skip(problem)
    pin, own = counts.counts(version, range(180))
    assert own == 0
    assert (pin > 0) == (table_on("SINCE_THE_PIN.md")[version][1] != "0")


@pytest.mark.parametrize("version", rules.ALL)
def test_the_rules_of_a_release_are_its_parts(version):
    with_rules, own = rules.parts_with(rules.ALL[version]), parts_of(version)
    assert with_rules.block_pool is own.block_pool
    assert with_rules.kv_cache_manager is own.kv_cache_manager
    for theirs, ours in (
        (with_rules.scheduler, own.scheduler), (with_rules.async_scheduler, own.async_scheduler),
    ):  # fmt: skip
        of_loads = {LoadsReserve}  # proved with connectors, where they are served
        assert set(theirs.__mro__[1:]) == set(ours.__mro__[1:]) - of_loads
    assert with_rules.of_room("lora", "adapter_gate", 0) == own.of_room("lora", "adapter_gate", 0)
    assert set(rules.DECIDED_BY[version]) <= set(rules.ALL[version])


def test_every_release_with_parts_has_its_rules():
    assert [PIN, *rules.ALL] == list(PARTS)


@pytest.mark.parametrize(
    ("names", "problem"), [(("99",), "need some of"), (("1", "1 with caching"), "at most one")]
)
def test_rules_that_cannot_be_had_together_are_refused(names, problem):
    with pytest.raises(ValueError, match=problem):
        rules.parts_with(names)


@pytest.mark.slow
def test_a_release_is_explained_kind_by_kind():
    if problem := why_not("0.32.0"):
        pytest.skip(problem)
    text = list(survey.report(core_of("0.32.0"), 30))
    plain = next(line for line in text if line.startswith("plain"))
    assert plain.split()[1:] == ["30", "26", "0", "0", "1,", "2"]
    assert not any("no set of rules is enough" in line for line in text)


SHOWN_BY = {
    "6": ("0.23.0", {"drafts"}, 2, ()),
    "7": ("0.25.0", {"drafts"}, 3, ()),
    "7 with hits": ("0.30.0", {"drafts"}, 3, ("7 with room",)),
    "8": ("0.27.1", {"drafts", "async"}, 1, ()),
    "9": ("0.28.0", {"drafts"}, 11, ()),
    "10": ("0.31.0", {"grammars"}, 0, ()),
    "11": ("0.33.0", {"adapters", "async"}, 0, ()),
    "12": ("0.33.0", {"drafts"}, 12, ()),
    "13": ("0.33.0", {"drafts"}, 2, ()),
}
"""Rule -> release, features and seed of a workload that shows it, and what stands in its place."""


@pytest.mark.slow
@pytest.mark.parametrize("rule", SHOWN_BY)
def test_a_rule_of_a_feature_left_out_or_misread_is_caught(rule):
    version, wanted, seed, instead = SHOWN_BY[rule]
    if problem := why_not(version):
        pytest.skip(problem)
    entry = combined.run(combined.generate(seed, wanted), core_of(version))
    every = rules.ALL[version]
    for chosen, is_alike in ((every, True), ((*(r for r in every if r != rule), *instead), False)):
        assert (replay(entry, *releases.builders(rules.parts_with(chosen)))[1] is None) is is_alike


@pytest.mark.parametrize(("version", "num_hits"), [("0.32.0", 16), ("0.33.0", 32)])
def test_a_hit_keeps_its_last_block_where_hashes_look_ahead(version, num_hits):
    """And what it keeps is right: the answers are those without a hit."""
    spec = {"method": "mtp", "model": "models/byte-mtp", "num_speculative_tokens": 2}
    llm = LLM("byte-llama", dtype="float64", release=version, speculative_config=spec)
    params = SamplingParams(max_tokens=6)
    prompt = "The scheduler frees the block of a ".ljust(33)[:33]
    first, again = (llm.generate([prompt], params)[0] for _ in range(2))
    (other,) = llm.generate([prompt[:32] + "!"], params)
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, num_hits)
    assert other.num_cached_tokens == 16, "the token behind the second block is another one"
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def near_the_models_length():
    """Who comes second has eight of nine tokens cached, and no room for four drafts."""
    workload = combined.generate(3, {"drafts"})
    workload["config"] |= {
        "num_blocks": 40, "block_size": 4, "max_num_seqs": 4, "max_num_batched_tokens": 64,
        "long_prefill_token_threshold": 0, "enable_prefix_caching": True, "max_model_len": 12,
        "policy": "fcfs", "speculative": {"method": "ngram", "num_speculative_tokens": 4},
    }  # fmt: skip
    one = {
        "prompt_token_ids": list(range(3, 12)), "max_tokens": 3, "ignore_eos": True, "priority": 0,
    }  # fmt: skip
    workload["events"] = [
        {
            "step": step,
            "add": [{**one, "request_id": name, "arrival_time": float(step)}],
            "abort": [],
        }
        for step, name in enumerate(("first", "second"))
    ]
    workload["outputs"] = {name: [9] * 9 for name in ("first", "second")}
    return workload


@pytest.mark.slow
@pytest.mark.parametrize(("version", "step"), [("0.28.0", 3), ("0.29.0", 1)])
def test_padding_that_the_models_length_does_not_hold_makes_wait_until_0_29(version, step):
    if problem := why_not(version):
        pytest.skip(problem)
    entry = combined.run(near_the_models_length(), core_of(version))
    assert next(i for i, s in enumerate(entry["steps"]) if "second" in s["new"]) == step
    assert replay(entry, *releases.builders(version))[1] is None
    instead = {"0.28.0": "7 with room", "0.29.0": "7"}[version]
    misread = (*(r for r in rules.ALL[version] if not r.startswith("7")), instead)
    assert replay(entry, *releases.builders(rules.parts_with(misread)))[1] is not None


def test_the_table_of_features_says_what_the_engine_takes():
    rows = features.rows_kept()
    assert list(rows) == list(PARTS), "python -m conformance.releases.features --write"
    for version, cells in rows.items():
        assert cells[-1] == features.elsewhere(version)
        for kind, cell in zip(features.KINDS, cells[1:-1], strict=True):
            takes = features.is_served(version, features.KINDS[kind](1))
            how, _, counted = cell.partition(": ")
            assert how == ("served" if takes else "refused"), (version, kind)
            differ, _, of = counted.partition(" of ")
            assert int(of) >= 90 and (not takes or differ == "0"), (version, kind)


@pytest.mark.slow
@pytest.mark.parametrize("version", PARTS)
def test_workloads_with_features_are_recorded_anew_from_each_archive(version):
    if problem := why_not(version):
        pytest.skip(problem)
    row = features.row(version, [3])
    assert [cell for cell in row if cell.startswith("served") and ": 0 of" not in cell] == []


REFUSED = {
    "0.23.0": ({"tensor_parallel_size": 2},),
    "0.27.1": ({"tensor_parallel_size": 2},),
    "0.33.0": ({"kv_transfer_config": {"kv_connector": "simulated"}}, {"tensor_parallel_size": 2}),
}


@pytest.mark.parametrize("version", REFUSED)
def test_a_feature_that_was_not_compared_with_a_release_is_refused_by_name(version):
    for asked in REFUSED[version]:
        (name,) = asked
        with pytest.raises(ValueError, match=f"release='{version}' with {name}: need a release"):
            LLM("toy", release=version, **asked)


@pytest.mark.parametrize("version", EVERY)
def test_a_kept_release_is_recorded_again_from_its_archive(version):
    if problem := why_not(version):
        pytest.skip(problem)
    release = releases.release_of(version)
    first = next(recording.read(release.path, release.upstream))
    assert list(record.kept(version, [first["seed"]])) == [first]


@pytest.mark.slow
def test_what_else_is_kept_of_0_33_0_is_recorded_again_from_its_archive():
    if problem := why_not("0.33.0"):
        pytest.skip(problem)
    for name, made in (("hazard", record.hazard), ("check_stop", record.stops)):
        kept = recording.lines(releases.FOLDER / f"{name}-0.33.0.jsonl.gz")
        assert list(made("0.33.0")) == kept, name


def less(**rules):
    """The parts of 0.33.0 with one of them as it was."""
    return dataclasses.replace(parts_of("0.33.0"), **rules)


class NoLoneRule(v0_33_0.ResumedAreNew, v0_33_0.ScanGoesOn):
    """0.33.0 without the lone request's rule."""


class NoLabelRule(v0_33_0.LoneRequestUncapped, v0_33_0.ScanGoesOn):
    """0.33.0 with resumed requests apart."""


class NoScanRule(v0_33_0.LoneRequestUncapped, v0_33_0.ResumedAreNew):
    """0.33.0 where a request that preempts itself ends the scan."""


class OnlyRunningCount(parts_of("0.33.0").scheduler):
    """A request counts as alone although others wait."""

    def _clamp_new_tokens(self, num_new_tokens, token_budget):
        self._alone = len(self.running) <= 1
        return super()._clamp_new_tokens(num_new_tokens, token_budget)


class BackToFront(v0_33_0.UnhashedFirstAlways):
    """Unhashed blocks prepended one by one, so that the last of them comes out first."""

    def free_blocks(self, ordered_blocks):
        blocks = list(ordered_blocks)
        for block in blocks:
            block.ref_cnt -= 1
        for block in blocks:
            if block.ref_cnt == 0 and not block.is_null:
                if self.is_worthless(block):
                    v0_27_1.prepend(self.free_queue, [block])
                else:
                    self.free_queue.append(block)


@pytest.mark.parametrize(
    "parts",
    [
        less(block_pool=BlockPool),
        less(block_pool=v0_27_1.UnhashedFirst),
        less(block_pool=BackToFront),
        less(scheduler=NoLoneRule),
        less(scheduler=OnlyRunningCount),
        less(scheduler=NoLabelRule),
        less(scheduler=NoScanRule),
    ],
    ids=lambda parts: parts.scheduler.__name__ + " " + parts.block_pool.__name__,
)
def test_a_rule_left_out_or_misread_is_caught(parts):
    release = releases.release_of("0.33.0")
    build, make_request = releases.builders(parts)
    difference = first_difference(release.path, build, make_request, upstream=release.upstream)
    assert difference is not None


@pytest.mark.parametrize("pool", [BlockPool, v0_33_0.UnhashedFirstAlways])
def test_the_free_queue_of_0_27_1_is_neither_the_pins_nor_0_33_0s(pool):
    release = releases.release_of("0.27.1")
    build, make_request = releases.builders(EngineParts(block_pool=pool))
    assert first_difference(release.path, build, make_request, upstream=release.upstream)


def test_the_priority_hazard_is_still_there_in_0_33_0():
    release = releases.release_of("0.33.0")
    path = releases.FOLDER / "hazard-0.33.0.jsonl.gz"
    (entry,) = recording.read(path, release.upstream)
    assert {key: entry[key] for key in hazard.WITH_A_THIRD} == hazard.WITH_A_THIRD
    assert len(shadow.stale_reads(entry)) == 8
    build, make_request = releases.builders("0.33.0")
    assert first_difference(path, build, make_request, upstream=release.upstream) is None


@pytest.mark.slow
def test_the_pins_engine_differs_from_later_releases_where_they_changed():
    entries = {v: recording.read(r.path, r.upstream) for v, r in releases.RELEASES.items()}
    first = {v: [next(e) for _ in range(60)] for v, e in entries.items()}
    differ = {v: sum(replay(entry)[1] is not None for entry in first[v]) for v in EVERY}
    assert differ["0.23.0"] == 0 < differ["0.27.1"] < differ["0.33.0"]


def stops_that_differ(request_class):
    release = releases.release_of("0.33.0")
    cases = parts.load("check_stop-0.33.0", releases.FOLDER, release.upstream)
    assert len(cases) == 10_920
    return sum(bool(parts.replay_check_stop(case, request_class)) for case in cases)


class LengthBeforeMinTokens(Request):
    """Only the length limits come before min_tokens, not the stop tokens."""

    def maybe_finish(self, max_model_len=None):
        num_output_tokens, params = self.num_output_tokens, self.sampling_params
        if 0 < num_output_tokens < params.min_tokens and (
            num_output_tokens >= params.max_tokens or self.num_tokens >= max_model_len
        ):
            self.status = RequestStatus.FINISHED_LENGTH
            return True
        return super().maybe_finish(max_model_len)


class LengthFirst(v0_33_0.StopBeforeMinTokens):
    """The model's length is asked before the stop tokens, too."""

    def maybe_finish(self, max_model_len=None):
        if self.num_output_tokens and self.num_tokens >= max_model_len:
            self.status = RequestStatus.FINISHED_LENGTH
            return True
        return super().maybe_finish(max_model_len)


@pytest.mark.slow
def test_requests_end_where_the_check_of_0_33_0_ends_them():
    assert stops_that_differ(parts_of("0.33.0").request) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("version", "others"), [("0.28.0", "0.29.0"), ("0.29.0", "0.28.0")])
def test_stops_come_before_min_tokens_since_0_29_0(version, others):
    if problem := why_not(version):
        pytest.skip(problem)
    cases = list(check_stop.cases(core_of(version)))
    assert not any(parts.replay_check_stop(case, parts_of(version).request) for case in cases)
    assert any(parts.replay_check_stop(case, parts_of(others).request) for case in cases)


@pytest.mark.slow
def test_the_pins_stop_check_and_misread_ones_are_caught():
    assert stops_that_differ(Request) == 888
    assert stops_that_differ(LengthBeforeMinTokens) > 0
    assert stops_that_differ(LengthFirst) > 0


def stopped(request_class, tokens, min_tokens, max_tokens, max_model_len):
    request = request_class(
        "r", [1, 1], SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens), eos_token_id=2
    )
    for token in tokens:
        request.append_output_token(token)
    return request.maybe_finish(max_model_len), request.status


def test_min_tokens_holds_nothing_back_that_ends_a_request_in_0_33_0():
    case = ([5, 5], 4, 8, 4)  # the model's length, before min_tokens
    assert stopped(Request, *case) == (False, RequestStatus.WAITING)
    assert stopped(parts_of("0.33.0").request, *case) == (True, RequestStatus.FINISHED_LENGTH)
    case = ([5, 2], 4, 8, 99)  # EOS, which sampling would have masked
    assert stopped(Request, *case) == (False, RequestStatus.WAITING)
    assert stopped(parts_of("0.33.0").request, *case) == (True, RequestStatus.FINISHED_STOPPED)


@pytest.mark.slow
def test_every_kept_release_serves_the_same_text():
    prompts = ["The scheduler", "def add(a, b):"]
    texts = {
        version: [
            output.outputs[0].text
            for output in LLM(
                num_blocks=24, block_size=4, dtype="float64", release=version
            ).generate(prompts, SamplingParams(max_tokens=12))
        ]
        for version in (PIN, *EVERY)
    }
    assert len({tuple(text) for text in texts.values()}) == 1, texts


def test_what_is_under_way_at_a_reset_is_dropped_as_at_the_pin():
    said = {}
    for version in (PIN, "0.33.0"):
        engine = LLM("toy", release=version, block_size=4, async_scheduling=True).llm_engine
        texts = said[version] = {}
        for name in "abc":
            params = SamplingParams(max_tokens=6, temperature=0.0)
            engine.add_request([ord(name)] * 9, params, request_id=name)
        for step in range(40):
            if step == 4:
                engine.reset_prefix_cache(reset_running_requests=True)
            texts |= {request.request_id: list(request.all_token_ids) for request in engine.step()}
    assert (
        said[PIN] == said["0.33.0"] and [len(tokens) for tokens in said[PIN].values()] == [15] * 3
    )


def test_pictures_beside_0_27_1_are_refused_with_plans_ahead():
    """There a picture at the end of a prompt is released a step later than at the pin."""
    with pytest.raises(ValueError, match=r"release='0\.27\.1' with a multimodal model and async"):
        LLM("byte-sees", release="0.27.1", async_scheduling=True)


def test_a_threshold_that_would_cut_padding_is_refused():
    asked = {"speculative_config": NGRAM, "long_prefill_token_threshold": 2}
    with pytest.raises(ValueError, match=r"release='0\.26\.0' with long_prefill_token_threshold=2"):
        LLM("toy", release="0.26.0", **asked)
    assert LLM("toy", release="0.24.0", **asked)


@pytest.mark.parametrize(("method", "is_async"), [("ngram", False), ("ngram_gpu", True)])
def test_who_is_padded_says_what_the_pin_says(method, is_async):
    said, plans = {}, []
    for version in (PIN, "0.33.0"):
        llm = LLM(
            "toy", release=version, num_blocks=24, block_size=4, max_num_seqs=3,
            async_scheduling=is_async, speculative_config={**NGRAM, "method": method},
        )  # fmt: skip
        llm.llm_engine.observers.append(plans.append)
        params = SamplingParams(max_tokens=8, temperature=0.0)
        outputs = llm.generate(["abcdabcdabcde"] * 6, params)
        said[version] = [output.outputs[0].token_ids for output in outputs]
    assert said[PIN] == said["0.33.0"]
    padded = [p for p in plans if p.spec_token_ids.keys() & set(p.scheduled_new_req_ids)]
    assert padded and all(-1 not in drafts for p in padded for drafts in p.spec_token_ids.values())


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_a_release_can_plan_ahead(async_scheduling):
    llm = LLM("toy", release="0.33.0", async_scheduling=async_scheduling)
    assert len(llm.generate("abc")[0].outputs[0].token_ids) == 16


def test_an_unknown_release_is_refused_by_name():
    with pytest.raises(ValueError, match=r"release='0\.22\.0': need one of 0\.22\.1, 0\.23\.0"):
        LLM(release="0.22.0")
    with pytest.raises(ValueError, match=r"parts and release='0\.33\.0': need one or the other"):
        LLM(release="0.33.0", parts=EngineParts())


def test_a_release_that_ranks_cannot_serve_is_named_as_it_was_asked_for():
    with pytest.raises(ValueError, match=r"release='0\.33\.0' with pipeline_parallel_size: need"):
        LLM(release="0.33.0", pipeline_parallel_size=2)
