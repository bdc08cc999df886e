"""Two arms of a real vLLM 0.22.1, one free and one constrained; what a mask costs; where it ends.

    course gpu run 12-02                            Qwen2.5-0.5B-Instruct on a GPU
    course gpu run 12-02 --cpu                      vLLM's CPU build and the shipped byte model
    python run.py --model FOLDER                    another model
    python run.py --predict                         the mini engine's two arms, without vLLM

Both arms have the same prompts, with the schema in them, and the same seeds. Each engine is a
process of its own. xgrammar is also timed alone, on 128,000 tokens that are made up. Needs
vllm==0.22.1; without it the run says so and ends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from pathlib import Path
from statistics import mean, median
from types import ModuleType
from typing import Any

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
BYTES = HERE.parents[2] / "models" / "byte-llama"
QWEN = "Qwen/Qwen2.5-0.5B-Instruct"
ROLES = ("pirate", "astronaut", "barista", "wizard", "plumber")
_TEXT = {"type": "string"}
OPEN = {
    "type": "object",
    "properties": {
        "name": _TEXT,
        "age": {"type": "integer", "minimum": 0},
        "skills": {"type": "array", "items": _TEXT},
    },
    "required": ["name", "age", "skills"],
}
CLOSED = {
    "type": "object",
    "properties": {
        "role": {"enum": list(ROLES)},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "armed": {"type": "boolean"},
    },
    "required": ["role", "age", "armed"],
}
SCHEMAS = {"open": OPEN, "closed": CLOSED}
TOKENS, TRAP, COUNT, VOCABULARY = 128, 12, 20, 128_000


def prompts_of(schema: dict[str, Any]) -> list[str]:
    """Fifty prompts, with the schema in the text."""
    text = json.dumps(schema)
    asked = [f"Describe a {role} as JSON of this schema: {text}\n" for role in ROLES]
    return [prompt for prompt in asked for _ in range(10)]


def numbered(number: int) -> dict[str, Any]:
    """A schema like no other."""
    name = f"field_{number}"
    return {"type": "object", "properties": {name: _TEXT, "n": CLOSED}, "required": [name, "n"]}


# --- one engine, in a process of its own ----------------------------------------------------------


def one_engine(arguments: argparse.Namespace, lab: ModuleType) -> None:
    """Start an engine; both arms of both schemas, the trap, and the times of one-token requests."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.platforms import current_platform
    from vllm.sampling_params import StructuredOutputsParams

    cpu = current_platform.is_cpu()
    # at the pin a processor cannot sample for a seeded request whose prompt comes in chunks
    knobs: dict[str, Any] = {"max_num_batched_tokens": 16_384} if cpu else {}
    llm = LLM(
        model=arguments.model, dtype="float32" if cpu else "auto", enforce_eager=cpu,
        max_model_len=1024, max_num_seqs=64, gpu_memory_utilization=arguments.util,
        load_format="dummy" if arguments.dummy else "auto",
        structured_outputs_config=dict(lab.CONFIG),
        **knobs,
    )  # fmt: skip
    processes.tell("the engine is up")
    chat = bool(getattr(llm.get_tokenizer(), "chat_template", None))

    def asked(prompts: list[str], schema: Any, tokens: int, temperature: float = 0.8) -> list[Any]:
        wanted = None if schema is None else StructuredOutputsParams(json=schema)
        params = [
            SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens,
                           structured_outputs=wanted)
            for seed in range(len(prompts))
        ]  # fmt: skip
        if chat:
            talks: Any = [[{"role": "user", "content": prompt}] for prompt in prompts]
            outputs = llm.chat(talks, params, use_tqdm=False)
        else:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        found = [output.outputs[0] for output in outputs]
        return [
            [prompt, seed, each.text, str(each.finish_reason)]
            for seed, (prompt, each) in enumerate(zip(prompts, found, strict=True))
        ]

    result: dict[str, Any] = {"chat": chat, "arms": {}}
    if not arguments.dummy:  # before anything else is constrained
        asked(["A"], None, 1)
        times = []
        for schema in (dict(OPEN, type=["object"]), *(numbered(n) for n in range(COUNT))):
            for _ in range(2):
                began = time.perf_counter()
                asked(["A"], schema, 1)
                times.append([json.dumps(schema), time.perf_counter() - began])
        result["times"] = times
        processes.tell(f"{len(times)} requests of one token timed")
    for name, schema in SCHEMAS.items():
        prompts = prompts_of(schema)
        arms = {"constrained": asked(prompts, schema, TOKENS)}
        if not arguments.dummy:
            arms["free"] = asked(prompts, None, TOKENS)
            arms["greedy"] = asked(prompts[::10], schema, TOKENS, 0.0)
        result["arms"][name] = arms
        processes.tell(f"schema {name}: {len(prompts)} prompts answered")
    if not arguments.dummy:
        result["trap"] = asked(prompts_of(OPEN)[::10], OPEN, TRAP)
    processes.answer(result)


