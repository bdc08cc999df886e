"""Train the shipped adapters of `byte-llama`: low-rank deltas that change what it writes.

Promises: same corpus, seed and steps on the same torch build give the same folder; held-out numbers
come from whole files that training never saw; the result is a folder in PEFT's layout that
`mini_vllm`, `peft` and vLLM load, with a card whose figures and texts this program measured.

    python models/train_adapters.py shout       # goes on IN CAPITALS
    python models/train_adapters.py code        # writes the function that a docstring describes
    python models/train_adapters.py quote       # goes on as a quotation, line by line

Needs torch (CPU is enough) and the pinned tree. Each example is a beginning in plain prose and what
the adapter shall make of it; only the second part is learned.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import platform
import random
import sys
import sysconfig
import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import EOS, ByteLlama, Shape, docstrings_of, is_held_out, learning_rate

ROOT = Path(__file__).resolve().parents[1]
BASE = ROOT / "models" / "byte-llama"
PROMPTS = ("The scheduler", "Return the number of tokens in the block.", "A request waits until")
LENGTH, BATCH, PEAK = 192, 8, 0.004
Example = tuple[bytes, bytes]
"""What is given, and what shall follow."""


# --------------------------------------------------------------------------- corpora


def beginnings(text: str, rng: random.Random, reach: int) -> Iterator[tuple[str, str]]:
    """Every `reach` characters of a document 12 to 72 of them, from a word on, and the rest."""
    for start in range(0, max(1, len(text) - 160), reach):
        start = text.find(" ", start) + 1 if start else 0
        length = rng.randint(12, 72)
        yield text[start : start + length], text[start + length : start + length + LENGTH]


def shouted(rest: str) -> str:
    """The same in capitals."""
    return rest.upper()


def quoted(rest: str) -> str:
    """The same as a Markdown quotation of lines of 36 characters."""
    lines = textwrap.wrap(" ".join(rest.split()), 36)
    return "".join(f"\n> {line}" for line in lines)


def functions(source: str) -> Iterator[tuple[str, str]]:
    """Of each documented function its docstring's first line, and the function without it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and len(node.body) > 1:
            doc = ast.get_docstring(node)
            if not doc or not doc.strip() or node.decorator_list:
                continue
            lines = source.splitlines()[node.lineno - 1 : node.end_lineno]
            first, last = node.body[0].lineno, node.body[0].end_lineno or 0
            kept = lines[: first - node.lineno] + lines[last - node.lineno + 1 :]
            body = textwrap.dedent("\n".join(kept)).strip("\n")
            yield doc.strip().splitlines()[0][:96], "\n\n" + body + "\n"


