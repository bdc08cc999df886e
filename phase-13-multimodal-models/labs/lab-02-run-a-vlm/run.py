"""Prompts with pictures on a real vLLM 0.22.1: lengths, encoder runs, hits, and what it refuses.

    course gpu run 13-02                   byte-sees on a GPU
    course gpu run 13-02 --cpu             byte-sees on vLLM's CPU build
    python run.py --model FOLDER           a Qwen2-VL checkpoint instead
    python run.py --beside FOLDER          packages that stand in front of the installed ones

One engine, in a process of its own. Every prompt's length is predicted first, to the token. The
pin's `llava.py` needs transformers 4.57.6 and torchvision, which `course engine install` does not
bring: `pip install --no-deps --target FOLDER transformers==4.57.6 torchvision==0.26.0
huggingface_hub==0.36.2 tokenizers==0.22.2`, and `--beside FOLDER`. A run without them says so.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from labkit import processes, versions
from labkit.modules import load_module

HERE = Path(__file__).resolve().parent
BYTES = HERE.parents[2] / "models" / "byte-sees"
QWEN = "<|im_start|>user\n{}{}<|im_end|>\n<|im_start|>assistant\n"
TRIPLE = "<|vision_start|><|image_pad|><|vision_end|>"


def picture(seed: int, width: int, height: int) -> np.ndarray:
    """Blocks of colour, by seed: uint8 [height, width, 3]."""
    small = np.random.default_rng(seed).integers(0, 256, (7, 7, 3), dtype=np.uint8)
    rows, columns = (np.arange(side) * 7 // side for side in (height, width))
    return small[rows][:, columns]


def asked(large: bool) -> list[tuple[str, str, list[np.ndarray]]]:
    """Name, question and pictures of each request, in order; sizes of a large model or small."""
    side = (1280, 960) if large else (56, 56)
    half = (640, 480) if large else (168, 112)
    a, b, c = picture(1, *side), picture(2, *side), picture(3, *half)
    return [
        ("text alone", "what is this?\n", []),
        ("a picture", "what is this?\n", [a]),
        ("another size", "what is this?\n", [c]),
        ("two pictures", "which is red?\n", [a, b]),
        ("a new one twice", "same thing?\n", [picture(4, *side)] * 2),
        ("the first again", "what is this?\n", [a]),
        ("the first, another text", "how many things?\n", [a]),
        ("text before it", "look: ", [a]),
    ]


def one_engine(arguments: argparse.Namespace) -> None:
    """Ask one after another; what came of each."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    import vllm
    from PIL import Image
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    llm = vllm.LLM(
        model=arguments.model, dtype="float32" if cpu else "auto", enforce_eager=cpu, seed=0,
        max_model_len=4096 if arguments.large else 512, max_num_seqs=8, max_num_batched_tokens=4096,
        gpu_memory_utilization=arguments.util, limit_mm_per_prompt={"image": 2},
        enable_mm_processor_stats=True, enable_prefix_caching=True,
    )  # fmt: skip
    processes.tell("the engine is up")
    params = vllm.SamplingParams(temperature=0.0, max_tokens=arguments.tokens)

    def ask(text: str, shown: list[np.ndarray], markers: int | None = None) -> Any:
        count = len(shown) if markers is None else markers
        if arguments.large:
            prompt = QWEN.format(TRIPLE * count, text)
        elif text == "look: ":
            prompt = text + "<image>" * count + " what is this?\n"
        else:
            prompt = "<image>" * count + text
        request: Any = {"prompt": prompt}
        if shown:
            request["multi_modal_data"] = {"image": [Image.fromarray(p) for p in shown]}
        return prompt, llm.generate([request], params, use_tqdm=False)[0]

    answers = []
    for name, text, shown in asked(arguments.large):
        began = time.perf_counter()
        prompt, output = ask(text, shown)
        seconds = time.perf_counter() - began
        stats = llm.collective_rpc("get_encoder_timing_stats")[0]
        calls = sum(int(each["num_encoder_calls"]) for each in stats.values())
        words = len(llm.get_tokenizer().encode(prompt))
        answers.append([name, words, len(shown), [list(p.shape[1::-1]) for p in shown],
                        len(output.prompt_token_ids), calls, output.num_cached_tokens, seconds,
                        output.outputs[0].text])  # fmt: skip
    refusals = []
    for name, count, markers in (
        ("three pictures, two allowed", 3, 3), ("a picture and no marker", 1, 0),
        ("a marker and no picture", 0, 1),
    ):  # fmt: skip
        shown = [picture(9 + i, 56, 56) for i in range(count)]
        try:
            _, output = ask("what is this?\n", shown, markers)
            refusals.append([name, "answered", f"{len(output.prompt_token_ids)} prompt tokens"])
        except Exception as error:
            refusals.append([name, type(error).__name__, str(error).split("\n")[0][:140]])
    used = {name: versions.version(name) for name in ("transformers", "torchvision")}
    processes.answer({"answers": answers, "refusals": refusals, "packages": used})


def report(lab: ModuleType, came: dict[str, Any], large: bool) -> bool:
    """Lines for what came; whether every length is as predicted."""
    right = True
    print(json.dumps({"the engine has": came["packages"]}))
    for name, words, count, sizes, tokens, calls, cached, seconds, text in came["answers"]:
        each = [lab.qwen2_vl_tokens(*size)[2] if large else 64 for size in sizes]
        want = lab.prompt_length(words, each)
        right &= want == tokens
        print(json.dumps({
            "prompt": name, "pictures": count, "tokens": tokens, "predicted": want,
            "blocks": lab.kv_blocks(tokens), "encoder_calls": calls, "cached": cached,
            "ms": round(seconds * 1e3), "text": text,
        }), flush=True)  # fmt: skip
    for name, kind, said in came["refusals"]:
        print(json.dumps({"prompt": name, "came": kind, "said": said}), flush=True)
    return right


def main() -> int:
    """Command line; see the module."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--model", default=str(BYTES), help="a folder; one with Qwen2-VL's layout")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of each answer")
    parser.add_argument("--util", type=float, default=0.4, help="share of the GPU's memory")
    parser.add_argument("--file", default=str(HERE / "solution.py"), help="your starter.py")
    parser.add_argument("--beside", help="a folder with packages; see the module")
    parser.add_argument("--one", action="store_true", help="one engine, in this process")
    arguments = parser.parse_args()
    config = json.loads(Path(arguments.model, "config.json").read_text())
    arguments.large = config["model_type"] == "qwen2_vl"
    if arguments.one:
        one_engine(arguments)
        return 0
    versions.need_vllm("the tests")
    env = dict(os.environ)
    if arguments.beside:
        folders = [str(Path(arguments.beside).resolve()), env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = os.pathsep.join(filter(None, folders))
    elif importlib.util.find_spec("torchvision") is None:
        print("left out: vLLM's llava.py imports torchvision and transformers 4, see --beside")
        return 1
    if versions.on_cpu():
        env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    command = [__file__, "--one", "--model", arguments.model, "--util", str(arguments.util)]
    came = processes.start([*command, "--tokens", str(arguments.tokens)], env=env).needed()
    right = report(load_module(Path(arguments.file)), came, arguments.large)
    print("every length as predicted" if right else "a length is not as predicted; see above")
    return 0


if __name__ == "__main__":
    sys.exit(main())
