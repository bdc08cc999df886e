"""Pixels as Pillow and the checkpoint's processor make them, and what is refused."""

from __future__ import annotations

import json

import numpy as np
import pytest

from mini_vllm import LLM, LLMEngine, SamplingParams
from mini_vllm.multimodal import processor as processing
from mini_vllm.multimodal.hasher import hash_picture
from mini_vllm.multimodal.inputs import BlockKeys, MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.multimodal.llava import merge_multimodal_embeddings
from mini_vllm.multimodal.processor import ImageProcessor, expand, pixels_of
from mini_vllm.multimodal.resize import resize
from mini_vllm.tests.multimodal_support import PREPROCESSOR, SIDE, picture, prompt, write_llava

PARAMS = SamplingParams(max_tokens=2, ignore_eos=True)
SIZES = [(14, 14), (1, 1), (13, 15), (3, 40), (40, 3), (100, 61), (28, 300), (15, 14)]

# ------------------------------------------------------------------ pixels


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_resizing_gives_the_bytes_of_pillow_along_rows_and_then_along_columns(
    height, width, resample
):
    Image = pytest.importorskip("PIL.Image")
    pixels = picture(height * 1000 + width, height, width)
    for new_height, new_width in ((14, 14), (14, 29), (7, 90), (height, 5), (31, width)):
        wide = Image.fromarray(pixels).resize((new_width, height), resample)
        theirs = np.asarray(wide.resize((new_width, new_height), resample))
        ours = resize(pixels, new_height, new_width, resample)
        assert np.array_equal(ours, theirs)


@pytest.mark.parametrize(("height", "width"), SIZES)
def test_where_pillow_takes_the_other_pass_first_three_levels_differ_at_most(height, width, folder):
    """Pillow 13 chooses the order by the sizes. Noise is the worst case."""
    Image = pytest.importorskip("PIL.Image")
    pixels = picture(height * 1000 + width, height, width)
    sizes = ImageProcessor(folder / "preprocessor_config.json", SIDE).resized_to(height, width)
    theirs = np.asarray(Image.fromarray(pixels).resize(sizes[::-1], 3)).astype(int)
    assert np.abs(resize(pixels, *sizes) - theirs).max() <= 3


def test_a_part_of_a_resized_picture_is_that_part_of_all_of_it():
    pixels = picture(1, 50, 90)
    whole = resize(pixels, 20, 36)
    assert np.array_equal(resize(pixels, 20, 36, box=(3, 8, 14, 14)), whole[3:17, 8:22])


@pytest.mark.torch
@pytest.mark.parametrize(("height", "width"), SIZES)
def test_pixels_are_those_of_the_processor_in_transformers(height, width, folder):
    transformers = pytest.importorskip("transformers")
    Image = pytest.importorskip("PIL.Image")
    theirs = transformers.AutoImageProcessor.from_pretrained(folder)
    pixels = picture(height + width, height, width)
    want = theirs(Image.fromarray(pixels), return_tensors="np")["pixel_values"][0]
    got = ImageProcessor(folder / "preprocessor_config.json", SIDE)(pixels)
    assert got.shape == want.shape == (3, SIDE, SIDE)
    levels = np.abs(got - want).max() * 255 * max(PREPROCESSOR["image_std"])
    assert levels <= (0.01 if (height, width) == (SIDE, SIDE) else 3.01)


def test_a_picture_of_pillow_and_its_pixels_are_one_picture():
    Image = pytest.importorskip("PIL.Image")
    pixels = picture(7)
    image = Image.fromarray(pixels)
    assert hash_picture(pixels_of(image)) == hash_picture(pixels_of(pixels))
    with_alpha = image.convert("RGBA")
    assert np.array_equal(pixels_of(with_alpha), pixels)
    assert pixels_of(image.convert("L")).shape == pixels.shape


def test_a_caller_who_changes_its_array_changes_no_request(folder):
    engine = LLMEngine(folder)
    pixels = picture(7)
    _, [request] = engine.inputs.process(prompt(pixels))
    before = request.block_keys.mm_features[0].data.copy()
    pixels[:] = 0
    assert np.array_equal(request.block_keys.mm_features[0].data, before)


# ------------------------------------------------------------------ places


def test_each_marker_becomes_the_placeholders_of_its_picture():
    ids, places = expand([1, 9, 2, 9], 9, 3, 2)
    assert ids == [1, 9, 9, 9, 2, 9, 9, 9]
    assert [(p.offset, p.length) for p in places] == [(1, 3), (5, 3)]


def test_a_mask_says_which_tokens_take_a_row():
    place = PlaceholderRange(10, 8, (True,) * 3 + (False,) + (True,) * 3 + (False,))
    assert (place.get_num_embeds(), place.embeds_cumsum) == (6, (1, 2, 3, 3, 4, 5, 6, 6))
    assert place.get_embeds_indices_in_range(2, 6) == (2, 5)
    assert PlaceholderRange(2, 5).get_embeds_indices_in_range(3, 5) == (3, 5)


