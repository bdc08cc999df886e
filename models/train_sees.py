"""Train `byte-sees`: a small LLaVA that says what is drawn in a picture.

Promises: every picture and question is drawn from the seed and the number of the step, whichever
process draws it; the held-out ones come from a stream of their own; what is measured are the fp16
weights that ship. The result is a Hugging Face folder in LLaVA layout that `mini_vllm`,
`transformers` and vLLM load, with its figures in `training.json` and a card made of them.

    python models/train_sees.py --device cuda --workers 15    # three minutes; drawing sets the pace
    python models/train_sees.py --batch 32                    # what two cores do in some hours

A prompt is pictures, a question, a line break; the answer ends with EOS. Needs torch (CPU is
enough), numpy and safetensors. Nothing in `mini_vllm` imports this file.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
from train import EOS, ByteLlama, Shape, config_json, hugging_face_names, tokenizer_json

from labkit.pictures import KINDS, SIZE, Turn, conversation, single_question

ROOT = Path(__file__).resolve().parents[1]
IMAGE = 257
"""Token id of a picture's every position."""
PATCH = 7
NUM_PATCHES = (SIZE // PATCH) ** 2
IGNORED = -100
TRAINING, HELD_OUT = 0, 1
"""Which stream of random numbers."""
PER_KIND = 400
"""Held-out questions of each kind."""
TEXT = Shape(
    vocab_size=258,
    hidden_size=192,
    intermediate_size=512,
    num_hidden_layers=4,
    num_attention_heads=3,
    num_key_value_heads=1,
)


@dataclass(frozen=True, slots=True)
class VisionShape:
    """Sizes of the tower; names are those of a CLIP vision `config.json`."""

    hidden_size: int = 128
    intermediate_size: int = 384
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    image_size: int = SIZE
    patch_size: int = PATCH
    num_channels: int = 3
    projection_dim: int = 128
    layer_norm_eps: float = 1e-5
    hidden_act: str = "quick_gelu"


# --------------------------------------------------------------------------- network


class VisionLayer(nn.Module):
    """Layer norm, attention of every patch to every other, layer norm, an MLP."""

    def __init__(self, s: VisionShape) -> None:
        super().__init__()
        d = s.hidden_size
        self.num_heads = s.num_attention_heads
        self.layer_norm1 = nn.LayerNorm(d, s.layer_norm_eps)
        self.layer_norm2 = nn.LayerNorm(d, s.layer_norm_eps)
        self.self_attn = nn.ModuleDict(
            {name: nn.Linear(d, d) for name in ("q_proj", "k_proj", "v_proj", "out_proj")}
        )
        self.mlp = nn.ModuleDict(
            {"fc1": nn.Linear(d, s.intermediate_size), "fc2": nn.Linear(s.intermediate_size, d)}
        )

    def forward(self, x: Tensor) -> Tensor:
        h, attn = self.layer_norm1(x), self.self_attn
        q, k, v = (
            attn[name](h).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for name in ("q_proj", "k_proj", "v_proj")
        )
        out = F.scaled_dot_product_attention(q, k, v)
        x = x + attn["out_proj"](out.transpose(1, 2).flatten(2))
        h = self.mlp["fc1"](self.layer_norm2(x))
        return x + self.mlp["fc2"](h * torch.sigmoid(1.702 * h))


class VisionTower(nn.Module):
    """CLIP's: `forward(pixels [n, 3, 56, 56])` returns the patches [n, 64, hidden]."""

    def __init__(self, s: VisionShape) -> None:
        super().__init__()
        d = s.hidden_size
        self.class_embedding = nn.Parameter(torch.empty(d))
        self.patch_embedding = nn.Conv2d(s.num_channels, d, s.patch_size, s.patch_size, bias=False)
        self.position_embedding = nn.Embedding(1 + NUM_PATCHES, d)
        self.pre_layrnorm = nn.LayerNorm(d, s.layer_norm_eps)
        self.layers = nn.ModuleList(VisionLayer(s) for _ in range(s.num_hidden_layers))

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.patch_embedding(pixels).flatten(2).transpose(1, 2)  # [n, 64, hidden]
        first = self.class_embedding.expand(len(x), 1, -1).to(x.dtype)
        x = self.pre_layrnorm(torch.cat((first, x), dim=1) + self.position_embedding.weight)
        for layer in self.layers:
            x = layer(x)
        return x[:, 1:]


class Sees(nn.Module):
    """Tower, projector and language model."""

    def __init__(self, text: Shape = TEXT, vision: VisionShape | None = None) -> None:
        super().__init__()
        self.vision = vision or VisionShape()
        self.tower = VisionTower(self.vision)
        self.linear_1 = nn.Linear(self.vision.hidden_size, text.hidden_size)
        self.linear_2 = nn.Linear(text.hidden_size, text.hidden_size)
        self.text = ByteLlama(text)
        for name, p in self.named_parameters():
            if p.ndim != 1 and not name.startswith("text."):
                last = "out_proj" in name or "fc2" in name
                depth = 2 * self.vision.num_hidden_layers
                nn.init.normal_(p, std=0.02 / math.sqrt(depth) if last else 0.02)
        nn.init.normal_(self.tower.class_embedding, std=0.02)
        nn.init.normal_(self.tower.patch_embedding.weight, std=(3 * PATCH * PATCH) ** -0.5)

    def forward(self, ids: Tensor, pixels: Tensor) -> Tensor:
        """Hidden states [batch, length, hidden] of ids [batch, length] and the batch's pictures
        [n, 3, 56, 56], in reading order."""
        rows = self.linear_2(F.gelu(self.linear_1(self.tower(pixels))))  # [n, 64, hidden]
        x = self.text.embed_tokens(ids).to(rows.dtype)
        x = x.masked_scatter((ids == IMAGE)[:, :, None], rows)
        for layer in self.text.layers:
            x = layer(x, self.text.cos[: ids.shape[1]], self.text.sin[: ids.shape[1]])
        return self.text.norm(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., vocab] of hidden states [..., hidden]."""
        return F.linear(hidden, self.text.embed_tokens.weight)


# --------------------------------------------------------------------------- data


@dataclass(slots=True)
class Batch:
    """Conversations side by side."""

    ids: Tensor
    """[batch, length] int64, EOS behind the end"""
    targets: Tensor
    """[batch, length] the token that shall follow, `IGNORED` outside of answers"""
    pictures: Tensor
    """[n, 56, 56, 3] uint8, in reading order"""

    def to(self, device: torch.device) -> Batch:
        """The same there."""
        return Batch(*(t.to(device, non_blocking=True) for t in (*self.tensors(),)))

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """All three."""
        return self.ids, self.targets, self.pictures

    @property
    def pixels(self) -> Tensor:
        """[n, 3, 56, 56], from -1 to 1: what the preprocessor's config says."""
        return self.pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def tokens_of(turns: Sequence[Turn]) -> tuple[list[int], list[int]]:
    """The ids of a conversation, and for each position the token that shall follow.

    An answer shall end with EOS; in a conversation that goes on a line break stands there.
    """
    ids: list[int] = []
    targets: list[int] = []
    for turn in turns:
        asked = [IMAGE] * (NUM_PATCHES * len(turn.pictures))
        asked += f"{turn.question.text}\n".encode()
        answer = list(turn.question.answer.encode())
        ids += [*asked, *answer, ord("\n")]
        targets += [*[IGNORED] * (len(asked) - 1), *answer, EOS, IGNORED]
    return ids[:-1], targets[:-1]


def batch_of(conversations: Sequence[Sequence[Turn]]) -> Batch:
    """All of them, padded to the longest."""
    rows = [tokens_of(turns) for turns in conversations]
    length = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), length), EOS)
    targets = torch.full((len(rows), length), IGNORED)
    for i, (row, target) in enumerate(rows):
        ids[i, : len(row)] = torch.tensor(row)
        targets[i, : len(row)] = torch.tensor(target)
    shown = [picture for turns in conversations for turn in turns for picture in turn.pictures]
    return Batch(ids, targets, torch.from_numpy(np.stack(shown)))


