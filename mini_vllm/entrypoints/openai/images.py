"""Pictures in a chat: from `image_url` parts with data URLs to pixels, within bounds.

Promises: no URL is fetched; what a file claims about its size is compared with its bytes before
memory is taken for it; a broken one is refused by name. Stands where
`vllm/multimodal/media/image.py:20` `ImageMediaIO` loads a picture that may also have been fetched.
"""

from __future__ import annotations

import base64
import binascii
import io
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mini_vllm.entrypoints.openai.errors import APIError

if TYPE_CHECKING:
    import numpy as np

FORMATS = {"data:image/png": "PNG", "data:image/jpeg": "JPEG"}
"""What is taken, by the URL's beginning."""
MOST_RATIO = 1032
"""Bytes that one compressed byte of a PNG can become at most: deflate copies at most 258 bytes for
two bits. A file that claims more is a lie."""


def pictures_of(messages: Sequence[Any]) -> list[np.ndarray]:
    """The pictures of a conversation in their order, uint8 [height, width, 3] each.

    Raises:
        APIError: a URL that would have to be fetched, a file that is broken, of another format or
            too large, or Pillow is absent.
    """
    from mini_vllm.multimodal.processor import MOST_PIXELS

    found: list[np.ndarray] = []
    left = MOST_PIXELS
    for url in _urls(messages):
        pixels = _decoded(url, left)
        left -= pixels.shape[0] * pixels.shape[1]
        found.append(pixels)
    return found


def _urls(messages: Sequence[Any]) -> list[str]:
    """The URL of each `image_url` part."""
    urls = []
    for message in messages:
        for part in message.content if isinstance(message.content, list) else ():
            if part.get("type") != "image_url":
                continue
            given = part.get("image_url")
            url = given.get("url") if isinstance(given, Mapping) else given
            if not isinstance(url, str):
                raise APIError("messages: image_url: need an object with a url")
            urls.append(url)
    return urls


def _decoded(url: str, most_pixels: int) -> np.ndarray:
    """The pixels behind one data URL."""
    try:
        from PIL import Image
    except ImportError:
        raise APIError("messages: pictures need the 'vision' extra (pillow)") from None
    kind, comma, payload = url.partition(",")
    form, _, coding = kind.partition(";")
    if form not in FORMATS or coding != "base64" or not comma:
        need = " or ".join(f"{name};base64,..." for name in FORMATS)
        raise APIError(f"messages: image_url {kind[:60]!r}: need {need}; no URL is fetched")
    try:
        data = base64.b64decode(payload, validate=True)
    except (binascii.Error, ValueError):
        raise APIError("messages: image_url: not base64, which a data URL needs") from None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(io.BytesIO(data), formats=(FORMATS[form],)) as image:
                width, height = image.size  # of the header: nothing is decoded yet
                _check_claim(width, height, len(data), most_pixels, FORMATS[form])
                return _rgb(image)
    except APIError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        need = f"need at most {most_pixels:,} in one conversation"
        raise APIError(f"messages: a picture of too many pixels: {need}") from None
    except Exception as error:  # Pillow raises what its decoders raise
        kind = type(error).__name__
        raise APIError(f"messages: image_url: the picture cannot be decoded ({kind})") from None


def _check_claim(width: int, height: int, num_bytes: int, most: int, form: str) -> None:
    if width * height > most:
        raise APIError(
            f"messages: a picture of {width} x {height} pixels: need at most {most:,} in one "
            "conversation"
        )
    if form == "PNG" and width * height // 8 > num_bytes * MOST_RATIO:
        raise APIError(
            f"messages: a picture of {width} x {height} pixels cannot be in {num_bytes:,} bytes"
        )


def _rgb(image: Any) -> np.ndarray:
    """The pixels, on white where they let something through:
    `vllm/multimodal/image.py:19` `rgba_to_rgb`."""
    import numpy as np
    from PIL import Image

    if image.mode == "RGBA":
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        image = Image.alpha_composite(white, image)
    return np.asarray(image.convert("RGB")).copy()
