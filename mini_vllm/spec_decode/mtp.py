"""Drafts from a multi-token-prediction module that reads the target's own hidden states.

Promises: one ragged pass over the rows that the target has just computed and kept, then k - 1
passes of one token per request through the same module, its own output in the place of the target's
hidden state; its layer has K and V of its own under the target's block tables. Mirrors
`vllm/v1/spec_decode/llm_base_proposer.py:427` `SpecDecodeBaseProposer.propose` as
`vllm/v1/spec_decode/eagle.py:10` `EagleProposer` uses it, and the module of
`vllm/model_executor/models/mimo_mtp.py:44` `MiMoMultiTokenPredictorLayer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from mini_vllm.batch import ForwardBatch
from mini_vllm.model_runner import ModelRunner
from mini_vllm.models.config import Fields, layer_shapes, parse_config
from mini_vllm.models.files import read_json
from mini_vllm.models.loader import load_by_rules, resolve
from mini_vllm.models.transformer import ModelConfig, Transformer, embedded, rms_norm
from mini_vllm.plan import SchedulerOutput
from mini_vllm.request import Request
from mini_vllm.spec_decode.draft_model import choose_drafts, enter, pad_tables

TARGETS = ("LlamaForCausalLM", "Qwen2ForCausalLM")
"""Models whose `forward` hands over hidden states after the final norm, as the module was trained;
MiMo's own trunk does so before it: `vllm/model_executor/models/mimo.py:62` `MiMoModel.forward`."""
SHARED_SIZES = (
    "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "rms_norm_eps", "rope_theta", "rope_scaling",
)  # fmt: skip
"""The real module is built from the *target's* config, so these must agree."""
OUTER = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")


class HiddenStatesModel:
    """A transformer that also keeps the hidden states of all tokens of its last pass."""

    def __init__(self, model: Transformer) -> None:
        self.model = model
        self.hidden_states: np.ndarray | None = None
        """[num_tokens, hidden_size] after the final norm."""

    def forward(self, batch: ForwardBatch) -> np.ndarray:
        """Logits [num_rows, vocab_size], as the transformer's own `forward`."""
        self.hidden_states = self.model.hidden_states(batch)
        return self.model.lm_head(self.hidden_states[batch.logits_indices])

    def take_hidden_states(self) -> np.ndarray:
        """Those of the last pass, once.

        Raises:
            RuntimeError: there was none, so another model has run in this one's place.
        """
        if (hidden_states := self.hidden_states) is None:
            raise RuntimeError(
                "engine.model was replaced: method mtp reads the hidden states of the model that "
                "the engine was opened with"
            )
        self.hidden_states = None
        return hidden_states


class MtpModule(HiddenStatesModel):
    """Two norms, a projection, one Qwen2 layer, a norm; embedding and head are the target's."""

    def __init__(self, target: Transformer, weights: Mapping[str, np.ndarray]) -> None:
        """`weights`: those of `module_shapes`, by the names there."""
        config = module_config(target.config)
        own = {f"model.layers.0.{name}": array for name, array in weights.items()}
        own["model.embed_tokens.weight"] = target.embed_tokens
        own["model.norm.weight"] = weights["final_layernorm.weight"]
        super().__init__(Transformer(config, own, target.dtype, attention=target.attention))
        self.model.lm_head = target.lm_head
        self.token_layernorm, self.hidden_layernorm, self.input_proj = (
            np.asarray(weights[f"{name}.weight"], dtype=target.dtype) for name in OUTER[:3]
        )

    def inputs_embeds(
        self, token_ids: np.ndarray, positions: np.ndarray, hidden_states: np.ndarray
    ) -> np.ndarray:
        """What the layer gets: [num_tokens, hidden_size].

        Args:
            token_ids: [num_tokens] of each position the token behind it.
            positions: [num_tokens]; at position 0 no token is read.
            hidden_states: [num_tokens, hidden_size] of each position, the target's or its own.
        """
        eps = self.model.config.rms_norm_eps
        embeds = embedded(self.model.embed_tokens, token_ids)
        embeds[positions == 0] = 0
        pair = (
            rms_norm(hidden_states, self.hidden_layernorm, eps),
            rms_norm(embeds, self.token_layernorm, eps),
        )
        return np.concatenate(pair, axis=1) @ self.input_proj.T


