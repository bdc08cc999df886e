"""Train the shipped models: small, byte-level decoders, from text that is free to use.

Promises: same corpus, seed and steps on the same torch build give the same folder;
held-out numbers come from whole files that training never saw; the result is a
Hugging Face folder that `mini_vllm`, `transformers` and vLLM all load.

    python models/train.py byte-llama --steps 8000      # the default model, 3.2 M parameters
    python models/train.py byte-draft --steps 2400      # a drafter for it
    python models/train.py byte-moe --steps 1500        # 16 experts, two of them per token
    python models/train.py dense-twin --steps 1500      # as large as what byte-moe puts to work

Needs torch (CPU is enough). Nothing in `mini_vllm` imports this file.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import lzma
import math
import platform
import sys
import sysconfig
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

EOS = 256
HELD_OUT_ONE_IN = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the network; names are those of a Llama or Qwen3-MoE `config.json`.

    `num_experts` > 0 replaces every MLP by that many of `moe_intermediate_size` and a router
    that takes `num_experts_per_tok` of them, and normalises Q and K per head, as Qwen3 does.
    """

    vocab_size: int = 257
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int = 2
    head_dim: int = 64
    max_position_embeddings: int = 1024
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0


# Experts of 64, not 56: vLLM's grouped kernel for the CPU takes widths that are multiples of 32.
MOE = Shape(
    intermediate_size=128,
    num_key_value_heads=1,
    num_experts=16,
    num_experts_per_tok=2,
    moe_intermediate_size=64,
)
SHAPES = {
    "byte-llama": Shape(),
    "byte-draft": Shape(
        hidden_size=192,
        intermediate_size=576,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
    ),
    "byte-moe": MOE,
    # The network that computes as much per token as byte-moe does: a yardstick, not shipped.
    "dense-twin": Shape(intermediate_size=128, num_key_value_heads=1),
}
ROUTER_AUX_LOSS = 0.01  # weight of the load-balancing loss (Switch Transformer, equation 4)


# --------------------------------------------------------------------------- corpus


def docstrings_of(path: Path) -> str:
    """All docstrings of one Python file, in source order, as plain text ("" when unreadable)."""
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError, ValueError, RecursionError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = []
    for node in ast.walk(tree):
        if isinstance(node, kinds) and (doc := ast.get_docstring(node, clean=False)):
            title = getattr(node, "name", path.stem)
            found.append((node.body[0].lineno, f"{title}\n{inspect.cleandoc(doc)}"))
    return "\n\n".join(text for _, text in sorted(found))


def collect(upstream: Path) -> dict[str, str]:
    """Document name -> text: the pinned tree's Markdown and docstrings, and the docstrings of
    the Python standard library, numpy and torch as installed here."""
    documents: dict[str, str] = {}
    for path in sorted(upstream.rglob("*.md")):
        documents[f"upstream/{path.relative_to(upstream)}"] = path.read_text(errors="replace")
    for path in sorted(upstream.rglob("*.py")):
        documents[f"upstream/{path.relative_to(upstream)}"] = docstrings_of(path)
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(stdlib.rglob("*.py")):
        name = path.relative_to(stdlib)
        if not {"site-packages", "test", "tests", "lib2to3"} & set(name.parts):
            documents[f"stdlib/{name}"] = docstrings_of(path)
    for package in (np, torch):
        root = Path(package.__file__).parent
        for path in sorted(root.rglob("*.py")):
            if not {"test", "tests", "testing"} & set(path.relative_to(root).parts):
                name = f"{package.__name__}/{path.relative_to(root)}"
                documents[name] = docstrings_of(path)
    # The language reference that `help()` shows, one document per topic.
    from pydoc_data.topics import topics

    documents |= {f"stdlib/topics/{name}": text for name, text in sorted(topics.items())}
    return {name: text for name, text in documents.items() if len(text) >= 64}


def is_held_out(name: str) -> bool:
    """Whole files are kept apart by a hash of their name, so the split never drifts."""
    return hashlib.blake2b(name.encode(), digest_size=4).digest()[0] % HELD_OUT_ONE_IN == 0


def tokens_of(texts: list[str]) -> Tensor:
    """UTF-8 bytes of each text followed by EOS, as one int16 tensor [num_tokens]."""
    parts = []
    for text in texts:
        parts.append(
            np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.int16)
        )
        parts.append(np.array([EOS], dtype=np.int16))
    return torch.from_numpy(np.concatenate(parts))


