"""Attention over the paged KV cache: the definition, and the same values fast."""

from mini_vllm.attention.paged import paged_attention
from mini_vllm.attention.reference import paged_attention_reference, write_kv

__all__ = ["paged_attention", "paged_attention_reference", "write_kv"]
