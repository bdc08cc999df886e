"""The pin's `ExampleConnector` for a processor, whose K and V lie by heads within a block.

On a processor a layer's cache is [2, blocks, heads, tokens of a block, head size]
(`vllm/v1/attention/backends/cpu_attn.py:89` `CPUAttentionBackend.get_kv_cache_shape`). The
connector takes the third axis for the tokens and so reads and writes other blocks than it means.
Here it is shown the axes in the order that it expects; it decides and names files as before. Needs
the real engine.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import ExampleConnector


class ExampleConnectorByTokens(ExampleConnector):
    """Its worker's half sees [2, blocks, tokens, heads, head size]."""

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Load into copies in the other order, and put them back."""
        layers = [
            layer for layer in forward_context.no_compile_layers.values()
            if getattr(layer, "kv_cache", None) is not None
        ]  # fmt: skip
        caches = [layer.kv_cache for layer in layers]
        try:
            for layer, cache in zip(layers, caches, strict=True):
                layer.kv_cache = cache.transpose(2, 3).contiguous()
            super().start_load_kv(forward_context, **more)
            for layer, cache in zip(layers, caches, strict=True):
                cache.copy_(layer.kv_cache.transpose(2, 3))
        finally:
            for layer, cache in zip(layers, caches, strict=True):
                layer.kv_cache = cache

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        """Save from a copy in the other order."""
        by_tokens = kv_layer.transpose(2, 3).contiguous()
        super().save_kv_layer(layer_name, by_tokens, attn_metadata, **more)