# --------------------------------------------------------------------------- network


class DenseMLP(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x))."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        d = s.hidden_size
        self.gate_proj = nn.Linear(d, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(d, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, d, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class SparseMLP(nn.Module):
    """A router and `num_experts` SwiGLUs, the weights of all experts stacked.

    Softmax over all experts, the best `num_experts_per_tok`, weights renormalised: Qwen3-MoE
    with `norm_topk_prob`. `aux` holds the load-balancing loss of the last call.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        d, e, i = s.hidden_size, s.num_experts, s.moe_intermediate_size
        self.shape = s
        self.gate = nn.Linear(d, e, bias=False)
        self.gate_proj = nn.Parameter(torch.empty(e, i, d))
        self.up_proj = nn.Parameter(torch.empty(e, i, d))
        self.down_proj = nn.Parameter(torch.empty(e, d, i))
        self.aux = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        s, flat = self.shape, x.flatten(0, 1)  # [tokens, hidden]
        probs = self.gate(flat).float().softmax(-1)
        weights, ids = probs.topk(s.num_experts_per_tok, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        loads = torch.bincount(ids.flatten(), minlength=s.num_experts)
        self.aux = s.num_experts * (loads / ids.numel() * probs.mean(0)).sum()
        # Rows sorted by expert; each expert multiplies its own rows.
        order = ids.flatten().argsort(stable=True)
        rows = order // s.num_experts_per_tok
        groups = flat[rows].split(loads.tolist())
        experts = zip(groups, self.gate_proj, self.up_proj, self.down_proj, strict=True)
        out = [
            F.linear(F.silu(F.linear(group, gate)) * F.linear(group, up), down)
            for group, gate, up, down in experts
        ]
        out = torch.cat(out) * weights.flatten()[order][:, None]
        return torch.zeros_like(flat).index_add(0, rows, out.to(flat.dtype)).view(x.shape)


class Block(nn.Module):
    """One decoder layer: RMSNorm, grouped-query attention, RMSNorm, a dense or sparse MLP."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        d, q, kv = (
            s.hidden_size,
            s.num_attention_heads * s.head_dim,
            s.num_key_value_heads * s.head_dim,
        )
        self.shape = s
        self.input_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.q_proj, self.k_proj = nn.Linear(d, q, bias=False), nn.Linear(d, kv, bias=False)
        self.v_proj, self.o_proj = nn.Linear(d, kv, bias=False), nn.Linear(q, d, bias=False)
        self.mlp = SparseMLP(s) if s.num_experts else DenseMLP(s)
        if s.num_experts:
            self.q_norm = nn.RMSNorm(s.head_dim, s.rms_norm_eps)
            self.k_norm = nn.RMSNorm(s.head_dim, s.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = self.shape
        batch, length, _ = x.shape
        h = self.input_layernorm(x)
        q = self.q_proj(h).view(batch, length, s.num_attention_heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(h).view(batch, length, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(h).view(batch, length, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        if s.num_experts:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        h = self.post_attention_layernorm(x)
        return x + self.mlp(h)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE in the half-split layout of Hugging Face Llama checkpoints."""
    left, right = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-right, left), dim=-1) * sin.to(x.dtype)


class ByteLlama(nn.Module):
    """The decoder; `forward(ids [batch, length])` returns logits [batch, length, vocab]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Block(s) for _ in range(s.num_hidden_layers))
        self.norm = nn.RMSNorm(s.hidden_size, s.rms_norm_eps)
        frequency = s.rope_theta ** -(torch.arange(0, s.head_dim, 2).float() / s.head_dim)
        angle = torch.outer(torch.arange(s.max_position_embeddings).float(), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)
        for name, p in self.named_parameters():
            if p.ndim >= 2:
                std = (
                    0.02 / math.sqrt(2 * s.num_hidden_layers)
                    if "o_proj" in name or "down" in name
                    else 0.02
                )
                nn.init.normal_(p, std=std)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids)
        length = ids.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), self.embed_tokens.weight)


# --------------------------------------------------------------------------- training


def held_out_bits_per_byte(
    model: ByteLlama, stream: Tensor, context: int, limit: int | None = None
) -> float:
    """Mean -log2 p over the held-out stream in windows that overlap by half, fp32.

    Each window scores its second half only (the first window scores all of it), so every
    byte but the first few hundred is predicted from at least `context / 2` bytes.
    """
    model.eval()
    stream = stream[:limit] if limit else stream
    half, total, count = context // 2, 0.0, 0
    with torch.no_grad():
        for start in range(0, len(stream) - 1, half):
            window = stream[start : start + context + 1].long()
            loss = F.cross_entropy(
                model(window[None, :-1])[0].float(), window[1:], reduction="none"
            )
            scored = loss if start == 0 else loss[half:]
            total, count = total + float(scored.sum()), count + len(scored)
    model.train()
    return total / count / math.log(2)


def learning_rate(step: int, steps: int) -> float:
    """Warm up over 100 steps, stay flat, fall linearly to zero over the last 45 %."""
    return min(1.0, (step + 1) / 100, (steps - step) / (0.45 * steps))


def crops(
    stream: Tensor, count: int, length: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """`count` random windows: inputs and targets, both [count, length]."""
    starts = torch.randint(len(stream) - length - 1, (count,), generator=generator)
    rows = torch.stack([stream[s : s + length + 1] for s in starts]).long()
    return rows[:, :-1], rows[:, 1:]


def train(
    model: ByteLlama, stream: Tensor, held: Tensor, steps: int, seed: int, scratch: Path
) -> list[str]:
    """Run the schedule; returns the log lines. Goes on from `scratch`, saved every 500 steps."""
    generator = torch.Generator().manual_seed(seed)
    # Muon takes matrices; stacked experts and the router learn by AdamW with the rest.
    named = list(model.named_parameters())
    muon = {n for n, p in named if p.ndim == 2 and "embed" not in n and ".gate." not in n}
    matrices = [p for n, p in named if n in muon]
    rest = [p for n, p in named if n not in muon]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
        torch.optim.AdamW(rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    base = [g["lr"] for o in optimizers for g in o.param_groups]
    log, began, running, first = [], time.time(), 0.0, 0
    if (scratch / "last.pt").exists():
        state = torch.load(scratch / "last.pt")
        model.load_state_dict(state["model"])
        for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        generator.set_state(state["generator"])
        first, running = state["step"], state["running"]
        print(f"going on from step {first} of {scratch}", flush=True)
    fast_bf16 = torch.cpu._is_amx_tile_supported()  # without AMX, float32 products are faster
    for step in range(first, steps):
        count, length = (
            (16, 256) if step < 0.4 * steps else (8, 512) if step < 0.75 * steps else (4, 1024)
        )
        inputs, targets = crops(stream, count, length, generator)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=fast_bf16):
            logits = model(inputs)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        aux = [b.mlp.aux for b in model.layers if isinstance(b.mlp, SparseMLP)]
        (loss + ROUTER_AUX_LOSS * sum(aux)).backward()
        nn.utils.clip_grad_norm_(rest, 1.0)
        for group, lr in zip((g for o in optimizers for g in o.param_groups), base, strict=True):
            group["lr"] = lr * learning_rate(step, steps)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        running = loss.item() if step == 0 else 0.98 * running + 0.02 * loss.item()
        if (step + 1) % 250 == 0 or step + 1 == steps:
            bits, seconds = running / math.log(2), time.time() - began
            line = f"step {step + 1:5d}  train {bits:.3f} bits/byte  {seconds:6.0f} s"
            if (step + 1) % 500 == 0:
                bits = held_out_bits_per_byte(model, held, 1024, limit=65536)
                line += f"  held-out (first 64 KiB) {bits:.3f}"
                state = {"step": step + 1, "model": model.state_dict(), "running": running}
                state["optimizers"] = [o.state_dict() for o in optimizers]
                state["generator"] = generator.get_state()
                torch.save(state, scratch / "new.pt")
                (scratch / "new.pt").replace(scratch / "last.pt")
            print(line, flush=True)
            log.append(line)
    return log


# --------------------------------------------------------------------------- export


def byte_to_unicode() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, which the `tokenizers` ByteLevel step expects."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table, extra = {b: chr(b) for b in printable}, 0
    for b in range(256):
        if b not in table:
            table[b], extra = chr(256 + extra), extra + 1
    return table


def tokenizer_json() -> dict:
    """A tokenizer without merges: every byte is its own token, id = byte value, 256 = EOS."""
    eos = {
        "id": EOS,
        "content": "<|endoftext|>",
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": False,
        "special": True,
    }
    byte_level = {
        "type": "ByteLevel",
        "add_prefix_space": False,
        "trim_offsets": False,
        "use_regex": False,
    }
    vocab = {char: byte for byte, char in byte_to_unicode().items()} | {"<|endoftext|>": EOS}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [eos],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": dict(sorted(vocab.items(), key=lambda kv: kv[1])),
            "merges": [],
        },
    }


