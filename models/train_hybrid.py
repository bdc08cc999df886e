"""Train the two shipped models whose layers keep different things.

    python models/train_hybrid.py corpus                          # once, where the pinned tree is
    python models/train_hybrid.py byte-window --steps 6000 --device cuda
    python models/train_hybrid.py byte-state --steps 6000 --device cuda

`byte-window` is a Gemma 3: two layers that see the last 64 tokens, then one that sees all, twice.
`byte-state` is a Granite 4 hybrid: two Mamba-2 layers, then one of attention without positions,
twice. Promises: the same corpus, seed, steps and torch build on the same device give the same
folder, in Hugging Face's layout; what is measured is what ships, weights rounded to fp16; the
figures of the model's card come from the folder's `figures.json`. Training needs torch,
numpy and safetensors, and the corpus file, no more.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import train as base  # the corpus, the tokenizer and the schedule of the other models

SCRATCH = Path("models/scratch")
SCHEDULE = ((0.4, 256), (0.75, 512), (0.95, 1024), (1.0, 4096))
"""Up to which share of the steps crops have which length."""
CHUNK = 64
"""Tokens that a scan of states takes at a time."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a network. `layers` says what each one keeps: K and V of a window, of all tokens,
    or a state."""

    layers: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 64
    vocab_size: int = 257
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-6
    sliding_window: int = 64
    rope_theta: float = 1_000_000.0
    rope_local_base_freq: float = 10_000.0
    mamba_n_heads: int = 12
    mamba_d_head: int = 32
    mamba_d_state: int = 16
    mamba_d_conv: int = 4

    @property
    def has_states(self) -> bool:
        return "mamba" in self.layers

    @property
    def inner(self) -> int:
        """Channels of a Mamba layer."""
        return self.mamba_n_heads * self.mamba_d_head


WINDOW, FULL, MAMBA, ATTENTION = "sliding_attention", "full_attention", "mamba", "attention"
SHAPES = {
    "byte-window": Shape((WINDOW, WINDOW, FULL) * 2, 256, 512, 4, 2),
    "byte-state": Shape((MAMBA, MAMBA, ATTENTION) * 2, 192, 480, 3, 1, rms_norm_eps=1e-5),
}


# --------------------------------------------------------------------------- network


class RMSNorm(nn.Module):
    """x / rms(x), times the weight, or times one more than it as Gemma has it."""

    def __init__(self, size: int, eps: float, from_one: bool) -> None:
        super().__init__()
        self.eps, self.from_one = eps, from_one
        self.weight = nn.Parameter(torch.zeros(size) if from_one else torch.ones(size))

    def forward(self, x: Tensor) -> Tensor:
        weight = 1 + self.weight if self.from_one else self.weight
        return F.rms_norm(x.float(), weight.shape, weight, self.eps)


class Attention(nn.Module):
    """Grouped-query attention over all tokens before, or over a window of them."""

    def __init__(self, s: Shape, kind: str) -> None:
        super().__init__()
        q, kv = s.num_attention_heads * s.head_dim, s.num_key_value_heads * s.head_dim
        self.shape, self.window = s, s.sliding_window if kind == WINDOW else None
        self.q_proj = nn.Linear(s.hidden_size, q, bias=False)
        self.k_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(s.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(q, s.hidden_size, bias=False)
        if kind != ATTENTION:
            self.q_norm = RMSNorm(s.head_dim, s.rms_norm_eps, from_one=True)
            self.k_norm = RMSNorm(s.head_dim, s.rms_norm_eps, from_one=True)
            theta = s.rope_theta if kind == FULL else s.rope_local_base_freq
            powers = torch.arange(0, s.head_dim, 2).double() / s.head_dim
            angle = torch.outer(torch.arange(s.max_position_embeddings).double(), theta**-powers)
            angle = torch.cat((angle, angle), dim=-1)
            self.register_buffer("cos", angle.cos().float(), persistent=False)
            self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        q = self.q_proj(x).view(batch, length, s.num_attention_heads, s.head_dim).transpose(1, 2)
        k = self.k_proj(x).view(batch, length, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        v = self.v_proj(x).view(batch, length, s.num_key_value_heads, s.head_dim).transpose(1, 2)
        if hasattr(self, "cos"):
            cos, sin = self.cos[:length], self.sin[:length]
            q = base.rotate(self.q_norm(q), cos, sin).to(v.dtype)
            k = base.rotate(self.k_norm(k), cos, sin).to(v.dtype)
        group = s.num_attention_heads // s.num_key_value_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self.window is None or length <= self.window:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            out = window_attention(q, k, v, self.window)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


def window_attention(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Each token sees itself and the `window - 1` before it; all [batch, heads, length, dim].

    Queries go in pieces of one window, whose keys are its own and those of the piece before.
    """
    batch, heads, length, dim = q.shape
    pad = -length % window
    q, k, v = (F.pad(t, (0, 0, 0, pad)) for t in (q, k, v))
    pieces = (length + pad) // window
    folded = [t.reshape(batch * heads, pieces, window, dim) for t in (q, k, v)]
    keys, values = (torch.cat((F.pad(t[:, :-1], (0, 0, 0, 0, 1, 0)), t), 2) for t in folded[1:])
    row = torch.arange(window, device=q.device)[:, None]
    column = torch.arange(2 * window, device=q.device)[None] - window
    seen = (column <= row) & (column > row - window)  # [window, 2 * window]
    first = torch.arange(pieces, device=q.device)[:, None, None] == 0
    seen = seen & ~(first & (column < 0))  # nothing stands before the first piece
    out = F.scaled_dot_product_attention(folded[0], keys, values, attn_mask=seen)
    return out.reshape(batch, heads, length + pad, dim)[:, :, :length]