@pytest.mark.parametrize(
    ("starts", "stop", "expected"),
    [
        ([("aaa", 11, 10)], 16, (("aaa", 11),)),
        ([("aaa", 11, 10), ("bbb", 30, 18)], 32, (("aaa", -5), ("bbb", 14))),
        ([("aaa", 11, 10), ("bbb", 30, 18)], 48, (("bbb", -2),)),
        ([("aaa", 11, 10)], 48, ()),
    ],
)
def test_a_blocks_key_names_its_pictures_and_where_they_begin(starts, stop, expected):
    """The values of upstream's own test: `tests/v1/core/test_prefix_caching.py:1528`
    `test_mm_prefix_caching`."""
    features = [MultiModalFeatureSpec(n, PlaceholderRange(at, size)) for n, at, size in starts]
    assert BlockKeys(tuple(features))(stop - 16, stop) == expected


def test_rows_and_placeholders_are_counted_in_both_directions():
    embeds, mask = np.zeros((4, 2)), np.array([False, True, True, False])
    for count in (1, 3):  # one row would be spread over both places
        with pytest.raises(ValueError, match=f"{count} multimodal embeddings for 2 placeholders"):
            merge_multimodal_embeddings(embeds, np.ones((count, 2)), mask)
    assert not embeds.any()
    assert merge_multimodal_embeddings(embeds, np.ones((2, 2)), mask).sum() == 4


def test_an_encoder_that_gives_another_number_of_rows_fails_by_name(folder):
    engine = LLMEngine(folder)
    encoder = engine.feature("multimodal").runner.encoder
    encode = encoder.encode
    encoder.encode = lambda pixels: encode(pixels)[:1]
    engine.add_request(prompt("see", picture(1)), PARAMS)
    with pytest.raises(RuntimeError, match="VisionEncoder gave 1 rows for 4 placeholders"):
        engine.step()


# ------------------------------------------------------------------ refused at the door

REFUSED = [
    ("see", {"image": picture(1)}, r"1 image\(s\): the prompt has 0 placeholder"),
    ("<image><image>", {"image": picture(1)}, r"1 image\(s\): the prompt has 2 placeholder"),
    ("<image>", None, r"0 image\(s\): the prompt has 1 placeholder"),
    ("<image>", {"image": []}, r"0 image\(s\): the prompt has 1"),
    ("<image>", {"video": picture(1)}, r"multi_modal_data=\['video'\]: need {'image'"),
    ("<image>", [picture(1)], "multi_modal_data="),
    ("<image>", {"image": b"PNG"}, "is a bytes: need a PIL image or uint8"),
    ("<image>", {"image": "http://there/x.png"}, "is a str: need a PIL image or uint8"),
    ("<image>", {"image": picture(1)[:, :, :2]}, r"is uint8 \[14, 14, 2\]: need uint8"),
    ("<image>", {"image": picture(1) / 255}, r"is float64 \[14, 14, 3\]: need uint8"),
    ("<image>", {"image": picture(1)[:0]}, "has 14 x 0 pixels: need at least one"),
    ("<image>" * 3, {"image": [picture(1)] * 3}, "has 3 images: limit_mm_per_prompt allows 2"),
]


@pytest.mark.parametrize(("text", "data", "words"), REFUSED, ids=[w for *_, w in REFUSED])
def test_what_could_not_be_served_is_refused_by_name(text, data, words, folder):
    engine = LLMEngine(folder, limit_mm_per_prompt={"image": 2})
    with pytest.raises(ValueError, match=words):
        engine.add_request({"prompt": text, "multi_modal_data": data}, PARAMS)
    assert not engine.requests


def test_a_picture_that_is_too_large_is_refused_before_a_copy_of_it_is_made(folder, monkeypatch):
    monkeypatch.setattr(processing, "MOST_PIXELS", 1000)
    claimed = np.broadcast_to(np.zeros(3, np.uint8), (1001, 1, 3))
    with pytest.raises(
        ValueError, match="has 1 x 1001 pixels: need at least one and at most 1,000"
    ):
        LLMEngine(folder).add_request(prompt(claimed), PARAMS)