def hugging_face_names(model: ByteLlama) -> dict[str, Tensor]:
    """Name in a Hugging Face checkpoint -> tensor, fp16; stacked experts one matrix each."""
    weights = {}
    for name, p in model.state_dict().items():
        for part in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm"):
            name = name.replace(f".{part}", f".self_attn.{part}")
        if p.ndim == 3:
            stem, part = name.rsplit(".", 1)
            for e, expert in enumerate(p):
                weights[f"model.{stem}.experts.{e}.{part}.weight"] = expert.clone()
        else:
            weights[f"model.{name}"] = p
    return {name: p.to(torch.float16).contiguous() for name, p in weights.items()}


def config_json(s: Shape) -> dict:
    """The `config.json` of a shape: LlamaForCausalLM, or Qwen3MoeForCausalLM with experts."""
    sizes = asdict(s)
    common = {
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": None,
        "dtype": "float16",
        "torch_dtype": "float16",
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if not s.num_experts:
        dense = {k: v for k, v in sizes.items() if "expert" not in k and "moe" not in k}
        named = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**named, **dense, **common, "mlp_bias": False}
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        **sizes,
        **common,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "router_aux_loss_coef": ROUTER_AUX_LOSS,
        "output_router_logits": False,
    }


def export(model: ByteLlama, out: Path) -> None:
    """Write the Hugging Face folder: config, weights in fp16, tokenizer, generation config."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_names(model), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": model.shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": EOS, "do_sample": False}
    for name, data in (
        ("config.json", config_json(model.shape)),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", tokenizer_json()),
    ):
        (out / name).write_text(
            json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--upstream", type=Path, default=Path("upstream"))
    parser.add_argument("name", choices=list(SHAPES), help="which model")
    parser.add_argument("--out", type=Path, help="default: models/NAME")
    parser.add_argument("--steps", type=int, default=8000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument(
        "--corpus-only", action="store_true", help="print corpus sizes and xz, then stop"
    )
    args = parser.parse_args()
    if not (args.upstream / "vllm").is_dir():
        parser.error(
            f"--upstream {args.upstream}: no pinned tree there; run `course upstream fetch`"
        )
    documents = collect(args.upstream)
    held_names = [n for n in documents if is_held_out(n)]
    train_names = [n for n in documents if not is_held_out(n)]
    order = np.random.default_rng(args.seed).permutation(len(train_names))
    stream = tokens_of([documents[train_names[i]] for i in order])
    held_bytes = "".join(documents[n] for n in held_names).encode("utf-8", "replace")
    held = tokens_of([documents[n] for n in held_names])
    xz = len(lzma.compress(held_bytes, preset=9)) * 8 / len(held_bytes)
    print(f"python {platform.python_version()}, torch {torch.__version__}")
    print(
        f"train {len(train_names)} files, {len(stream):,} tokens; "
        f"held out {len(held_names)} files, {len(held_bytes):,} bytes; "
        f"xz -9 on them: {xz:.3f} bits/byte",
        flush=True,
    )
    if args.corpus_only:
        return
    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    shape = SHAPES[args.name]
    model = ByteLlama(shape)
    scratch = Path("models/scratch") / args.name
    scratch.mkdir(parents=True, exist_ok=True)
    total = sum(p.numel() for p in model.parameters())
    idle = sum(p.numel() for p in model.parameters() if p.ndim == 3)
    active = total - idle + idle * shape.num_experts_per_tok // max(shape.num_experts, 1)
    print(f"{total:,} parameters, {active:,} of them at work per token", flush=True)
    train(model, stream, held, args.steps, args.seed, scratch)
    export(model, args.out or Path("models") / args.name)
    rounded = ByteLlama(shape)  # what ships is fp16, so that is what is measured
    rounded.load_state_dict({k: v.half().float() for k, v in model.state_dict().items()})
    bits = held_out_bits_per_byte(rounded, held, 1024)
    print(f"held-out, fp16 weights: {bits:.4f} bits/byte (xz -9: {xz:.4f})")


if __name__ == "__main__":
    sys.exit(main())