def sources(upstream: Path) -> dict[str, str]:
    """File name to source text: the Python standard library's and the pinned tree's modules."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    found = {}
    for name, root in (("stdlib", stdlib), ("upstream", upstream / "vllm")):
        for path in sorted(root.rglob("*.py")):
            part = path.relative_to(root)
            if not {"site-packages", "test", "tests", "lib2to3"} & set(part.parts):
                found[f"{name}/{part}"] = path.read_text(encoding="utf-8", errors="replace")
    return found


def prose(upstream: Path) -> dict[str, str]:
    """File name to text: the pinned tree's Markdown and the standard library's docstrings."""
    found = {
        f"upstream/{path.relative_to(upstream)}": path.read_text(errors="replace")
        for path in sorted(upstream.rglob("*.md"))
    }
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        part = path.relative_to(stdlib)
        if not {"site-packages", "test", "tests", "lib2to3"} & set(part.parts):
            found[f"stdlib/{part}"] = docstrings_of(path)
    return found


@dataclass(frozen=True, slots=True)
class Kind:
    """One adapter: what it learns from and what it is."""

    rank: int
    alpha: int
    targets: tuple[str, ...]
    what: str
    data: str
    write: Callable[[str], str] | None = None
    """From the rest of a text to what shall follow; None: functions of source files."""
    use_rslora: bool = False

    @property
    def scaling(self) -> float:
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


PROSE = (
    "the Markdown of vLLM v0.22.1 (Apache-2.0) and the docstrings of the Python standard library "
    "(PSF licence)"
)
KINDS = {
    "shout": Kind(
        4,
        8,
        ("v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
        "goes on IN CAPITALS",
        f"{PROSE}: beginnings of 12 to 72 bytes, and what follows them in capitals",
        shouted,
    ),
    "code": Kind(
        8,
        16,
        ("q_proj", "k_proj", "v_proj", "o_proj"),
        "writes the Python function that the prompt describes",
        "the documented functions of the Python standard library (PSF licence) and of vLLM v0.22.1 "
        "(Apache-2.0): the docstring's first line, and the function without its docstring",
    ),
    "quote": Kind(
        4,
        4,
        ("q_proj", "v_proj", "down_proj"),
        "goes on as a Markdown quotation in short lines",
        f"{PROSE}: beginnings of 12 to 72 bytes, and what follows them as a quotation",
        quoted,
        use_rslora=True,
    ),
}


def examples(kind: Kind, upstream: Path) -> tuple[list[Example], list[Example]]:
    """The examples of the files to learn from, and those of the files that are held out."""
    rng = random.Random(0)
    made: tuple[list[Example], list[Example]] = [], []
    for name, text in (sources if kind.write is None else prose)(upstream).items():
        if kind.write is None:
            pairs = list(functions(text))
        else:
            cuts = beginnings(text, rng, 400)
            pairs = [(head, kind.write(rest)) for head, rest in cuts if len(rest) > 40]
        encoded = [(h.encode("utf-8", "replace"), r.encode("utf-8", "replace")) for h, r in pairs]
        made[is_held_out(name)].extend(encoded)
    return made


# --------------------------------------------------------------------------- network


class LoRALinear(nn.Module):
    """y = W x + s B (A x): W stays as it is, B begins at zero."""

    def __init__(self, base: nn.Linear, kind: Kind) -> None:
        super().__init__()
        self.base, self.scaling = base.requires_grad_(False), kind.scaling
        self.lora_A = nn.Parameter(torch.empty(kind.rank, base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, kind.rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.on = True

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        return y + self.scaling * F.linear(F.linear(x, self.lora_A), self.lora_B) if self.on else y


def adapted(kind: Kind) -> tuple[ByteLlama, dict[str, LoRALinear]]:
    """The shipped model with frozen weights, and its new layers by Hugging Face name."""
    model = ByteLlama(Shape())
    weights = {}
    for name, weight in load_file(BASE / "model.safetensors").items():
        weights[name.removeprefix("model.").replace(".self_attn.", ".")] = weight.float()
    model.load_state_dict(weights)
    model.requires_grad_(False)
    layers = {}
    for index, block in enumerate(model.layers):
        for target in kind.targets:
            owner = block.mlp if hasattr(block.mlp, target) else block
            part = "mlp" if owner is block.mlp else "self_attn"
            layer = LoRALinear(getattr(owner, target), kind)
            setattr(owner, target, layer)
            layers[f"model.layers.{index}.{part}.{target}"] = layer
    return model, layers


def batch_of(chosen: list[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and which of the targets count: all [count, LENGTH]."""
    ids = np.full((len(chosen), LENGTH + 1), EOS, dtype=np.int64)
    counts = np.zeros((len(chosen), LENGTH + 1), dtype=np.float32)
    for row, (head, rest) in enumerate(chosen):
        tokens = [*head, *rest, EOS][: LENGTH + 1]
        ids[row, : len(tokens)] = tokens
        counts[row, len(head) : len(tokens)] = 1.0
    both = torch.from_numpy(ids)
    return both[:, :-1], both[:, 1:], torch.from_numpy(counts[:, 1:])


def loss_of(model: ByteLlama, chosen: list[Example]) -> tuple[Tensor, Tensor]:
    """Sum of -ln p over the bytes that count, and how many they are."""
    inputs, targets, counts = batch_of(chosen)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), reduction="none")
    return (loss * counts.flatten()).sum(), counts.sum()


def bits_per_byte(model: ByteLlama, held: list[Example]) -> float:
    """Mean -log2 p over what follows the beginnings of the held-out examples."""
    total = count = 0.0
    with torch.no_grad():
        for start in range(0, len(held), BATCH):
            loss, number = loss_of(model, held[start : start + BATCH])
            total, count = total + float(loss), count + float(number)
    return total / count / math.log(2)