def test_a_prompt_that_its_pictures_make_too_long_is_refused(folder):
    engine = LLMEngine(folder, max_model_len=12)
    engine.add_request(prompt("see", picture(1), picture(2)), PARAMS)
    with pytest.raises(ValueError, match="prompt has 12 tokens: need fewer than max_model_len=12"):
        engine.add_request(prompt("seen", picture(1), picture(2)), PARAMS)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"encoder_cache_size": 3}, "encoder_cache_size=3: need at least 4"),
        ({"max_num_encoder_input_tokens": 3}, "max_num_encoder_input_tokens=3: need at least 4"),
        ({"limit_mm_per_prompt": {"video": 1}}, "limit_mm_per_prompt={'video': 1}: need"),
        ({"limit_mm_per_prompt": {"image": -1}}, r"limit_mm_per_prompt\['image'\]=-1"),
        ({"disable_chunked_mm_input": 1}, "disable_chunked_mm_input=1: need True or False"),
        (
            {"disable_chunked_mm_input": True, "max_num_batched_tokens": 3},
            "max_num_batched_tokens=3: need at least 4",
        ),
        ({"enable_lora": True}, "enable_lora=True: need a model of text alone"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "speculative_config=.*: need a model of text alone",
        ),
        ({"tensor_parallel_size": 2}, "ranks cannot load a multimodal model"),
    ],
    ids=str,
)
def test_an_engine_that_could_not_serve_pictures_is_refused_by_name(given, words, folder):
    with pytest.raises(ValueError, match=words):
        LLMEngine(folder, **given)


def test_a_release_whose_pictures_were_not_compared_is_refused_by_name(folder):
    for release in ("0.23.0", "0.33.0"):
        with pytest.raises(ValueError, match=f"release='{release}' with a multimodal model"):
            LLM(folder, release=release)
    for release, kind in (("0.22.1", "EncoderCacheManager"), ("0.27.1", "ReferencesNoted")):
        gate = LLM(folder, release=release).llm_engine.feature("multimodal").gate
        assert type(gate.cache).__name__ == kind


def test_a_grammar_is_refused_with_pictures_and_taken_without(folder):
    from mini_vllm.structured_output.params import StructuredOutputsParams

    engine = LLMEngine(folder)
    params = SamplingParams(
        max_tokens=2, structured_outputs=StructuredOutputsParams(choice=("yes", "no"))
    )
    with pytest.raises(ValueError, match="structured_outputs: need None with multi_modal_data"):
        engine.add_request(prompt("see", picture(1)), params)
    engine.add_request("is it?", params)


def test_a_model_that_does_not_see_takes_no_pictures():
    with pytest.raises(ValueError, match=r"(?s)multi_modal_data=.*: need a multimodal model"):
        LLMEngine("toy").add_request(prompt("see", picture(1)), PARAMS)
    with pytest.raises(ValueError, match="encoder_cache_size=4: need a multimodal model"):
        LLMEngine("toy", encoder_cache_size=4)


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ({}, "prompt={}: need one of prompt"),
        ({"prompt": "a", "prompt_token_ids": [1]}, "need one of prompt and prompt_token_ids"),
        ({"prompt": "a", "multi_modal_uuids": {}}, "multi_modal_uuids={}: need a room"),
    ],
    ids=str,
)
def test_a_prompt_that_is_a_mapping_has_one_text(prompt, words):
    with pytest.raises(ValueError, match=words):
        LLMEngine("toy").add_request(prompt, PARAMS)


# ------------------------------------------------------------------ files


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"do_resize": False}, "do_resize=False: need true"),
        ({"resample": 1}, r"resample=1: need 2 \(bilinear\) or 3 \(bicubic\)"),
        ({"size": {"shortest_edge": 28}}, "size=.*: need 14 on every edge"),
        ({"crop_size": {"height": 14, "width": 28}}, "crop_size=.*: need 14 on every edge"),
        ({"image_std": [0.5, 0.0, 0.5]}, "image_std=0.0: need a number"),
        ({"image_mean": [0.5]}, "image_mean=.*: need three numbers"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "image_processor_type="),
    ],
    ids=str,
)
def test_a_processor_of_another_kind_is_refused_by_name(changes, words, tmp_path):
    path = tmp_path / "preprocessor_config.json"
    path.write_text(json.dumps(PREPROCESSOR | changes))
    with pytest.raises(ValueError, match=words):
        ImageProcessor(path, SIDE)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vision_feature_layer": [-2, -5]}, "vision_feature_layer=.*: need one layer of 2"),
        ({"vision_feature_select_strategy": "cls"}, "vision_feature_select_strategy="),
        ({"projector_hidden_act": "relu"}, "projector_hidden_act='relu': need gelu or quick_gelu"),
    ],
    ids=str,
)
def test_a_tower_of_another_kind_is_refused_by_name(changes, words, folder, tmp_path):
    raw = json.loads((folder / "config.json").read_text()) | changes
    other = write_llava(tmp_path / "model")
    (other / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ValueError, match=words):
        LLMEngine(other)


def test_a_tower_that_is_not_all_there_is_refused_by_name(tmp_path):
    from safetensors.numpy import load_file, save_file

    other = write_llava(tmp_path / "model")
    weights = load_file(other / "model.safetensors")
    del weights["multi_modal_projector.linear_2.bias"]
    save_file(weights, other / "model.safetensors")
    with pytest.raises(ValueError, match=r"lacks 1 tensor\(s\): multi_modal_projector.linear_2"):
        LLMEngine(other)
