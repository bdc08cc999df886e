"""What lab 07-05 pins: the pinned oracles' 640 choices, and the fewest changes to another one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from course.files import load_module
from labkit import refused, same

given = load_module(Path(__file__).parent / "given.py", "lab_07_05_given")
FOUND = {tuple(given.layer_of(case).values()): case for case in given.cases()}
KERNELS = ("flashinfer", "deployment")
SIX = [
    (("9.0", True, "fp8_block", "tp", False), {"backend": "DEEPGEMM"}, KERNELS),
    (("8.0", True, "mxfp4", "dp_ep_ll", True), {}, KERNELS),
    (("10.0", False, "nvfp4", "dp_ep_ll", False), {"batched": True}, KERNELS),
    (("10.0", True, "fp8_block", "dp_ep", False), {"monolithic": False}, ("deployment",)),
    (("9.0", True, "mxfp4", "tp", True), {"monolithic": True}, KERNELS),
    (("12.0", False, "bf16", "dp_ep_one_sided", False), {"batched": True}, KERNELS),
]
"""The README's six: a layer's fields, the wish, and which fields may change."""


def values(lab, name):
    """All that a field may be."""
    known = {"capability": lab.CAPABILITIES, "checkpoint": lab.CHECKPOINTS}
    if name in known:
        return list(known[name])
    return list(lab.DEPLOYMENTS) if name == "deployment" else [True, False]


def wished(case, wish):
    """Whether a recorded case is as wished."""
    return case["backend"] is not None and all(case[name] == value for name, value in wish.items())


def from_the_recording(fields, wish, may):
    """What `mend` must give, from the recorded choices alone."""
    old = dict(zip(given.KNOBS, fields, strict=True))
    found = []
    for new in itertools.product(*((old[name], *offered) for name, offered in may.items())):
        changes = {name: value for name, value in zip(may, new, strict=True) if value != old[name]}
        if wished(FOUND[tuple({**old, **changes}.values())], wish) and changes not in found:
            found.append(changes)
    least = min(map(len, found), default=0)
    place = {name: number for number, name in enumerate(may)}
    return sorted(
        (changes for changes in found if len(changes) == least),
        key=lambda changes: (
            [place[name] for name in changes],
            [list(may[name]).index(value) for name, value in changes.items()],
        ),
    )


def check(lab, checkpoint):
    """Compare every recorded choice of a checkpoint; show the first that differs."""
    wrong, first = 0, ""
    cases = [case for case in given.cases() if case["checkpoint"] == checkpoint]
    for case in cases:
        got, expected = lab.choose(lab.Layer(**given.layer_of(case))), given.chosen(case)
        if (got is None) != (expected is None) or (got is not None and tuple(got) != expected):
            wrong += 1
            first = first or (
                f"{given.layer_of(case)}\nexpected {expected}\ncame     {got}\n"
                f"vLLM said on the way:\n{given.reasons(case)}"
            )
    assert not wrong, f"{wrong} of {len(cases)} choices differ. The first:\n{first}"


def test_worked_example(lab):
    """An oracle that looks at the card and not at the deployment."""
    for fields, expected in (
        (("9.0", True, "fp8_block", "tp"), ("TRITON", False)),
        (("9.0", True, "fp8_block", "tp_ep"), ("FLASHINFER_CUTLASS", False)),
        (("9.0", True, "fp8_block", "dp_ep_ll"), ("BATCHED_DEEPGEMM", False)),
        (("10.0", True, "fp8_block", "tp"), ("FLASHINFER_TRTLLM", True)),
        (("8.0", True, "fp8_block", "dp_ep_ll"), None),
    ):
        got = lab.choose(lab.Layer(*fields))
        same(got if got is None else tuple(got), expected, f"the layer {fields}")


def test_experts_in_16_bits(lab):
    """Adapters that ask the candidates, or an exchange that every class can read."""
    check(lab, "bf16")


def test_block_fp8(lab, record_property):
    """One order for all: on a 9.0 it depends on the expert parallelism."""
    check(lab, "fp8_block")
    served = [lab.choose(lab.Layer("9.0", True, "fp8_block", name)) for name in lab.DEPLOYMENTS]
    record_property("measured.deepgemm", sum("DEEPGEMM" in str(choice) for choice in served))


def test_nvfp4(lab):
    """Routing inside the kernel wherever the kernel is TRT-LLM's."""
    check(lab, "nvfp4")


