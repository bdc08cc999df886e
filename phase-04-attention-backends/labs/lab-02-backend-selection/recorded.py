"""Compare a selector with the recording of the real one: `attention_selector`.

    python recorded.py --file starter.py        all choices, a few seconds

The recording was made by `conformance/features/attention/attention_selector.py`, which runs
vLLM's own code for devices that it simulates. The lab's tests use a sample: the first configuration
of every distinct outcome of every device, and every 97th. Given; nothing here is for you to write.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from conformance import parts
from course.files import load_module

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


STEP = 97
"""Of the sample: a prime, so that it meets every value of every argument."""


class Asked(NamedTuple):
    """One recorded question and its answer."""

    device: dict[str, Any]
    """Arguments of the lab's `Device`."""
    config: dict[str, Any]
    """Arguments of the lab's `SelectorConfig`."""
    num_heads: int | None
    outcome: dict[str, Any]
    """`valid`, in order of priority, and `rejected`, reasons by backend."""


@cache
def cases() -> list[dict[str, Any]]:
    """The recording, read once."""
    return parts.load("attention_selector")


def questions(whole: bool = False) -> Iterator[Asked]:
    """All recorded questions, or the sample, in the recording's order."""
    for case in cases():
        capability = tuple(int(part) for part in case["capability"].split("."))
        device = {"capability": capability, "fa4": case["fa4"], "trtllm": case["trtllm"]}
        seen: set[int] = set()
        places = itertools.product(itertools.product(*case["grid"].values()), case["features"])
        for number, (values, feature) in enumerate(places):
            found = case["found"][number]
            if not whole and found in seen and number % STEP:
                continue
            seen.add(found)
            config = {**dict(zip(case["grid"], values, strict=True)), **feature}
            num_heads = config.pop("num_heads", None)
            config["use_batch_invariant"] = case["batch_invariant"]
            yield Asked(device, config, num_heads, case["outcomes"][found])


def rule(lab: ModuleType, name: str, reason: str) -> str:
    """The rule behind a reason, for one backend, in words."""
    backend = lab.BACKENDS[name]
    sizes = ", ".join(map(str, backend.head_sizes)) or "any"
    special = {
        ("FLASH_ATTN", "head_size"): "multiples of 8 up to 256; up to 512 on 9.x, 10.x, 11.x "
        "if the wheel has FlashAttention 4",
        ("TRITON_ATTN", "head_size"): "32 and more",
        ("FLASH_ATTN", "kv_cache_dtype"): f"{', '.join(backend.kv_cache_dtypes)}; fp8 and "
        "fp8_e4m3 with version 3",
        ("FLASH_ATTN", "attention"): "with version 3 or 4: 9.x; 10.x with FlashAttention 4 and "
        "without batch invariance",
        ("FLASHINFER", "attention"): "on 10.x with the TRT-LLM kernels and without batch "
        "invariance",
    }
    key = reason.split()[0]
    if reason == "attention sinks not supported":
        says = special.get((name, key), "yes" if backend.sink else "no")
        return f"attention sinks with {name}: {says}"
    if key == "head_size":
        return f"head sizes of {name}: {special.get((name, key), sizes)}"
    if key == "dtype":
        return f"dtypes of {name}: {', '.join(backend.dtypes)}"
    if key == "kv_cache_dtype":
        usual = ", ".join(backend.kv_cache_dtypes)
        return f"cache types of {name}: {special.get((name, key), usual)}"
    if key == "block_size":
        divisors = ", ".join(map(str, backend.block_sizes))
        return f"block sizes of {name}: what {divisors} divides (one is enough), or None"
    if key in ("MLA", "non-MLA"):
        return f"{name} is {'an' if backend.mla else 'no'} MLA backend, and must match use_mla"
    if key in ("sparse", "non-sparse"):
        return f"{name} is {'' if backend.sparse else 'not '}sparse, and must match use_sparse"
    if key == "compute":
        low, high = backend.lowest or "any", backend.highest or "any"
        return f"capability of {name}: from {low} to {high}, both included"
    if reason.startswith("attention type"):
        return f"attention types of {name}: {', '.join(backend.attn_types)}"
    flags = {"partial": "mm_prefix", "non-causal": "non_causal", "batch": "batch_invariant"}
    if key in flags:
        return f"{flags[key]} of {name}: {getattr(backend, flags[key])}"
    return f"combination_reason({name!r}, ...) says so; it is given, and comes last"