# --- xgrammar alone -------------------------------------------------------------------------------


def made_up(size: int) -> list[bytes]:
    """A vocabulary: all single bytes, then words of 2 to 8 characters, drawn by seed."""
    rng = random.Random(0)
    characters = 'abcdefghijklmnopqrstuvwxyz0123456789 "{}[]:,_-'
    words = {bytes([byte]): None for byte in range(256)}
    while len(words) < size - 1:
        word = "".join(rng.choices(characters, k=rng.randint(2, 8))).encode()
        words.setdefault(word, None)
    return [*words, b"<eos>"]


def library() -> None:
    """What compiling, filling and applying cost, measured on this machine's processor."""
    try:
        import torch
        import xgrammar
    except ImportError as error:
        print(f"xgrammar alone: left out, {error.name} is not installed")
        return
    torch.set_num_threads(1)
    words = made_up(VOCABULARY)

    def timed(call: Any) -> tuple[float, Any]:
        began = time.perf_counter()
        value = call()
        return (time.perf_counter() - began) * 1e3, value

    print(f"=== xgrammar {versions.version('xgrammar')} alone, {len(words):,} tokens, one thread")
    took, info = timed(lambda: xgrammar.TokenizerInfo(
        words, xgrammar.VocabType.RAW, vocab_size=len(words), stop_token_ids=[len(words) - 1]
    ))  # fmt: skip
    print(f"reading the vocabulary: {took:.1f} ms")
    compiler = xgrammar.GrammarCompiler(info, max_threads=1)
    text = json.dumps(OPEN)
    first, compiled = timed(lambda: compiler.compile_json_schema(text, any_whitespace=False))
    again, _ = timed(lambda: compiler.compile_json_schema(text, any_whitespace=False))
    print(f"compiling the open schema: {first:.1f} ms, the second time {again:.3f} ms")
    for count in (10, 50, 200):
        properties = {f"property_number_{n}": OPEN for n in range(count)}
        wide = {"type": "object", "properties": properties, "required": list(properties)}
        spec = json.dumps(wide)
        took, _ = timed(lambda spec=spec: compiler.compile_json_schema(spec, any_whitespace=False))
        print(f"compiling {count} properties ({len(spec) / 1e3:.1f} kB): {took:.0f} ms")
    generator = torch.Generator().manual_seed(0)
    fills, applies, texts = [], [], []
    for _ in range(20):
        matcher = xgrammar.GrammarMatcher(compiled)
        bitmask = xgrammar.allocate_token_bitmask(1, len(words))
        said: list[int] = []
        while not matcher.is_terminated() and len(said) < TOKENS:
            fills.append(timed(lambda m=matcher, b=bitmask: m.fill_next_token_bitmask(b, 0))[0])
            logits = torch.randn(1, len(words), generator=generator)
            applies.append(timed(
                lambda rows=logits, b=bitmask: xgrammar.apply_token_bitmask_inplace(rows, b)
            )[0])  # fmt: skip
            said.append(int(logits[0].argmax()))
            assert matcher.accept_token(said[-1])
        ended = matcher.is_terminated()
        texts.append((b"".join(words[t] for t in said[: -1 if ended else None]), ended))
    for name, each in (("filling", fills), ("applying", applies)):
        print(
            f"{name} one row: mean {mean(each) * 1e3:.0f}, median {median(each) * 1e3:.0f}, "
            f"longest {max(each) * 1e3:.0f} microseconds ({len(each)} rows)"
        )
    print(f"random logits: {sum(ended for _, ended in texts)} of {len(texts)} texts came to an end")


# --- what came ------------------------------------------------------------------------------------


def told(lab: ModuleType, name: str, answers: list[Any], schema: dict[str, Any]) -> Any:
    """One line for an arm, and its report."""
    found = lab.report(answers, schema)
    counts = ", ".join(f"{count} {verdict}" for verdict, count in found.counts.items() if count)
    rate = "no rate: none was completed"
    if found.rate is not None:
        low, high = found.interval
        rate = f"valid of completed {found.rate:.1%}, interval {low:.1%} to {high:.1%}"
    print(f"{name}: {counts}; {rate}", flush=True)
    return found


