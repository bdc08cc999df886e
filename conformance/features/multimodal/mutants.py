"""Wrong treatments of pictures, each one edit away from the right one, that the recordings catch.

As `features/core/mutants.py`, for the gate, the counts of the cache and the keys of blocks.
"""

from __future__ import annotations

from conformance.features.multimodal.situations import COUNTED
from conformance.mutants import Catalogue, Mutant

_GATE, _CACHE, _INPUTS = (
    "multimodal.gate", "multimodal.encoder_cache_manager", "multimodal.inputs",
)  # fmt: skip
_CUT = "                num_new_tokens = max(0, position.offset - num_computed_tokens)\n"
_TWICE = "            if mm_hash in hashes:\n"
_KNOWN = "            if self.cache.check_and_update_cache(request, input_id):\n"
_EVICT = "self.freeable.popitem(last=False)"
_RELEASE = "if features[input_id].mm_position.end <= request.num_computed_tokens:"
_REFUSED = "        if mm_features(request):\n            self.cache.free(request)\n"
_KEY = "(feature.identifier, feature.mm_position.offset - start)"
_BASE = "ec_transfer.base"
_BUDGET = "                request, input_id, budget, num_embeds_to_schedule\n"
_LOADED = "                external.append(input_id)\n                continue\n"
_ROOM = "(*granted.encoder_inputs, *granted.external_load_encoder_input)"
_HAS = "if self.ec_connector is not None and self.ec_connector.has_cache_item(mm_hash):"
_NOTED = "self._mm_datas_need_loads, {}"


def _mutant(
    module: str, name: str, old: str, new: str, situation: str, profile: str = "encoder"
) -> Mutant:
    return Mutant(name, ((module, old, new),), profile, situation)