def module_config(target: ModelConfig) -> ModelConfig:
    """The module's one layer: the target's sizes, with Qwen2's biases."""
    return replace(
        target, num_hidden_layers=1, qkv_bias=True, o_bias=False, mlp_bias=False,
        tie_word_embeddings=True,
    )  # fmt: skip


def module_shapes(target: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The module's tensors by their names in a MiMo checkpoint behind `model.mtp_layers.0.`"""
    hidden = target.hidden_size
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (hidden,) for name in OUTER}
    shapes["input_proj.weight"] = (hidden, 2 * hidden)
    return shapes | layer_shapes(module_config(target))


def load_module(model: str | Path, target: object) -> tuple[MtpModule, int]:
    """The module of a MiMo folder for a target, and the folder's `max_position_embeddings`.

    The folder may hold copies of embedding and head; the target's stand in their place, as in
    `vllm/v1/spec_decode/llm_base_proposer.py:1273`
    `SpecDecodeBaseProposer._maybe_share_embeddings`.

    Raises:
        ValueError: a target of another kind; no MiMo folder, or with another number of modules;
            sizes that are not the target's; a tensor missing or of another shape.
    """
    if type(target) is not Transformer or target.config.architecture not in TARGETS:
        kind = target.config.architecture if isinstance(target, Transformer) else type(target)
        raise ValueError(f"method='mtp' with {kind}: need a target of {', '.join(TARGETS)}")
    if target.config.quant_config is not None:
        raise ValueError("method='mtp' with a target in FP8: need one without quantization_config")
    folder = resolve(model)
    path = folder / "config.json"
    raw = read_json(path)
    fields = Fields(raw, path)
    if raw.get("architectures") != ["MiMoForCausalLM"]:
        fields.refuse("architectures", "['MiMoForCausalLM'] for method mtp")
    if raw.get("num_nextn_predict_layers") != 1:
        fields.refuse("num_nextn_predict_layers", "1, the one module that is used for every draft")
    config = parse_config(raw | {"architectures": ["Qwen2ForCausalLM"]}, path)
    for name in SHARED_SIZES:
        if getattr(config, name) != (need := getattr(target.config, name)):
            raise ValueError(f"{path}: {name}={getattr(config, name)}: need the target's {need}")
    prefix = "model.mtp_layers.0."
    shapes = module_shapes(target.config)
    loaded = load_by_rules(folder, {prefix + name: shape for name, shape in shapes.items()}, ())
    weights = {name: loaded[prefix + name] for name in shapes}
    return MtpModule(target, weights), config.max_position_embeddings