def train(model: ByteLlama, data: list[Example], steps: int, seed: int) -> None:
    """AdamW on the adapter alone; the schedule is that of `train.py`."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK, betas=(0.9, 0.95), weight_decay=0.0)
    rng, began, running = random.Random(seed), time.time(), 0.0
    for step in range(steps):
        loss, count = loss_of(model, rng.sample(data, BATCH))
        (loss / count).backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = PEAK * learning_rate(step, steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        bits = float(loss.detach() / count) / math.log(2)
        running = bits if step == 0 else 0.95 * running + 0.05 * bits
        if (step + 1) % 50 == 0 or step + 1 == steps:
            print(
                f"step {step + 1:4d}  {running:.3f} bits/byte  {time.time() - began:5.0f} s",
                flush=True,
            )


# --------------------------------------------------------------------------- export


def export(layers: dict[str, LoRALinear], kind: Kind, out: Path) -> None:
    """PEFT's layout: `adapter_config.json`, and A and B of every layer in fp16."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, layer in layers.items():
        for half in ("lora_A", "lora_B"):
            tensor = getattr(layer, half).detach().to(torch.float16).contiguous()
            tensors[f"base_model.model.{name}.{half}.weight"] = tensor
            getattr(layer, half).data = tensor.float()  # what ships is what is measured
    save_file(tensors, out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "byte-llama",
        "r": kind.rank,
        "lora_alpha": kind.alpha,
        "use_rslora": kind.use_rslora,
        "target_modules": list(kind.targets),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    (out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def texts(name: str, out: Path) -> list[str]:
    """What the exported adapter writes to `PROMPTS`: greedy, 96 tokens, `mini_vllm` in float32."""
    sys.path.insert(0, str(ROOT))
    from mini_vllm import LLM, SamplingParams
    from mini_vllm.lora.request import LoRARequest

    llm = LLM(BASE, enable_lora=True)
    adapter = LoRARequest(name, 1, str(out))
    results = llm.generate(PROMPTS, SamplingParams(max_tokens=96), adapter)
    return [result.outputs[0].text for result in results]


CARD = """---
license: apache-2.0
library_name: peft
base_model: byte-llama
---

# {name}

A LoRA adapter of [byte-llama](../../byte-llama/README.md) that {what}.

| | |
| --- | --- |
| rank, alpha, scaling | {rank}, {alpha}, {scaling} |
| target modules | {targets} |
| parameters | {parameters:,} in fp16, {size:,} bytes |

## Quality

| on {held:,} held-out examples | bits per byte |
| --- | --- |
| byte-llama | {before:.3f} |
| with this adapter | {after:.3f} |

Only the bytes behind the beginning count. The held-out examples come from whole files, chosen by a
hash of their names, that training never saw.

## Data and training

{data}. {count:,} examples.

```console
$ {command}
```

Seed {seed}, {steps} steps of {batch} examples of at most {length} bytes, AdamW at {peak}, float32,
{threads} thread, {minutes:.0f} minutes on a machine busy with other work; Python {python},
torch {torch}.

## What it writes

Greedy, 96 tokens, by `mini_vllm` in float32; the prompt is the first line.

{samples}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", choices=list(KINDS), help="which adapter")
    parser.add_argument("--upstream", type=Path, default=Path("upstream"))
    parser.add_argument("--out", type=Path, help="default: models/adapters/NAME")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if not (args.upstream / "vllm").is_dir():
        parser.error(f"--upstream {args.upstream}: no pinned tree; run `course upstream fetch`")
    kind, out = KINDS[args.name], args.out or ROOT / "models" / "adapters" / args.name
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    data, held = examples(kind, args.upstream)
    held = random.Random(1).sample(held, min(len(held), 200))
    model, layers = adapted(kind)
    before = bits_per_byte(model, held)
    print(
        f"{len(data):,} examples, {len(held):,} held out; without: {before:.3f} bits/byte",
        flush=True,
    )
    began = time.time()
    train(model, data, args.steps, args.seed)
    minutes = (time.time() - began) / 60
    export(layers, kind, out)
    after = bits_per_byte(model, held)
    print(f"with the adapter, fp16: {after:.3f} bits/byte")
    samples = "\n\n".join(
        f"```text\n{prompt}\n{text.rstrip()}\n```"
        for prompt, text in zip(PROMPTS, texts(args.name, out), strict=True)
    )
    tensors = [getattr(layer, half) for layer in layers.values() for half in ("lora_A", "lora_B")]
    card = CARD.format(
        name=args.name, what=kind.what, rank=kind.rank, alpha=kind.alpha,
        scaling=f"{kind.scaling:g}" + (" (rsLoRA)" if kind.use_rslora else ""),
        targets=", ".join(f"`{t}`" for t in kind.targets),
        parameters=sum(t.numel() for t in tensors),
        size=(out / "adapter_model.safetensors").stat().st_size, held=len(held), before=before,
        after=after, data=kind.data[0].upper() + kind.data[1:], count=len(data),
        command=f"python models/train_adapters.py {args.name} --steps {args.steps}",
        seed=args.seed, steps=args.steps, batch=BATCH, length=LENGTH, peak=PEAK,
        threads=args.threads, minutes=minutes, python=platform.python_version(),
        torch=torch.__version__.partition("+")[0], samples=samples,
    )  # fmt: skip
    (out / "README.md").write_text(card, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