MUTANTS = (
    _mutant(
        _GATE, "encodes a picture that begins where the chunk ends",
        "if position.offset >= end:", "if position.offset > end:", "an encoder runs",
    ),
    _mutant(
        _GATE, "encodes a picture whose K and V are there",
        "if position.end <= num_computed_tokens:", "if position.end < num_computed_tokens:",
        "an encoder runs",
    ),
    _mutant(
        _GATE, "lets a chunk run into a picture that is not encoded", _CUT, "",
        "an encoder runs",
    ),
    _mutant(
        _GATE, "cuts a chunk at the picture's place in the prompt, not in the chunk", _CUT,
        _CUT.replace(" - num_computed_tokens", ""), "an encoder runs",
    ),
    _mutant(
        _GATE, "gives a token to a request that stands inside a picture without rows", _CUT,
        _CUT.replace("max(0,", "max(1,"), "an encoder runs",
    ),
    _mutant(
        _GATE, "cuts pictures that are to stay whole",
        "(self.disable_chunked_mm_input and is_cut)", "False", "an encoder runs",
    ),
    _mutant(
        _GATE, "keeps every picture whole",
        "(self.disable_chunked_mm_input and is_cut)", "is_cut", "an encoder runs",
    ),
    _mutant(
        _GATE, "keeps a picture whole that is half computed",
        "is_cut = num_computed_tokens < position.offset and end < position.end",
        "is_cut = end < position.end", "an encoder runs",
    ),
    _mutant(
        _GATE, "starts no step with a whole budget",
        "        self._budget = self.max_num_encoder_input_tokens\n",
        "        self._budget = self._budget or self.max_num_encoder_input_tokens\n",
        "an encoder runs",
    ),
    _mutant(
        _GATE, "gives every request a budget of its own",
        "        self._budget = granted.encoder_compute_budget\n", "", "an encoder runs",
    ),
    _mutant(
        _GATE, "charges the tokens of a picture, not its rows",
        "            budget -= num_embeds\n", "            budget -= position.length\n",
        "a picture with a mask",
    ),
    _mutant(
        _GATE, "gives each picture of a request the room of all",
        "            num_embeds_to_schedule += num_embeds\n", "", "an encoder runs",
    ),
    _mutant(
        _GATE, "runs the encoder for a chunk that covers no row",
        "            if rows[0] == rows[1]:\n", "            if False:\n", "a chunk covers no row",
    ),
    _mutant(
        _GATE, "encodes both places of a picture", _TWICE,
        "            if False:\n", "encoded once for both places",
    ),
    _mutant(
        _GATE, "encodes every picture again", _KNOWN, "            if False:\n",
        "an encoder runs",
    ),
    _mutant(
        _GATE, "keeps the references of a request that found no blocks", _REFUSED,
        "        if mm_features(request):\n            pass\n", "an encoder runs",
    ),
    _mutant(
        _GATE, "keeps the plan of a victim that had been planned",
        "self.scheduled_encoder_inputs.pop(request.request_id, ())",
        "self.scheduled_encoder_inputs.get(request.request_id, ())",
        "a preemption under priority", "encoder_dense",
    ),
    _mutant(
        _GATE, "forgets a withdrawn victim's pictures as if they had never been planned",
        "                self._budget += features[input_id].mm_position.get_num_embeds()\n",
        "                size = features[input_id].mm_position.get_num_embeds()\n"
        "                self._budget += size\n"
        "                self.cache.free_encoder_input(request, input_id)\n"
        "                if self.cache.freeable.pop(features[input_id].identifier, None):\n"
        "                    del self.cache.cached[features[input_id].identifier]\n"
        "                    self.cache.num_free_slots += size\n",
        "a preemption under priority", "encoder_dense",
    ),
    _mutant(
        _GATE, "releases a picture only when its request ends", _RELEASE, "if False:",
        "an encoder runs",
    ),
    _mutant(
        _GATE, "releases a picture that is half computed", _RELEASE,
        _RELEASE.replace("mm_position.end", "mm_position.offset"), "an encoder runs",
    ),
    _mutant(
        _GATE, "releases who ended before those in front of it",
        "            self._ended[request.request_id] = request  # its turn comes in `computed`\n",
        "            self.cache.free(request)\n", "an eviction", "encoder_dense",
    ),
    _mutant(
        _CACHE, "evicts the picture released last", _EVICT, _EVICT.replace("False", "True"),
        "an eviction",
    ),
    _mutant(
        _CACHE, "evicts one picture at most", "        while num_embeds > self.num_free_slots:\n",
        "        if num_embeds > self.num_free_slots:\n", "several evictions",
    ),
    _mutant(
        _CACHE, "evicts all that is unreferenced",
        "        while num_embeds > self.num_free_slots:\n", "        while self.freeable:\n",
        "an eviction",
    ),
    _mutant(
        _CACHE, "frees a picture as soon as nobody references it",
        "            self.freeable[feature.identifier] = size\n"
        "            self.num_freeable_slots += size\n",
        "            del self.cached[feature.identifier]\n"
        "            self.num_free_slots += size\n"
        "            self.num_freeable_slots += size\n",
        "an encoder runs",
    ),
    _mutant(
        _CACHE, "counts a picture that is found again as freeable",
        "            self.num_freeable_slots -= self.freeable.pop(mm_hash)\n",
        "            self.freeable.pop(mm_hash)\n", "an encoder runs",
    ),
    _mutant(
        _CACHE, "leaves a picture that is found again among those to evict",
        "            self.num_freeable_slots -= self.freeable.pop(mm_hash)\n",
        "            self.num_freeable_slots -= self.freeable[mm_hash]\n", "rows from the cache",
    ),
    _mutant(
        _CACHE, "lets the second who finds a picture take no reference",
        "        self.cached[mm_hash].add(request.request_id)\n        return True\n",
        "        if not self.cached[mm_hash]:\n"
        "            self.cached[mm_hash].add(request.request_id)\n        return True\n",
        "rows from the cache",
    ),
    _mutant(
        _CACHE, "stops below the budget",
        "        if num_embeds > encoder_compute_budget:\n",
        "        if num_embeds >= encoder_compute_budget:\n", "an encoder runs",
    ),
    _mutant(
        _CACHE, "counts references per place (as 0.33.0 does, or nearly)",
        "        holders.discard(request.request_id)\n",
        "        places = [f for f in mm_features(request) if f.identifier == feature.identifier]\n"
        "        last = max(place.mm_position.end for place in places)\n"
        "        if not request.is_finished and 0 < request.num_computed_tokens < last:\n"
        "            return\n"
        "        holders.discard(request.request_id)\n",
        "an encoder runs",
    ),
    _mutant(
        _CACHE, "keeps room for tokens that take no row",
        "        num_embeds = feature.mm_position.get_num_embeds()\n        assert",
        "        num_embeds = feature.mm_position.length\n        assert", "a picture with a mask",
    ),
    _mutant(_INPUTS, "shares blocks among all pictures", _KEY, "()", "an encoder runs"),
    _mutant(
        _INPUTS, "leaves the place out of a block's key", _KEY, "(feature.identifier, 0)",
        "an encoder runs", "encoder_dense",
    ),
    _mutant(
        _INPUTS, "names only the first picture of a block",
        "            if feature.mm_position.offset < stop and feature.mm_position.end > start\n"
        "        )\n",
        "            if feature.mm_position.offset < stop and feature.mm_position.end > start\n"
        "        )[:1]\n",
        "an encoder runs",
    ),
    _mutant(
        _INPUTS, "counts a mask's tokens as rows",
        "        return self.length if self.embeds_cumsum is None else self.embeds_cumsum[-1]\n",
        "        return self.length\n", "a picture with a mask",
    ),
    _mutant(
        _GATE, "releases nothing for the last request of a plan",
        "        for request in plan.scheduled_requests:\n            if not mm_features",
        "        for request in [*plan.scheduled_requests][:-1]:\n            if not mm_features",
        "an encoder runs", "encoder_async",
    ),
    _mutant(
        _GATE, "asks no connector", _HAS, "if False:",
        "rows are outside", "encoder_ec",
    ),
    _mutant(
        _GATE, "needs no budget for a picture that is loaded", _BUDGET,
        _BUDGET.replace(
            "budget,",
            "10**9 if self.ec_connector and self.ec_connector.has_cache_item(mm_hash) else budget,",
        ),
        "rows are outside", "encoder_ec",
    ),
    _mutant(
        _GATE, "charges the encoder's budget for a picture that is loaded", _LOADED,
        "                budget -= num_embeds\n" + _LOADED, "rows are outside", "encoder_ec",
    ),
    _mutant(
        _GATE, "takes no room for a picture that is loaded", _ROOM, "granted.encoder_inputs",
        "rows are outside", "encoder_ec",
    ),
    _mutant(
        _GATE, "gives a picture that is loaded the room of those before it", _LOADED,
        "                num_embeds_to_schedule -= num_embeds\n" + _LOADED, "rows are outside",
        "encoder_ec",
    ),
    _mutant(
        _GATE, "loads both places of a picture", _LOADED,
        "                hashes.discard(mm_hash)\n" + _LOADED, "rows are outside", "encoder_ec",
    ),
    _mutant(
        _GATE, "takes no room where a request has nothing to encode",
        "        if granted and (granted.encoder_inputs or granted.external_load_encoder_input):\n",
        "        if granted and granted.encoder_inputs:\n", "rows are outside", "encoder_ec",
    ),
    _mutant(
        _BASE, "loads again what an earlier step loaded", _NOTED,
        "self._mm_datas_need_loads, self._mm_datas_need_loads", "rows are outside", "encoder_ec",
    ),
    _mutant(
        _BASE, "loads in a producer", "if self.is_consumer and self.has_cache_item",
        "if self.has_cache_item", "a producer leaves out what is outside", "encoder_ec",
    ),
    _mutant(
        _BASE, "loads as many rows as a picture has tokens",
        "size = feature.mm_position.get_num_embeds()", "size = feature.mm_position.length",
        "rows are outside", "encoder_ec",
    ),
)  # fmt: skip

CATALOGUES = {"multimodal-mutants": Catalogue(MUTANTS, COUNTED.situations_of)}