class Mamba(nn.Module):
    """Mamba-2: a short convolution, then a state per head that decays and takes in each token."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        inner, heads = s.inner, s.mamba_n_heads
        self.shape, channels = s, inner + 2 * s.mamba_d_state
        self.in_proj = nn.Linear(s.hidden_size, inner + channels + heads, bias=False)
        self.conv1d = nn.Conv1d(channels, channels, s.mamba_d_conv, groups=channels)
        dt = torch.exp(torch.rand(heads) * math.log(100) + math.log(0.001))  # 0.001 to 0.1
        self.dt_bias = nn.Parameter(dt + torch.log(-torch.expm1(-dt)))  # its inverse softplus
        self.A_log = nn.Parameter(torch.log(1 + 15 * torch.rand(heads)))
        self.D = nn.Parameter(torch.ones(heads))
        self.norm = RMSNorm(inner, s.rms_norm_eps, from_one=False)
        self.out_proj = nn.Linear(inner, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        s, (batch, length, _) = self.shape, x.shape
        inner, states, heads = s.inner, s.mamba_d_state, s.mamba_n_heads
        gate, mixed, dt = self.in_proj(x).split([inner, inner + 2 * states, heads], -1)
        mixed = F.pad(mixed.transpose(1, 2), (s.mamba_d_conv - 1, 0))
        mixed = F.silu(self.conv1d(mixed)).transpose(1, 2)
        values, write, read = mixed.split([inner, states, states], -1)
        with torch.autocast(x.device.type, enabled=False):
            values = values.float().view(batch, length, heads, s.mamba_d_head)
            dt = F.softplus(dt.float() + self.dt_bias)
            decay = -torch.exp(self.A_log) * dt  # [batch, length, heads], log of what is kept
            out = scan(values * dt[..., None], decay, write.float(), read.float())
            out = (out + values * self.D[:, None]).reshape(batch, length, inner)
            out = self.norm(out * F.silu(gate.float()))
        return self.out_proj(out)


def scan(values: Tensor, decay: Tensor, write: Tensor, read: Tensor) -> Tensor:
    """y[t] = read[t] @ state[t], state[t] = exp(decay[t]) * state[t - 1] + write[t] x values[t].

    Within a chunk as a masked product, between chunks as a recurrence written as one product.

    Args:
        values: [batch, length, heads, dim].
        decay: [batch, length, heads], at most 0.
        write, read: [batch, length, states], the same for all heads.
    """
    batch, length, heads, dim = values.shape
    pad = -length % CHUNK
    if pad:
        values = F.pad(values, (0, 0, 0, 0, 0, pad))
        decay, write, read = (F.pad(t, (0, 0, 0, pad)) for t in (decay, write, read))
    chunks = (length + pad) // CHUNK
    values = values.view(batch, chunks, CHUNK, heads, dim).transpose(2, 3)  # [b, c, h, l, d]
    write, read = (t.view(batch, chunks, 1, CHUNK, -1) for t in (write, read))
    decay = decay.view(batch, chunks, CHUNK, heads).transpose(2, 3).cumsum(-1)  # [b, c, h, l]
    kept = _differences(decay).exp()  # [b, c, h, l, l]
    inside = (read @ write.transpose(-1, -2)) * kept @ values
    left = (decay[..., -1:] - decay).exp()  # what of each token is left at the chunk's end
    added = (values * left[..., None]).transpose(-1, -2) @ write  # [b, c, h, d, n]
    ends = F.pad(decay[..., -1].transpose(1, 2).cumsum(-1), (1, 0))  # [b, h, c + 1]
    carried = _differences(ends).exp()[:, :, :-1, 1:]  # from the end of one to the start of another
    states = torch.einsum("bhcz,bzhdn->bchdn", carried, added)
    before = (read @ states.transpose(-1, -2)) * decay.exp()[..., None]
    return (inside + before).transpose(2, 3).reshape(batch, length + pad, heads, dim)[:, :length]


def _differences(sums: Tensor) -> Tensor:
    """sums[i] - sums[j] for j <= i, and minus infinity elsewhere: [..., n] -> [..., n, n]."""
    n = sums.shape[-1]
    hidden = torch.ones(n, n, dtype=torch.bool, device=sums.device).triu(1)
    return (sums[..., :, None] - sums[..., None, :]).masked_fill(hidden, -math.inf)


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), with Gemma's GELU or with SiLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.has_states = s.has_states
        self.gate_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.up_proj = nn.Linear(s.hidden_size, s.intermediate_size, bias=False)
        self.down_proj = nn.Linear(s.intermediate_size, s.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate_proj(x)
        gate = F.silu(gate) if self.has_states else F.gelu(gate, approximate="tanh")
        return self.down_proj(gate * self.up_proj(x))


class Layer(nn.Module):
    """A mixer and an MLP, each after a norm; in Gemma each before one as well."""

    def __init__(self, s: Shape, kind: str) -> None:
        super().__init__()
        self.mixer: nn.Module = Mamba(s) if kind == MAMBA else Attention(s, kind)
        self.mlp = MLP(s)
        names = ["input_layernorm", "post_attention_layernorm"]
        if not s.has_states:
            names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        for name in names:
            setattr(self, name, RMSNorm(s.hidden_size, s.rms_norm_eps, not s.has_states))
        self.has_states = s.has_states

    def forward(self, x: Tensor) -> Tensor:
        if self.has_states:
            x = x + self.mixer(self.input_layernorm(x))
            return x + self.mlp(self.post_attention_layernorm(x))
        x = x + self.post_attention_layernorm(self.mixer(self.input_layernorm(x)))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Decoder(nn.Module):
    """`forward(ids [batch, length])` returns logits [batch, length, vocab]."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.shape = s
        self.scale = 1.0 if s.has_states else s.hidden_size**0.5
        self.embed_tokens = nn.Embedding(s.vocab_size, s.hidden_size)
        self.layers = nn.ModuleList(Layer(s, kind) for kind in s.layers)
        self.norm = RMSNorm(s.hidden_size, s.rms_norm_eps, not s.has_states)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = "o_proj" in name or "out_proj" in name or "down_proj" in name
                nn.init.normal_(p, std=0.02 / (math.sqrt(2 * len(s.layers)) if last else 1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed_tokens(ids) * self.scale
        for layer in self.layers:
            x = layer(x)
        return F.linear(self.norm(x), self.embed_tokens.weight)


# --------------------------------------------------------------------------- training


def held_out(model: Decoder, stream: Tensor, context: int, limit: int | None = None) -> float:
    """Bits per byte as `train.held_out_bits_per_byte` counts them, many windows at a time, fp32."""
    stream = stream[:limit] if limit else stream
    half = context // 2
    starts = list(range(0, len(stream) - 1, half))
    whole = [s for s in starts if s + context < len(stream)]
    groups = [whole[i : i + 32768 // context] for i in range(0, len(whole), 32768 // context)]
    groups += [[s] for s in starts if s not in set(whole)]
    total, count = 0.0, 0
    with torch.no_grad():
        for group in groups:
            rows = torch.stack([stream[s : s + context + 1] for s in group]).long()
            logits = model(rows[:, :-1]).float()
            loss = F.cross_entropy(logits.transpose(1, 2), rows[:, 1:], reduction="none")
            for start, row in zip(group, loss, strict=True):
                scored = row if start == 0 else row[half:]
                total, count = total + float(scored.sum()), count + len(scored)
    return total / count / math.log(2)


def crop_length(step: int, steps: int) -> int:
    """Tokens per crop at a step of the schedule."""
    return next(length for share, length in SCHEDULE if step < share * steps)


class Trainer:
    """The optimizers and one step of them."""

    def __init__(self, model: Decoder, stream: Tensor, seed: int, tokens_per_step: int) -> None:
        self.model, self.stream, self.tokens_per_step = model, stream, tokens_per_step
        self.generator = torch.Generator().manual_seed(seed)
        named = list(model.named_parameters())
        matrices = [p for n, p in named if p.ndim == 2 and "embed" not in n]
        self.rest = [p for n, p in named if p.ndim != 2 or "embed" in n]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.01),
            torch.optim.AdamW(self.rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.groups = [g for o in self.optimizers for g in o.param_groups]
        self.base = [g["lr"] for g in self.groups]

    def step(self, step: int, steps: int) -> Tensor:
        length = crop_length(step, steps)
        count = max(1, self.tokens_per_step // length)
        starts = torch.randint(
            len(self.stream) - length - 1, (count, 1), generator=self.generator
        ).to(self.stream.device)
        rows = self.stream[starts + torch.arange(length + 1, device=starts.device)].long()
        with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
            logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group, rate in zip(self.groups, self.base, strict=True):
            group["lr"] = rate * base.learning_rate(step, steps)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def state(self) -> dict:
        return {
            "model": self.model.state_dict(),
            "optimizers": [o.state_dict() for o in self.optimizers],
            "generator": self.generator.get_state(),
        }

    def restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.generator.set_state(state["generator"].cpu())


def steps_for(seconds: float, build, sync) -> int:
    """How many steps take about `seconds` here, by a few of each crop length on a fresh model."""
    total, before = 0.0, 0.0
    trainer = build()
    for share, _ in SCHEDULE:
        at = int(before * 1000)
        for repeat in range(13):
            if repeat == 3:  # the first ones choose kernels and take memory
                sync()
                began = time.perf_counter()
            trainer.step(at, 1000)
        sync()
        total += (share - before) * (time.perf_counter() - began) / 10
        before = share
    print(f"{1000 * total:.1f} ms per step", flush=True)
    return max(100, int(seconds / total) // 100 * 100)


def train(trainer: Trainer, held: Tensor, steps: int, scratch: Path) -> list[str]:
    """Run the schedule; returns the log lines. Goes on from `scratch`, saved every 500 steps."""
    log, first, running, last = [], 0, None, scratch / "last.pt"
    if last.exists():
        state = torch.load(last, map_location=held.device)
        if state["steps"] == steps:
            trainer.restore(state)
            first, running, log = state["step"], state["running"], state["log"]
            print(f"going on from step {first} of {scratch}", flush=True)
    began = time.time()
    for step in range(first, steps):
        loss = trainer.step(step, steps)
        running = loss if running is None else 0.98 * running + 0.02 * loss
        if (step + 1) % 250 == 0 or step + 1 == steps:
            bits = float(running) / math.log(2)
            line = f"step {step + 1:5d}  train {bits:.3f} bits/byte  {time.time() - began:6.0f} s"
            if (step + 1) % 1000 == 0:
                line += f"  held-out (64 KiB) {held_out(trainer.model, held, 1024, 65536):.3f}"
            print(line, flush=True)
            log.append(line)
        if (step + 1) % 500 == 0:
            saved = {**trainer.state(), "step": step + 1, "steps": steps}
            torch.save({**saved, "running": running, "log": log}, scratch / "new.pt")
            (scratch / "new.pt").replace(last)
    return log


# --------------------------------------------------------------------------- export


def hugging_face_names(model: Decoder) -> dict[str, Tensor]:
    """Name in a Hugging Face checkpoint -> tensor, fp16."""
    weights = dict(model.state_dict())
    kinds, out = model.shape.layers, {}
    for name, p in weights.items():
        if ".mixer." in name:
            kind = kinds[int(name.split(".")[1])]
            name = name.replace(".mixer.", ".mamba." if kind == MAMBA else ".self_attn.")
        elif model.shape.has_states and ".mlp." in name:
            if ".up_proj." in name:
                continue  # below its gate
            if ".gate_proj." in name:
                p = torch.cat((p, weights[name.replace("gate_proj", "up_proj")]))
            name = name.replace(".mlp.gate_proj", ".shared_mlp.input_linear")
            name = name.replace(".mlp.down_proj", ".shared_mlp.output_linear")
        out[f"model.{name}"] = p.detach().to("cpu", torch.float16).contiguous()
    return out


def config_json(s: Shape) -> dict:
    """The `config.json` of a shape: Gemma3ForCausalLM or GraniteMoeHybridForCausalLM."""
    common = {
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": len(s.layers),
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "max_position_embeddings": s.max_position_embeddings,
        "rms_norm_eps": s.rms_norm_eps,
        "layer_types": list(s.layers),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "bos_token_id": None,
        "eos_token_id": base.EOS,
        "pad_token_id": None,
        "dtype": "float16",
        "torch_dtype": "float16",
        "initializer_range": 0.02,
        "use_cache": True,
    }
    if not s.has_states:
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            **common,
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": s.head_dim,
            "sliding_window": s.sliding_window,
            "rope_theta": s.rope_theta,
            "rope_local_base_freq": s.rope_local_base_freq,
        }
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        **common,
        "hidden_act": "silu",
        "shared_intermediate_size": s.intermediate_size,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "position_embedding_type": "nope",
        "attention_multiplier": s.head_dim**-0.5,
        "embedding_multiplier": 1.0,
        "residual_multiplier": 1.0,
        "logits_scaling": 1.0,
        "mamba_n_heads": s.mamba_n_heads,
        "mamba_d_head": s.mamba_d_head,
        "mamba_d_state": s.mamba_d_state,
        "mamba_d_conv": s.mamba_d_conv,
        "mamba_n_groups": 1,
        "mamba_expand": s.inner // s.hidden_size,
        "mamba_chunk_size": CHUNK,
        "mamba_conv_bias": True,
        "mamba_proj_bias": False,
    }


def export(model: Decoder, out: Path) -> None:
    """Write the Hugging Face folder: config, weights in fp16, tokenizer, generation config."""
    out.mkdir(parents=True, exist_ok=True)
    save_file(hugging_face_names(model), out / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|endoftext|>",
        "model_max_length": model.shape.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    for name, data in (
        ("config.json", config_json(model.shape)),
        ("generation_config.json", {"eos_token_id": base.EOS, "do_sample": False}),
        ("tokenizer_config.json", tokenizer_config),
        ("tokenizer.json", base.tokenizer_json()),
    ):
        text = json.dumps(data, indent=2, ensure_ascii=False) + "\n"
        (out / name).write_text(text, encoding="utf-8")


# --------------------------------------------------------------------------- commands


def write_corpus(path: Path, upstream: Path, seed: int) -> None:
    """Collect the text of the other models into one file, with what there is to say of it."""
    if not (upstream / "vllm").is_dir():
        sys.exit(f"--upstream {upstream}: no pinned tree there; run `course upstream fetch`")
    documents = base.collect(upstream)
    held_names = [n for n in documents if base.is_held_out(n)]
    names = [n for n in documents if not base.is_held_out(n)]
    order = np.random.default_rng(seed).permutation(len(names))
    held_bytes = "".join(documents[n] for n in held_names).encode("utf-8", "replace")
    facts = {
        "python": platform.python_version(), "numpy": np.__version__, "torch": torch.__version__,
        "train_files": len(names), "held_out_files": len(held_names),
        "held_out_bytes": len(held_bytes), "seed": seed,
        "xz_bits_per_byte": len(lzma.compress(held_bytes, preset=9)) * 8 / len(held_bytes),
    }  # fmt: skip
    stream = base.tokens_of([documents[names[i]] for i in order]).numpy()
    held = base.tokens_of([documents[n] for n in held_names]).numpy()
    facts["train_tokens"] = len(stream)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, train=stream, held=held, facts=json.dumps(facts))
    print(f"{path}: {path.stat().st_size:,} bytes; {json.dumps(facts)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("name", choices=["corpus", *SHAPES], help="what to make")
    parser.add_argument("--corpus", type=Path, default=SCRATCH / "corpus.npz")
    parser.add_argument("--upstream", type=Path, default=Path("upstream"))
    parser.add_argument("--out", type=Path, help="default: models/NAME")
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--seconds", type=float, help="instead: as many steps as take so long here")
    parser.add_argument("--tokens-per-step", type=int, default=16384)
    parser.add_argument("--held-out", type=int, help="bytes of it to measure; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if args.name == "corpus":
        return write_corpus(args.corpus, args.upstream, args.seed)
    if not args.corpus.exists():
        parser.error(f"--corpus {args.corpus}: no such file; make it with the name `corpus`")
    data = np.load(args.corpus)
    facts = json.loads(str(data["facts"]))
    stream, held = (torch.from_numpy(data[n]).to(args.device) for n in ("train", "held"))
    torch.set_float32_matmul_precision("high")
    shape = SHAPES[args.name]

    def build() -> Trainer:
        torch.manual_seed(args.seed)
        model = Decoder(shape).to(args.device)
        return Trainer(model, stream, args.seed, args.tokens_per_step)

    if args.seconds:
        sync = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
        args.steps = steps_for(args.seconds, build, sync)
    trainer = build()
    parameters = sum(p.numel() for p in trainer.model.parameters())
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else platform.processor()
    print(f"{args.name}: {parameters:,} parameters, {args.steps} steps on {hardware}", flush=True)
    scratch = SCRATCH / args.name
    scratch.mkdir(parents=True, exist_ok=True)
    began = time.time()
    log = train(trainer, held, args.steps, scratch)
    seconds = time.time() - began
    out = args.out or Path("models") / args.name
    export(trainer.model, out)
    torch.set_float32_matmul_precision("highest")
    rounded = Decoder(shape)  # what ships is fp16, so that is what is measured
    state = trainer.model.state_dict()
    rounded.load_state_dict({k: v.cpu().half().float() for k, v in state.items()})
    rounded.to(args.device)
    bits = {c: round(held_out(rounded, held, c, args.held_out), 4) for c in (1024, 4096)}
    figures = {
        "model": args.name, "parameters": parameters,
        "weights_bytes": (out / "model.safetensors").stat().st_size,
        "steps": args.steps, "tokens_per_step": args.tokens_per_step, "seed": args.seed,
        "seconds": round(seconds, 1), "hardware": hardware,
        "trained_with": {"python": platform.python_version(), "torch": torch.__version__},
        "held_out_bits_per_byte": bits,
        "corpus": facts, "log": log,
    }  # fmt: skip
    (out / "figures.json").write_text(json.dumps(figures, indent=2) + "\n")
    print(json.dumps({k: v for k, v in figures.items() if k != "log"}, indent=2))


if __name__ == "__main__":
    main()