@dataclass(slots=True)
class Batches(torch.utils.data.Dataset):
    """Batch number i of the training stream, whichever process draws it."""

    seed: int
    steps: int
    size: int

    def __len__(self) -> int:
        return self.steps

    def __getitem__(self, step: int) -> Batch:
        rng = np.random.default_rng([self.seed, TRAINING, step])
        return batch_of([conversation(rng) for _ in range(self.size)])


def held_out(seed: int, kind: str, count: int) -> list[Turn]:
    """Questions of one kind that training never saw."""
    rng = np.random.default_rng([seed, HELD_OUT, KINDS.index(kind)])
    return [single_question(rng, kind) for _ in range(count)]


# --------------------------------------------------------------------------- training


def learning_rate(step: int, steps: int) -> float:
    """Warm up over 200 steps, then half a cosine down to zero."""
    return min((step + 1) / 200, 0.5 + 0.5 * math.cos(math.pi * step / steps))


def train(model: Sees, args: argparse.Namespace, device: torch.device) -> list[dict[str, float]]:
    """Run the schedule; the running loss along the way."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.05}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))
    loader = torch.utils.data.DataLoader(
        Batches(args.seed, args.steps, args.batch), batch_size=None, num_workers=args.workers,
        pin_memory=device.type == "cuda", prefetch_factor=8 if args.workers else None,
    )  # fmt: skip
    log: list[dict[str, float]] = []
    began, running = time.time(), torch.zeros((), device=device)
    every = max(1, args.steps // 40)
    for step, batch in enumerate(loader):
        batch = batch.to(device)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=args.dtype == "bfloat16"):
            hidden = model(batch.ids, batch.pixels)
            wanted = batch.targets != IGNORED
            logits = model.logits(hidden[wanted])
        loss = F.cross_entropy(logits.float(), batch.targets[wanted])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = args.lr * learning_rate(step, args.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        running = loss.detach() if step == 0 else running.lerp(loss.detach(), 0.02)
        if step == 0 or (step + 1) % every == 0 or step + 1 == args.steps:
            log.append({"step": step + 1, "loss": round(float(running), 4)})
            log[-1]["seconds"] = round(time.time() - began, 1)
            print(json.dumps(log[-1]), flush=True)
    return log


@torch.no_grad()
def accuracy(model: Sees, seed: int, count: int, device: torch.device) -> dict[str, float]:
    """Share of held-out questions whose greedy answer is right to the last letter, per kind.

    A greedy answer is right exactly if, with the right letters before it, every letter and the EOS
    are the most probable: one pass says so for all of them.
    """
    model.eval()
    found = {}
    for kind in KINDS:
        asked, right = held_out(seed, kind, count), 0
        for start in range(0, count, 200):
            batch = batch_of([[turn] for turn in asked[start : start + 200]]).to(device)
            best = model.logits(model(batch.ids, batch.pixels)).argmax(-1)
            correct = (best == batch.targets) | (batch.targets == IGNORED)
            right += int(correct.all(-1).sum())
        found[kind] = right / count
    return found


# --------------------------------------------------------------------------- export


def hugging_face_weights(model: Sees) -> dict[str, Tensor]:
    """Name in a LLaVA checkpoint -> tensor, fp16."""
    weights = {f"language_model.{n}": p for n, p in hugging_face_names(model.text).items()}
    for name, p in model.tower.state_dict().items():
        if name.startswith("layers."):
            name = f"encoder.{name}"
        elif "embedding" in name:
            name = f"embeddings.{name}"
        weights[f"vision_tower.vision_model.{name}"] = p
    # CLIP's last norm is for its pooled output, which LLaVA does not read.
    width = model.vision.hidden_size
    weights["vision_tower.vision_model.post_layernorm.weight"] = torch.ones(width)
    weights["vision_tower.vision_model.post_layernorm.bias"] = torch.zeros(width)
    for part in ("linear_1", "linear_2"):
        for name, p in getattr(model, part).state_dict().items():
            weights[f"multi_modal_projector.{part}.{name}"] = p
    return {n: p.detach().to("cpu", torch.float16).contiguous() for n, p in weights.items()}


def folder_files(model: Sees) -> dict[str, dict[str, Any]]:
    """The JSON files of the folder, by name."""
    text = config_json(model.text.shape)
    size = {"height": SIZE, "width": SIZE}
    image_token = {
        "id": IMAGE, "content": "<image>", "single_word": False, "lstrip": False,
        "rstrip": False, "normalized": False, "special": True,
    }  # fmt: skip
    tokenizer = tokenizer_json()
    tokenizer["added_tokens"].append(image_token)
    tokenizer["model"]["vocab"]["<image>"] = IMAGE
    return {
        "config.json": {
            "architectures": ["LlavaForConditionalGeneration"],
            "model_type": "llava",
            "text_config": text,
            "vision_config": {"model_type": "clip_vision_model", **asdict(model.vision)},
            "image_token_index": IMAGE,
            "image_seq_length": NUM_PATCHES,
            "projector_hidden_act": "gelu",
            "multimodal_projector_bias": True,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "default",
            "tie_word_embeddings": True,
            "eos_token_id": EOS,
            "dtype": "float16",
            "torch_dtype": "float16",
        },
        "generation_config.json": {"eos_token_id": EOS, "do_sample": False},
        "preprocessor_config.json": {
            "image_processor_type": "CLIPImageProcessor",
            "processor_class": "LlavaProcessor",
            "do_convert_rgb": True,
            "do_resize": True,
            "size": {"shortest_edge": SIZE},
            "resample": 3,
            "do_center_crop": True,
            "crop_size": size,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5],
        },
        "processor_config.json": {
            "processor_class": "LlavaProcessor",
            "image_token": "<image>",
            "patch_size": PATCH,
            "num_additional_image_tokens": 1,
            "vision_feature_select_strategy": "default",
        },
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
            "extra_special_tokens": {"image_token": "<image>"},
            "model_max_length": model.text.shape.max_position_embeddings,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
        "tokenizer.json": tokenizer,
    }


CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}"
    "{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}<image>{% endif %}"
    "{% endfor %}{% endif %}{{ '\\n' }}"
    "{% endfor %}"
)
"""Each message on a line of its own; a picture stands where its part stands."""


def export(model: Sees, out: Path) -> int:
    """Write the Hugging Face folder; bytes of the weights."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_weights(model), out / "model.safetensors", metadata={"format": "pt"})
    for name, data in folder_files(model).items():
        text = json.dumps(data, indent=2, ensure_ascii=False)
        (out / name).write_text(f"{text}\n", encoding="utf-8")
    return (out / "model.safetensors").stat().st_size