def test_mxfp4(lab, record_property):
    """A batched format that only newer cards have, adapters that Triton takes."""
    check(lab, "mxfp4")
    starts = [
        lab.choose(lab.Layer("10.0", True, checkpoint, name, lora=True)) is not None
        for checkpoint in lab.CHECKPOINTS
        for name in lab.DEPLOYMENTS
    ]
    record_property("measured.starts", sum(starts))


@pytest.mark.parametrize("number", range(len(SIX)))
def test_the_six_deployments(lab, number):
    """A change too many, a change that may not be made, a hope where there is none."""
    fields, wish, names = SIX[number]
    may = {name: values(lab, name) for name in names}
    same(
        lab.mend(lab.Layer(*fields), wish, may),
        from_the_recording(fields, wish, may),
        f"deployment {number + 1}: {fields}, wished {wish}, may change {', '.join(names)}",
    )


def test_what_is_as_wished_needs_no_change(lab):
    """A change for a layer that is served already; a value that it has, counted as a change."""
    layer = lab.Layer("9.0", True, "fp8_block", "dp_ep_ll")
    may = {"flashinfer": [True, False], "deployment": ["dp_ep_ll", "dp_ep"]}
    why = "DeepEP's low-latency exchange on an H100 is batched already"
    same(lab.mend(layer, {"batched": True}, may), [{}], why)
    same(lab.mend(layer, {"batched": True}, {}), [{}], why + ", and nothing may change")


def test_values_are_tried_in_the_order_of_those_who_may_change_them(lab):
    """All values of a field, where the caller has two."""
    layer = lab.Layer("9.0", True, "nvfp4", "dp_ep_ll")
    may = {"deployment": ["dp_ep_ht", "tp"], "capability": ["10.0"]}
    expected = [{"deployment": "dp_ep_ht"}, {"deployment": "tp"}, {"capability": "10.0"}]
    same(lab.mend(layer, {}, may), expected, f"{layer}, to be served, with {may}")


def test_any_wish_has_the_fewest_changes(lab):
    """Sizes in the wrong order, and combinations that are left out: 300 random wishes."""
    rng = random.Random(705)
    backends = sorted({case["backend"] for case in given.cases() if case["backend"]})
    for _ in range(300):
        fields = tuple(rng.choice(values(lab, name)) for name in given.KNOBS)
        wishes = {
            "backend": rng.choice(backends),
            "monolithic": rng.random() < 0.5,
            "batched": rng.random() < 0.5,
        }
        wish = {name: wishes[name] for name in rng.sample(list(wishes), rng.randrange(3))}
        may = {}
        for name in rng.sample(given.KNOBS, rng.randrange(4)):
            known = values(lab, name)
            may[name] = rng.sample(known, rng.randint(1, min(3, len(known))))
        same(
            lab.mend(lab.Layer(*fields), wish, may),
            from_the_recording(fields, wish, may),
            f"{fields}, wished {wish}, may change {may}",
        )


def test_a_wish_or_a_field_that_is_not_there_is_refused(lab):
    """A typing error in a wish, which no layer would ever fulfil."""
    layer = lab.Layer("9.0", True, "bf16", "tp")
    refused(lambda: lab.mend(layer, {"kernel": "TRITON"}, {}), "mend with the wish `kernel`")
    refused(lambda: lab.mend(layer, {}, {"gpu": ["9.0"]}), "mend with the field `gpu`")
    refused(
        lambda: lab.mend(layer, {}, {"deployment": ["tp8"]}),
        "mend with the deployment `tp8`, for a layer that is served already",
    )
