"""Train `byte-mtp`: one multi-token-prediction module that drafts for the frozen byte-llama.

    python models/train_hybrid.py corpus                      # once, where the pinned tree is
    python models/train_mtp.py --seconds 100 --device cuda

The module is MiMo's (`vllm/model_executor/models/mimo_mtp.py:44` `MiMoMultiTokenPredictorLayer`):
two norms, a projection of [hidden state, embedding], one Qwen2 layer, a norm. At position i it
reads the trunk's hidden state there and token i + 1, and says what token i + 2 may be; for the
next draft it reads its own output in place of the trunk's. Promises: the same corpus, trunk, seed,
steps and torch build on the same device give the same folder; what is measured is what ships,
weights rounded to fp16. Training needs torch, numpy and safetensors, and the corpus file, no more.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parent))
import train as base  # the trunk's network and the schedule of the other models

UNROLL = 3
"""Drafts in a row that the loss covers; the module serves any number."""
SCHEDULE = ((0.7, 512), (1.0, 1020))
"""Up to which share of the steps a crop has how many starting positions."""
DISCOUNT = 0.8
"""Weight of a draft in the loss against the one before it: it counts only if that one is kept."""
MEASURED = 5
"""Drafts in a row that the held-out figures cover."""


@dataclass(frozen=True, slots=True)
class Trunk:
    """What the frozen byte-llama gives for a batch of crops."""

    hidden: Tensor
    """[batch, length, hidden]: after the final norm, as vLLM hands it to a drafter."""
    laws: Tensor
    """[batch, length, vocab]: its probabilities of each next token."""


def load_trunk(folder: Path) -> base.ByteLlama:
    """The trained byte-llama of a Hugging Face folder, frozen, float32."""
    model = base.ByteLlama(base.SHAPES["byte-llama"])
    state = {
        name.removeprefix("model.").replace(".self_attn.", "."): p.float()
        for name, p in load_file(folder / "model.safetensors").items()
    }
    model.load_state_dict(state)
    return model.requires_grad_(False).eval()


def read_trunk(trunk: base.ByteLlama, ids: Tensor) -> Trunk:
    """Run the trunk over ids [batch, length] without gradients."""
    with torch.no_grad():
        x = trunk.embed_tokens(ids)
        for layer in trunk.layers:
            x = layer(x, trunk.cos[: ids.shape[1]], trunk.sin[: ids.shape[1]])
        hidden = trunk.norm(x)
        logits = F.linear(hidden, trunk.embed_tokens.weight)
        return Trunk(hidden, logits.float().softmax(-1))


class Module(nn.Module):
    """The MTP module; embedding and head are the trunk's.

    The Qwen2 layer differs from the trunk's own in the biases of Q, K and V only.
    """

    def __init__(self, s: base.Shape) -> None:
        super().__init__()
        d, q, kv = s.hidden_size, s.num_attention_heads * 64, s.num_key_value_heads * 64
        self.shape = s
        self.token_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.hidden_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.input_proj = nn.Linear(2 * d, d, bias=False)
        self.input_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.q_proj, self.k_proj, self.v_proj = nn.Linear(d, q), nn.Linear(d, kv), nn.Linear(d, kv)
        self.o_proj = nn.Linear(q, d, bias=False)
        self.post_attention_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        self.mlp = base.DenseMLP(s)
        self.final_layernorm = nn.RMSNorm(d, s.rms_norm_eps)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                last = "o_proj" in name or "down_proj" in name
                nn.init.normal_(p, std=0.02 / (math.sqrt(2) if last else 1))
            elif name.endswith(".bias"):
                nn.init.zeros_(p)

    def forward(self, trunk: base.ByteLlama, ids: Tensor, hidden: Tensor, drafts: int) -> Tensor:
        """Logits [drafts, batch, starts, vocab], all starting positions at once.

        Start i drafts from hidden[:, i]. Its draft j sits at position i + j and reads token
        i + 1 + j of `ids`, as if the drafts before it had been right. It sees what the first pass
        left at positions up to i, and what this start's own drafts left after it.

        Args:
            ids: [batch, length] with length = starts + drafts.
            hidden: [batch, starts, hidden], the trunk's.
        """
        s, starts = self.shape, hidden.shape[1]
        groups = s.num_attention_heads // s.num_key_value_heads
        embeds = trunk.embed_tokens(ids)
        causal = torch.ones(starts, starts, dtype=torch.bool, device=ids.device).tril()
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for j in range(drafts):
            embed = embeds[:, 1 + j : 1 + j + starts]
            if j == 0:  # MiMo reads no token at position 0
                embed = torch.cat((torch.zeros_like(embed[:, :1]), embed[:, 1:]), dim=1)
            pair = (self.hidden_layernorm(hidden), self.token_layernorm(embed))
            x = self.input_proj(torch.cat(pair, dim=-1)).float()  # bf16 products, fp32 sums
            h = self.input_layernorm(x)
            cos, sin = trunk.cos[j : j + starts], trunk.sin[j : j + starts]
            q, k, v = (
                p(h).unflatten(-1, (-1, s.head_dim)).transpose(1, 2)
                for p in (self.q_proj, self.k_proj, self.v_proj)
            )  # [batch, heads, starts, head_dim]
            q = base.rotate(q, cos, sin) * s.head_dim**-0.5
            keys.append(base.rotate(k, cos, sin).repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            scores = (q @ keys[0].transpose(-1, -2)).float().masked_fill(~causal, -torch.inf)
            own = [(q * k).sum(-1, keepdim=True).float() for k in keys[1:]]
            probs = torch.cat((scores, *own), dim=-1).softmax(-1).to(q.dtype)
            out = probs[..., :starts] @ values[0]
            for m, v in enumerate(values[1:]):
                out = out + probs[..., starts + m : starts + m + 1] * v
            x = x + self.o_proj(out.transpose(1, 2).flatten(2))
            x = x + self.mlp(self.post_attention_layernorm(x))
            hidden = self.final_layernorm(x)
            logits.append(F.linear(hidden, trunk.embed_tokens.weight))
        return torch.stack(logits)


class Trainer:
    """The optimizers and one step of them."""

    def __init__(
        self, trunk: base.ByteLlama, stream: Tensor, seed: int, tokens_per_step: int
    ) -> None:
        torch.manual_seed(seed)
        self.module = Module(trunk.shape).to(stream.device)
        self.trunk, self.stream, self.tokens_per_step = trunk, stream, tokens_per_step
        self.generator = torch.Generator().manual_seed(seed)
        named = list(self.module.named_parameters())
        self.rest = [p for _, p in named if p.ndim != 2]
        self.optimizers = [
            torch.optim.Muon(
                [p for _, p in named if p.ndim == 2], lr=0.02, momentum=0.95, weight_decay=0.01
            ),
            torch.optim.AdamW(self.rest, lr=0.003, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.groups = [g for o in self.optimizers for g in o.param_groups]
        self.base = [g["lr"] for g in self.groups]

    def step(self, step: int, steps: int) -> Tensor:
        """One update; the loss of each draft [UNROLL], in nats."""
        length = next(length for share, length in SCHEDULE if step < share * steps)
        count, width = max(1, self.tokens_per_step // length), length + UNROLL
        starts = torch.randint(len(self.stream) - width, (count, 1), generator=self.generator).to(
            self.stream.device
        )
        ids = self.stream[starts + torch.arange(width, device=starts.device)].long()
        with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
            target = read_trunk(self.trunk, ids)
            logits = self.module(self.trunk, ids, target.hidden[:, :length], UNROLL)
        losses = torch.stack([
            F.cross_entropy(
                of.float().flatten(0, 1),
                target.laws[:, 1 + j : 1 + j + length].flatten(0, 1),
            )
            for j, of in enumerate(logits)
        ])  # fmt: skip
        sum(DISCOUNT**j * loss for j, loss in enumerate(losses)).backward()
        nn.utils.clip_grad_norm_(self.rest, 1.0)
        for group, rate in zip(self.groups, self.base, strict=True):
            group["lr"] = rate * base.learning_rate(step, steps)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        return losses.detach()


def steps_for(seconds: float, build, sync) -> int:
    """How many steps take about `seconds` here, by ten of each crop length on a fresh module."""
    total, before = 0.0, 0.0
    trainer = build()
    for share, _ in SCHEDULE:
        for repeat in range(15):
            if repeat == 5:  # the first ones choose kernels and take memory
                sync()
                began = time.perf_counter()
            trainer.step(int(before * 1000), 1000)
        sync()
        total += (share - before) * (time.perf_counter() - began) / 10
        before = share
    print(f"{1000 * total:.1f} ms per step", flush=True)
    return max(100, int(seconds / total) // 100 * 100)


def train(trainer: Trainer, steps: int) -> list[str]:
    """Run the schedule; returns the log lines."""
    log, running, began = [], None, time.time()
    for step in range(steps):
        losses = trainer.step(step, steps)
        running = losses if running is None else 0.98 * running + 0.02 * losses
        if (step + 1) % 250 == 0 or step + 1 == steps:
            bits = " ".join(f"{x / math.log(2):.3f}" for x in running.tolist())
            line = f"step {step + 1:5d}  bits per draft {bits}  {time.time() - began:6.0f} s"
            print(line, flush=True)
            log.append(line)
    return log


def measure(
    module: Module, trunk: base.ByteLlama, held: Tensor, drafts: int, length: int = 1000
) -> dict[str, list[float]]:
    """Per draft position over held-out windows, fp32, the second half of each window as starts:
    how often the module's best token is the trunk's, and the overlap of their two laws, which is
    how often a sampled draft is kept at temperature 1. Earlier drafts are the text's own tokens.
    """
    agree, overlap, count = torch.zeros(drafts), torch.zeros(drafts), 0
    width = length + drafts
    windows = held[: len(held) // width * width].view(-1, width).long()
    with torch.no_grad():
        for ids in windows.split(16):
            target = read_trunk(trunk, ids)
            logits = module(trunk, ids, target.hidden[:, :length], drafts)
            for j, of in enumerate(logits):
                p = target.laws[:, 1 + j : 1 + j + length][:, length // 2 :]
                q = of[:, length // 2 :].float().softmax(-1)
                agree[j] += (p.argmax(-1) == q.argmax(-1)).sum().cpu()
                overlap[j] += torch.minimum(p, q).sum().cpu()
            count += len(ids) * (length - length // 2)
    rounded = [[round(float(x) / count, 4) for x in of] for of in (agree, overlap)]
    return {"best_token_agrees": rounded[0], "laws_overlap": rounded[1]}


# --------------------------------------------------------------------------- export


def hugging_face_names(module: Module, trunk: base.ByteLlama) -> dict[str, Tensor]:
    """Name in a MiMo checkpoint -> tensor, fp16.

    The trunk's embedding goes along twice:
    `vllm/model_executor/models/mimo_mtp.py:192` `MiMoMTP.load_weights` wants `embed_tokens` and an
    untied `lm_head`, before the proposer puts the target's in their place.
    """
    weights = {"lm_head.weight": trunk.embed_tokens.weight}
    weights["model.embed_tokens.weight"] = trunk.embed_tokens.weight
    for name, p in module.state_dict().items():
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            name = name.replace(part, f"self_attn.{part}")
        weights[f"model.mtp_layers.0.{name}"] = p
    return {n: p.detach().to("cpu", torch.float16).clone() for n, p in weights.items()}


def config_json(s: base.Shape) -> dict:
    """The `config.json`: MiMo's architecture with Qwen2's fields, the trunk's sizes.

    `model_type` is "qwen2", which transformers knows; vLLM tells MiMo by `architectures`.
    """
    return {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "qwen2",
        "num_nextn_predict_layers": 1,
        "vocab_size": s.vocab_size,
        "hidden_size": s.hidden_size,
        "intermediate_size": s.intermediate_size,
        "num_hidden_layers": s.num_hidden_layers,
        "num_attention_heads": s.num_attention_heads,
        "num_key_value_heads": s.num_key_value_heads,
        "head_dim": s.head_dim,
        "max_position_embeddings": s.max_position_embeddings,
        "rms_norm_eps": s.rms_norm_eps,
        "rope_theta": s.rope_theta,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": base.EOS,
        "pad_token_id": None,
        "dtype": "float16",
        "torch_dtype": "float16",
        "use_cache": True,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--corpus", type=Path, default=Path("models/scratch/corpus.npz"))
    parser.add_argument("--trunk", type=Path, default=Path("models/byte-llama"))
    parser.add_argument("--out", type=Path, default=Path("models/byte-mtp"))
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--seconds", type=float, help="instead: as many steps as take so long here")
    parser.add_argument("--tokens-per-step", type=int, default=32768)
    parser.add_argument("--held-out", type=int, help="tokens of it to measure; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    args = parser.parse_args()
    if not args.corpus.exists():
        parser.error(f"--corpus {args.corpus}: no such file; `train_hybrid.py corpus` makes it")
    data = np.load(args.corpus)
    facts = json.loads(str(data["facts"]))
    stream, held = (torch.from_numpy(data[n]).to(args.device) for n in ("train", "held"))
    held = held[: args.held_out] if args.held_out else held
    torch.set_float32_matmul_precision("high")
    trunk = load_trunk(args.trunk).to(args.device)

    def build() -> Trainer:
        return Trainer(trunk, stream, args.seed, args.tokens_per_step)

    if args.seconds:
        sync = torch.cuda.synchronize if args.device == "cuda" else (lambda: None)
        args.steps = steps_for(args.seconds, build, sync)
    trainer = build()
    parameters = sum(p.numel() for p in trainer.module.parameters())
    hardware = torch.cuda.get_device_name() if args.device == "cuda" else processor()
    print(f"byte-mtp: {parameters:,} parameters, {args.steps} steps on {hardware}", flush=True)
    began = time.time()
    log = train(trainer, args.steps)
    seconds = time.time() - began
    torch.set_float32_matmul_precision("highest")
    rounded = Module(trunk.shape).to(args.device)  # what ships is fp16, so that is measured
    rounded.load_state_dict({k: v.half().float() for k, v in trainer.module.state_dict().items()})
    figures = {
        "model": "byte-mtp", "trunk": args.trunk.name, "parameters": parameters,
        "steps": args.steps, "tokens_per_step": args.tokens_per_step, "unroll": UNROLL,
        "seed": args.seed, "seconds": round(seconds, 1), "hardware": hardware,
        "trained_with": {"python": platform.python_version(), "torch": torch.__version__},
        "held_out_tokens": len(held),
        "held_out": measure(rounded, trunk, held, MEASURED),
        "corpus": facts, "log": log,
    }  # fmt: skip
    args.out.mkdir(parents=True, exist_ok=True)
    weights = hugging_face_names(trainer.module, trunk)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    figures["weights_bytes"] = (args.out / "model.safetensors").stat().st_size
    for name, value in (("config.json", config_json(trunk.shape)), ("figures.json", figures)):
        (args.out / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({k: v for k, v in figures.items() if k != "log"}, indent=2))


def processor() -> str:
    """The CPU by name, where the system says it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


if __name__ == "__main__":
    main()