def card(figures: dict[str, Any]) -> str:
    """The model card, of the figures in `training.json`."""
    text, vision, run = figures["text"], figures["vision"], figures["run"]
    example = {
        "what": "what is this?", "list": "what is here?", "colour": "what colour is the 7?",
        "count": "how many things?", "where": "where is the red circle?",
        "at": "what is top left?", "is": "is there a red circle?",
        "which": "which has a circle?", "same": "same colour?",
        "second": "what is in the second?",
    }  # fmt: skip
    rows = "\n".join(
        f"| {kind} | {example[kind]} | {100 * share:.1f} % |"
        for kind, share in figures["accuracy"].items()
    )
    mean = 100 * sum(figures["accuracy"].values()) / len(KINDS)
    heads = f"{text['num_attention_heads']} query heads and {text['num_key_value_heads']} KV head"
    return f"""---
license: apache-2.0
language: en
library_name: transformers
pipeline_tag: image-text-to-text
---

# byte-sees

A LLaVA of {figures["parameters"]:,} parameters that says what is drawn in a picture: shapes,
digits, colours, how many and where. It exists so that a course can follow a picture through a real,
trained model on a laptop. It loads in `mini_vllm`, in `transformers` and in vLLM from this folder.
Of photographs it knows nothing.

| | |
| --- | --- |
| architecture | `LlavaForConditionalGeneration`: a CLIP tower, two projecting layers, a Llama |
| picture | {SIZE} x {SIZE} pixels in patches of {PATCH}: {NUM_PATCHES} tokens |
| tower | {_layers(vision)}, {vision["num_attention_heads"]} heads |
| language model | {_layers(text)}, {heads} of {text["head_dim"]} |
| vocabulary | {text["vocab_size"]}: token id = byte value, {EOS} ends, {IMAGE} is `<image>` |
| context | {text["max_position_embeddings"]:,} tokens |
| weights | fp16, {figures["weights_bytes"]:,} bytes |

A prompt is `<image>`, a question and a line break: `<image>what is this?\\n`. Two pictures are
`<image><image>which has a circle?\\n`. A conversation goes on with the answer, a line break and the
next question. A picture of another size is resized and cropped to the square in its middle.

## Quality

Share of held-out questions whose greedy answer is right to the last letter, {figures["per_kind"]}
of each kind; {mean:.1f} % on average.

| kind | such as | right |
| --- | --- | --- |
{rows}

Held-out pictures come from a stream of random numbers that training does not draw from. They are
drawn by the same hand, so this says nothing about drawings of another.

## Data

Pictures, questions and answers are drawn by `labkit/pictures.py`: {run["batch"]:,} conversations a
step, each of up to four questions about one or two pictures.

## Training

```console
$ {run["command"]}
```

Seed {run["seed"]}, {run["steps"]:,} steps. AdamW at {run["lr"]} with {run["dtype"]} products,
warm-up of 200 steps, half a cosine to zero. It took {run["seconds"] / 60:.1f} minutes on
{run["device"]} with {run["processors"]} processors, {run["versions"]}. The running mean of
the loss ended at {run["loss"]:.4f}. Another machine rounds otherwise, so it gives other weights of
about the same quality.
"""