class MtpProposer:
    """The module with a cache of its own, fed with what the target has just computed."""

    def __init__(
        self, target: HiddenStatesModel, module: MtpModule, num_blocks: int, block_size: int,
        num_speculative_tokens: int, rng: np.random.Generator | None,
    ) -> None:  # fmt: skip
        """An idle drafter.

        Args:
            target: runs in the engine.
            module: drafts.
            num_blocks: as many as the target's cache has; its block tables serve both.
            block_size: tokens per block.
            num_speculative_tokens: k.
            rng: draws the drafts of requests with a temperature; None: every draft is the argmax.
        """
        self.target, self.module = target, module
        inner = module.model
        self.runner = ModelRunner(module, num_blocks, block_size, inner.kv_specs, inner.dtype)
        self.k, self.rng = num_speculative_tokens, rng
        self.laws: dict[str, np.ndarray] = {}
        """[k, vocab_size] per request: what its last drafts were drawn from."""
        self.num_passes = 0
        """Forward passes of the module so far."""

    def propose(
        self, plan: SchedulerOutput, contexts: Mapping[str, Sequence[int]]
    ) -> dict[str, list[int]]:
        """k drafts for each of `contexts`, in the step whose plan is given.

        Position i of a request is read as the target's hidden state there and token i + 1. A
        rejected draft's row is left out; the next step writes its slot before anything reads it.
        Where a prompt is cut, the token behind the chunk's last position is known, and yet the last
        known token of all is read there, as at the pin:
        `vllm/v1/spec_decode/llm_base_proposer.py:913`
        `SpecDecodeBaseProposer.prepare_next_token_ids_padded`.

        Args:
            plan: the bound plan that the target has just run.
            contexts: all tokens of each request that sampled, the new ones included.

        Returns:
            k token ids per request. Of the others only what was computed is read.
        """
        if not plan.scheduled_requests:
            return {}
        token_ids: list[int] = []
        rows: list[int] = []
        step, first_row = SchedulerOutput(), 0
        for request in plan.scheduled_requests:
            request_id = request.request_id
            start = plan.num_computed_tokens[request_id]
            planned = plan.num_scheduled_tokens[request_id]
            known = contexts.get(request_id, request.all_token_ids)
            count = min(planned, len(known) - 1 - start)
            if count > 0:
                enter(step, request, start, count)
                token_ids += known[start + 1 : start + 1 + count]
                rows += range(first_row, first_row + count)
                if request_id not in contexts and not request.is_finished:
                    token_ids[-1] = known[-1]
            first_row += planned
        hidden_states = self.target.take_hidden_states()[rows]
        if not step.scheduled_requests:
            return {}
        logits, hidden_states = self._run(step, token_ids, hidden_states, plan)
        drafting = [i for i, r in enumerate(step.scheduled_requests) if r.request_id in contexts]
        requests = [step.scheduled_requests[i] for i in drafting]
        lengths = [len(contexts[request.request_id]) for request in requests]
        return self._continue(requests, lengths, logits[drafting], hidden_states[drafting], plan)

    def remove_request(self, request_id: str) -> None:
        """The request is gone."""
        self.laws.pop(request_id, None)

    def _continue(
        self, requests: Sequence[Request], lengths: Sequence[int], logits: np.ndarray,
        hidden_states: np.ndarray, plan: SchedulerOutput,
    ) -> dict[str, list[int]]:  # fmt: skip
        """Draft from the first rows [num_requests, ...], then k - 1 times one token, each with the
        module's own hidden state, one position on."""
        drafts: dict[str, list[int]] = {request.request_id: [] for request in requests}
        laws: list[np.ndarray] = []
        chosen: list[int] = []
        for position in range(self.k if requests else 0):
            if position:
                step = SchedulerOutput()
                for request, length in zip(requests, lengths, strict=True):
                    enter(step, request, length - 2 + position, 1)
                logits, hidden_states = self._run(step, chosen, hidden_states, plan)
            chosen, law = choose_drafts(requests, logits, self.rng)
            laws += [law] if law is not None else []
            for request_id, token in zip(drafts, chosen, strict=True):
                drafts[request_id].append(token)
        if laws:
            stacked = np.stack(laws, axis=1)  # [num_requests, k, vocab_size]
            self.laws |= dict(zip(drafts, stacked, strict=True))
        return drafts

    def _run(
        self, step: SchedulerOutput, token_ids: Sequence[int], hidden_states: np.ndarray,
        plan: SchedulerOutput,
    ) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
        """One pass: logits and hidden states of each request's last row."""
        pad_tables(step, plan, self.runner.block_size)
        batch = self.runner.prepare_batch(step)
        batch.token_ids = np.array(token_ids, dtype=np.int64)
        batch.inputs_embeds = self.module.inputs_embeds(
            batch.token_ids, batch.positions, hidden_states
        )
        self.num_passes += 1
        logits = self.module.forward(batch)
        return logits, self.module.take_hidden_states()[batch.logits_indices]
