"""A small decoder in torch for Part B, with a KV cache that operations find by a layer's name.

`kv_write`, `attention` and `silu_mul` are wrapped: a tracer records calls of them and does not look
inside, as it does with the custom operations of vLLM. Stands for
`vllm/model_executor/layers/attention/attention.py:691` `unified_kv_cache_update` and
`vllm/model_executor/layers/attention/attention.py:734` `unified_attention_with_output`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

CACHE: dict[str, list[tuple[Tensor, Tensor]]] = {}
"""Layer name to the (k, v) written so far, each [tokens, width]."""


@torch.fx.wrap
def kv_write(k: Tensor, v: Tensor, layer: str) -> None:
    """Append to the layer's cache. Returns nothing, and nothing reads what it returns."""
    CACHE.setdefault(layer, []).append((k, v))


@torch.fx.wrap
def attention(q: Tensor, layer: str) -> Tensor:
    """Unmasked attention over the layer's cache: [tokens, width]."""
    k, v = (torch.cat(parts) for parts in zip(*CACHE[layer], strict=True))
    return torch.softmax(q @ k.T * q.shape[1] ** -0.5, dim=-1) @ v


@torch.fx.wrap
def silu_mul(x: Tensor, y: Tensor) -> Tensor:
    """silu(x) * y in one operation."""
    return x / (1 + torch.exp(-x)) * y


class Layer(nn.Module):
    """A decoder layer with a gated MLP."""

    def __init__(self, width: int, name: str, late: bool) -> None:
        super().__init__()
        self.name, self.late = name, late
        self.norm_a, self.norm_b = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.down = nn.Linear(width, 4 * width), nn.Linear(2 * width, width)

    def forward(self, h: Tensor) -> Tensor:
        parts = torch.chunk(self.qkv(self.norm_a(h)), 3, dim=-1)
        if self.late:  # q is taken out of the tuple between the two splitting operations
            kv_write(parts[1], parts[2], self.name)
            q = parts[0]
        else:
            q, k, v = parts[0], parts[1], parts[2]
            kv_write(k, v, self.name)
        h = h + self.out(attention(q, self.name))
        gate, up = torch.chunk(self.wide(self.norm_b(h)), 2, dim=-1)
        return h + self.down(nn.functional.silu(gate) * up)


class Decoder(nn.Module):
    """Layers and a final norm; [tokens, width] to the same."""

    def __init__(self, num_layers: int, width: int = 8, late: bool = False) -> None:
        super().__init__()
        names = [f"layers.{i}" for i in range(num_layers)]
        self.layers = nn.ModuleList(Layer(width, name, late) for name in names)
        self.norm = nn.LayerNorm(width)

    def forward(self, h: Tensor) -> Tensor:
        for layer in self.layers:
            h = layer(h)
        return self.norm(h)


def run(model: nn.Module, h: Tensor) -> tuple[Tensor, dict[str, list[tuple[Tensor, Tensor]]]]:
    """A forward pass on an empty cache: its result, and the cache afterwards."""
    CACHE.clear()
    with torch.no_grad():
        out = model(h)
    return out, dict(CACHE)