def verdict(name: str, want: Any, came: Any) -> bool:
    """One line for an expectation; whether it holds."""
    print(f"{'as predicted' if want == came else 'NOT AS PREDICTED'}: {name}: {came}")
    if want != came:
        print(f"    expected {want}")
    return bool(want == came)


def launch(arguments: argparse.Namespace, dummy: bool) -> dict[str, Any]:
    """An engine, and what it answered."""
    weights = "random weights" if dummy else Path(arguments.model).name
    print(f"=== {weights}: starting an engine", flush=True)
    command = [__file__, "--one", "--util", str(arguments.util), "--model", arguments.model]
    env = dict(os.environ)
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    return processes.start([*command, *(["--dummy"] if dummy else [])], env=env).needed()


def valid_ones(lab: ModuleType, answers: list[Any], schema: dict[str, Any]) -> bool:
    """Whether every constrained answer that ended by itself is valid, by two judges."""
    ended = [each for each in answers if each.finish_reason == "stop"]
    right = verdict(
        "answers that ended by themselves and are not valid", 0,
        sum(lab.classify(each.text, "stop", schema) != "valid" for each in ended),
    )  # fmt: skip
    try:
        import jsonschema
    except ImportError:
        print("  (jsonschema is not installed: judged by this lab alone)")
        return right
    judge = jsonschema.Draft202012Validator(schema)
    agreed = all(judge.is_valid(json.loads(each.text)) for each in ended)
    return verdict("jsonschema says the same", True, agreed) and right


def measured(lab: ModuleType, arguments: argparse.Namespace) -> bool:
    """The engine with its weights."""
    came, right = launch(arguments, dummy=False), True
    print(f"prompts: {'through the chat template' if came['chat'] else 'as they are'}")
    for name, schema in SCHEMAS.items():
        arms = {
            arm: [lab.Answer(*each) for each in rows] for arm, rows in came["arms"][name].items()
        }
        for arm in ("free", "constrained"):
            told(lab, f"{name} schema, {arm}", arms[arm], schema)
        pairs = sorted(lab.paired(arms["free"], arms["constrained"], schema).items())
        for (one, other), count in pairs:
            print(f"  free {one}, constrained {other}: {count}")
        right &= valid_ones(lab, arms["constrained"], schema)
        if Path(arguments.model) == BYTES:
            mini = lab.run_mini(prompts_of(schema)[::10], schema, TOKENS, 0.0)
            same = [a.text == b.text for a, b in zip(mini, arms["greedy"], strict=True)]
            right &= verdict("greedy texts as the mini engine's", [True] * len(same), same)
    trap = [lab.Answer(*each) for each in came["trap"]]
    right &= verdict(f"{TRAP} tokens end with", {"length"}, {each.finish_reason for each in trap})
    print(f"  the first: {trap[0].text!r}")
    times = [(name, seconds) for name, seconds in came["times"]]
    print(
        f"first constraint of the engine {times[0][1] * 1e3:.1f} ms; of {COUNT} others the first "
        f"request takes {lab.compile_seconds(times) * 1e3:.1f} ms more than the second"
    )
    return right


def adversary(lab: ModuleType, arguments: argparse.Namespace) -> bool:
    """The same engine with random weights: the guarantee does not rest on the model."""
    came, right = launch(arguments, dummy=True), True
    for name, schema in SCHEMAS.items():
        answers = [lab.Answer(*each) for each in came["arms"][name]["constrained"]]
        told(lab, f"{name} schema, constrained, random weights", answers, schema)
        right &= valid_ones(lab, answers, schema)
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description="Free and constrained answers of a real vLLM.")
    parser.add_argument("--model", help="a name or a folder")
    parser.add_argument("--util", type=float, default=0.6, help="share of the GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--predict", action="store_true", help="the mini engine's arms, and end")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    parser.add_argument("--dummy", action="store_true", help="with --one: random weights")
    arguments = parser.parse_args()
    lab = load_module(Path(arguments.file))
    if arguments.one:
        one_engine(arguments, lab)
        return 0
    if arguments.predict:
        for name, schema in SCHEMAS.items():
            for arm, wanted in (("free", None), ("constrained", schema)):
                answers = lab.run_mini(prompts_of(schema)[::5], wanted, TOKENS)
                told(lab, f"{name} schema, {arm}, mini engine", answers, schema)
        return 0
    versions.need_vllm("--predict, or the tests")
    arguments.model = arguments.model or (str(BYTES) if versions.on_cpu() else QWEN)
    right = measured(lab, arguments)
    right &= adversary(lab, arguments)
    library()
    print("all as predicted" if right else "something is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
