"""From a picture to what the encoder takes, and from a marker in the prompt to its placeholders.

Promises: the pixels of the checkpoint's own processor in `transformers`; every marker has a picture
and every picture a marker, or the prompt is refused. Mirrors
`vllm/multimodal/processing/processor.py:1663` `BaseMultiModalProcessor.apply`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mini_vllm.models.config import Fields
from mini_vllm.models.files import read_json
from mini_vllm.multimodal.hasher import hash_picture
from mini_vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from mini_vllm.multimodal.resize import FILTERS, resize

MOST_PIXELS = 1 << 24
"""Of a picture as it comes, 4,096 x 4,096. A larger one is refused before anything is made of it.
"""
_PROCESSORS = ("CLIPImageProcessor", "CLIPImageProcessorFast", "CLIPImageProcessorPil")


class ImageProcessor:
    """What `preprocessor_config.json` says is done to a picture."""

    def __init__(self, path: Path, side: int) -> None:
        """Read it.

        Args:
            path: of the file.
            side: pixels of a side of the square that the encoder takes.

        Raises:
            ValueError: another kind of processor, a step that is left out, or another result than a
                square of this side; the file and the field are named.
        """
        raw = read_json(path)
        fields = Fields(raw, path).part("image_processor") or Fields(raw, path)  # of either age
        raw = dict(fields.raw)
        kind = raw.get("image_processor_type", _PROCESSORS[0])
        if kind not in _PROCESSORS:
            fields.refuse("image_processor_type", f"one of {', '.join(_PROCESSORS)}")
        for name in ("do_resize", "do_center_crop", "do_rescale", "do_normalize"):
            if raw.get(name, True) is not True:
                fields.refuse(name, "true")
        self.side = side
        self.resample = raw.get("resample", 3)
        if self.resample not in FILTERS or isinstance(self.resample, bool):
            filters = " or ".join(f"{n} ({name})" for n, (name, *_) in FILTERS.items())
            fields.refuse("resample", filters)
        self.keeps_aspect = "shortest_edge" in self._sides(fields, "size")
        self._sides(fields, "crop_size")
        self.scale = fields.number("rescale_factor", 1 / 255, least=1e-9)
        self.mean = self._channels(fields, "image_mean", -1e6)
        self.std = self._channels(fields, "image_std", 1e-9)

    def _sides(self, fields: Fields, name: str) -> dict[str, Any]:
        """A size that comes to `side` on every edge it names."""
        value = fields.raw.get(name)
        sizes = value if isinstance(value, dict) else {"shortest_edge": value}
        named = set(sizes) in ({"height", "width"}, {"shortest_edge"})
        if not named or any(edge != self.side for edge in sizes.values()):
            fields.refuse(name, f"{self.side} on every edge, as image_size of the encoder")
        return sizes

    @staticmethod
    def _channels(fields: Fields, name: str, least: float) -> np.ndarray:
        """Three numbers [3, 1, 1]."""
        value = fields.raw.get(name)
        if not isinstance(value, list) or len(value) != 3:
            fields.refuse(name, "three numbers")
        each = [Fields({name: v}, fields.source).number(name, None, least) for v in value]
        return np.array(each)[:, None, None]

    def resized_to(self, height: int, width: int) -> tuple[int, int]:
        """Height and width before the square in the middle is cut out."""
        if not self.keeps_aspect:
            return self.side, self.side
        short = min(height, width)
        return tuple(  # type: ignore[return-value]
            self.side if edge == short else int(self.side * edge / short)
            for edge in (height, width)
        )

    def __call__(self, pixels: np.ndarray) -> np.ndarray:
        """What the encoder takes of a picture uint8 [height, width, 3]: float64 [3, side, side]."""
        height, width = self.resized_to(*pixels.shape[:2])
        top, left = (height - self.side) // 2, (width - self.side) // 2
        box = (top, left, self.side, self.side)
        square = resize(pixels, height, width, self.resample, box)
        return (square.transpose(2, 0, 1) * self.scale - self.mean) / self.std


def pixels_of(picture: Any, name: str = "multi_modal_data['image']") -> np.ndarray:
    """A caller's picture as uint8 [height, width, 3], a copy of its own.

    Args:
        picture: such an array, or an image of Pillow's in any mode.
        name: for messages.

    Raises:
        ValueError: something else, no pixel, or more than `MOST_PIXELS`.
    """
    if type(picture).__module__.partition(".")[0] == "PIL" and hasattr(picture, "convert"):
        _check_size(name, picture.height, picture.width)
        try:
            return np.asarray(picture.convert("RGB")).copy()
        except (OSError, SyntaxError, ValueError) as error:  # a file that is opened lazily
            raise ValueError(f"{name}: the picture cannot be decoded: {error}") from None
    if not isinstance(picture, np.ndarray):
        kind = type(picture).__name__
        raise ValueError(f"{name} is a {kind}: need a PIL image or uint8 [height, width, 3]")
    if picture.dtype != np.uint8 or picture.ndim != 3 or picture.shape[2] != 3:
        raise ValueError(
            f"{name} is {picture.dtype} {list(picture.shape)}: need uint8 [height, width, 3]"
        )
    _check_size(name, *picture.shape[:2])
    return picture.copy()


def _check_size(name: str, height: int, width: int) -> None:
    if not 0 < height * width <= MOST_PIXELS:
        raise ValueError(
            f"{name} has {width} x {height} pixels: need at least one and at most {MOST_PIXELS:,}"
        )


def items_of(data: Any, most: int) -> list[Any]:
    """The pictures of a prompt's `multi_modal_data`, in order.

    Raises:
        ValueError: another modality than "image", or more than `most` pictures.
    """
    if not isinstance(data, dict) or set(data) - {"image"}:
        kinds = sorted(map(str, data)) if isinstance(data, dict) else data
        raise ValueError(f"multi_modal_data={kinds!r}: need {{'image': a picture, or a list}}")
    pictures = data.get("image")
    if pictures is None:
        return []
    pictures = list(pictures) if isinstance(pictures, list | tuple) else [pictures]
    if len(pictures) > most:
        raise ValueError(
            f"multi_modal_data has {len(pictures)} images: limit_mm_per_prompt allows {most}"
        )
    return pictures


def expand(
    token_ids: Sequence[int], marker: int, num_tokens: int, count: int
) -> tuple[list[int], list[PlaceholderRange]]:
    """Each marker becomes as many placeholders as a picture has embeddings.

    Args:
        token_ids: of the prompt.
        marker: the token that stands for a picture, and the one that its placeholders are.
        num_tokens: of a picture.
        count: of the pictures that came with the prompt.

    Returns:
        The longer prompt, and where each picture stands in it.

    Raises:
        ValueError: as many markers as pictures are needed, and there are not.
    """
    if (found := list(token_ids).count(marker)) != count:
        raise ValueError(
            f"multi_modal_data has {count} image(s): the prompt has {found} placeholder(s) for them"
        )
    expanded: list[int] = []
    places = []
    for token in token_ids:
        if token == marker:
            places.append(PlaceholderRange(len(expanded), num_tokens))
        expanded += [token] * (num_tokens if token == marker else 1)
    return expanded, places


def features_of(
    pictures: Iterable[np.ndarray], places: Iterable[PlaceholderRange], processor: ImageProcessor
) -> tuple[MultiModalFeatureSpec, ...]:
    """Pictures in their places, each with its identifier and what its encoder takes."""
    return tuple(
        MultiModalFeatureSpec(hash_picture(pixels), place, processor(pixels))
        for pixels, place in zip(pictures, places, strict=True)
    )
