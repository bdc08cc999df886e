"""0.33.0: a block's hash covers the token behind it, and a hit keeps its last block.

A head that reads the target's hidden states (EAGLE, MTP) writes K and V at a position from the
token behind it. So the last position of a block depends on a token that the block does not hold.
The pin leaves the last block of every hit out. 0.33.0 hashes that token with the block instead.
"""

from __future__ import annotations

from mini_vllm.block_pool import hash_block_tokens, root_hash
from mini_vllm.kv_cache import KVCacheManager
from mini_vllm.request import Request


class HashesLookAhead(KVCacheManager):
    """As `KVCacheManager`, where such a head drafts: hashes look ahead, hits are whole.

    A full block enters the index once the token behind it is known.
    `vllm/v1/core/kv_cache_utils.py`, lines 953-1033 of 0.33.0 `get_request_block_hasher`,
    `vllm/v1/core/single_type_kv_cache_manager.py`, lines 501-502 of 0.33.0
    `SingleTypeKVCacheManager.cache_blocks`, and `vllm/config/vllm.py`, lines 678-692 of 0.33.0
    `VllmConfig.num_hash_lookahead_tokens`, which keeps the pin's hashes beside a KV connector.
    """

    num_hash_lookahead_tokens = 0
    """Tokens behind a block that its hash covers: 1 where a head drafts."""

    @property
    def use_eagle(self) -> bool:
        """Whether the last block of a hit is left out: it never is."""
        return False

    @use_eagle.setter
    def use_eagle(self, drafts: bool) -> None:
        self.num_hash_lookahead_tokens = int(drafts)

    def cache_blocks(self, request: Request, num_tokens: int) -> None:
        """As the pin's, of the blocks whose hash is known."""
        num_hashed = request.num_tokens - self.num_hash_lookahead_tokens
        super().cache_blocks(request, min(num_tokens, num_hashed))

    def _extend_hashes(self, request: Request) -> None:
        ahead, size = self.num_hash_lookahead_tokens, self.block_size
        if not ahead:
            return super()._extend_hashes(request)
        hashes, token_ids = request.block_hashes, request.all_token_ids
        parent, keys = hashes[-1] if hashes else root_hash(request.extra_keys), request.block_keys
        for start in range(len(hashes) * size, request.num_tokens - ahead - size + 1, size):
            end = start + size
            own = keys(start, end + ahead) if keys is not None else ()
            behind = tuple(token_ids[end : end + ahead])
            parent = hash_block_tokens(parent, token_ids[start:end], (own, behind))
            hashes.append(parent)