def describe(asked: Asked) -> str:
    """The device and the configuration, with what is not usual."""
    usual = {"kv_cache_dtype": "auto", "block_size": None, "use_batch_invariant": False}
    config = {k: v for k, v in asked.config.items() if k not in usual or v != usual[k]}
    if asked.num_heads is not None:
        config["num_heads"] = asked.num_heads
    device = {k: v for k, v in asked.device.items() if k == "capability" or not v}
    return "\n".join(
        f"{title}  {', '.join(f'{key}={value!r}' for key, value in fields.items())}"
        for title, fields in (("device  ", device), ("config  ", config))
    )


def build(lab: ModuleType, asked: Asked) -> tuple[Any, Any]:
    """The lab's own configuration and device."""
    return lab.SelectorConfig(**asked.config), lab.Device(**asked.device)


def reasons_difference(lab: ModuleType, asked: Asked) -> str:
    """Where `validate_configuration` differs for one backend; "" if nowhere."""
    config, device = build(lab, asked)
    recorded = asked.outcome["rejected"] | {name: [] for name in asked.outcome["valid"]}
    for name, expected in recorded.items():
        came = lab.validate_configuration(name, config, device)
        if came == expected:
            continue
        wrong = [r for r in expected if r not in (came or ())]
        wrong += [r for r in came or () if r not in expected]
        why = "the order of the reasons is that of validate_configuration's docstring"
        if wrong and came is not None:
            why = rule(lab, name, wrong[0])
        return (
            f"validate_configuration({name!r}, ...) differs from the real one\n{describe(asked)}\n"
            f"expected  {expected}\ncame      {came}\nrule      {why}"
        )
    return ""


def choice_difference(lab: ModuleType, asked: Asked) -> str:
    """Where `select_backend` differs; "" if nowhere."""
    config, device = build(lab, asked)
    valid, rejected = asked.outcome["valid"], asked.outcome["rejected"]
    expected: tuple[Any, ...] = (valid[:1], valid, list(rejected.items()))
    try:
        got = lab.select_backend(config, device, num_heads=asked.num_heads)
        came = ([got.name], list(got.valid), list(got.rejected.items())) if got else (None,) * 3
    except ValueError as error:
        came = ([], [], list(rejected.items()) if not valid else str(error))
    if came == expected:
        return ""
    titles = ("chosen", "valid, in order of priority", "rejected, in order of priority")
    rules = (
        "the first valid backend of priorities() is chosen; none is a ValueError",
        "valid are those of priorities() without a reason, in its order",
        "rejected are those of priorities() with reasons, in its order",
    )
    place = next(i for i in range(3) if came[i] != expected[i])
    return (
        f"select_backend differs from the real one: {titles[place]}\n{describe(asked)}\n"
        f"expected  {expected[place]}\ncame      {came[place]}\nrule      {rules[place]}"
    )


def difference(lab: ModuleType, asked: Asked) -> str:
    """Either difference, the reasons first: they explain the choice."""
    said = choice_difference(lab, asked)
    return said and (reasons_difference(lab, asked) or said)


def main() -> None:
    parser = argparse.ArgumentParser(description="Compare a selector with the real one's choices.")
    parser.add_argument("--file", type=Path, default=HERE / "solution.py", help="your starter.py")
    arguments = parser.parse_args()
    lab = load_module(arguments.file, "lab_04_02")
    count, differ = 0, 0
    for asked in questions(whole=True):
        count += 1
        said = difference(lab, asked)
        differ += bool(said)
        if said and differ == 1:
            print(said)
    print(f"{len(cases())} devices and wheels, {count:,} choices: {differ:,} differ")
    raise SystemExit(bool(differ))


if __name__ == "__main__":
    main()