def _layers(shape: dict[str, Any]) -> str:
    return f"{shape['num_hidden_layers']} layers, hidden {shape['hidden_size']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "models" / "byte-sees")
    parser.add_argument("--steps", type=int, default=3400)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--lr", type=float, default=0.0015)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="of the products")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw")
    parser.add_argument("--held-out", type=int, default=PER_KIND, help="questions of each kind")
    args = parser.parse_args()
    device = torch.device(args.device)
    if args.dtype is None:
        args.dtype = "bfloat16" if device.type == "cuda" else "float32"
    torch.manual_seed(args.seed)
    model = Sees().to(device)
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters on {device}, {args.dtype} products", flush=True)
    began = time.time()
    log = train(model, args, device)
    seconds = round(time.time() - began, 1)
    with torch.no_grad():
        for p in model.parameters():  # what ships is fp16, so that is what is measured
            p.copy_(p.half().float())
    found = accuracy(model, args.seed, args.held_out, device)
    size = export(model, args.out)
    on_gpu = device.type == "cuda"
    figures = {
        "parameters": count,
        "weights_bytes": size,
        "accuracy": found,
        "per_kind": args.held_out,
        "text": asdict(model.text.shape),
        "vision": asdict(model.vision),
        "run": {
            "command": "python " + " ".join(["models/train_sees.py", *sys.argv[1:]]),
            **{n: getattr(args, n) for n in ("seed", "steps", "batch", "lr", "dtype")},
            "seconds": seconds,
            "loss": log[-1]["loss"],
            "device": torch.cuda.get_device_name() if on_gpu else platform.machine(),
            "processors": os.cpu_count(),
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        },
        "log": log,
    }
    (args.out / "training.json").write_text(json.dumps(figures, indent=2) + "\n")
    (args.out / "README.md").write_text(card(figures), encoding="utf-8")
    print(json.dumps({"accuracy": found, "seconds": seconds, "bytes": size}), flush=True)


if __name__ == "__main__":
    main()
