"""Speculative decoding: several cheap guesses, checked by one run of the target model.

    LLM(speculative_config={"method": "ngram", "num_speculative_tokens": 4})

`config` says what is accepted, `ngram`, `draft_model` and `mtp` guess, `rejection` checks,
`metrics` counts, `speculator` is what the engine holds. Mirrors `vllm/v1/spec_decode/`.
"""
