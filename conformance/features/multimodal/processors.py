"""What the processors of `transformers` make of pictures of a size: grids, tokens, embeddings.

`python -m conformance.features.multimodal.processors FILE` writes the file of labs 13-02 and 13-04.
It needs `transformers` and Pillow. Nothing is computed here: a blank picture of each size goes
through the processor, and what comes back is counted.
"""

from __future__ import annotations

import gzip
import importlib.machinery
import json
import random
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MIN_PIXELS, MAX_PIXELS = 3136, 12_845_056
"""Of Qwen2-VL's checkpoints: their `preprocessor_config.json`."""
LIMITS = (
    (MIN_PIXELS, MAX_PIXELS), (MIN_PIXELS, 768 * 768), (64**2, 512**2), (256 * 784, 1280 * 784),
)  # fmt: skip
"""Least and most pixels that Qwen2-VL's processor is asked with."""
KNOWN = (
    (14, 14), (28, 28), (29, 28), (42, 42), (336, 336), (337, 337), (336, 337), (640, 480),
    (1280, 960), (1300, 876), (1024, 1024), (1920, 1080), (512, 2048), (2048, 512), (200, 1),
    (1024, 16), (1025, 1024), (17, 1023), (56, 5600), (3840, 2160), (4032, 3024),
)  # fmt: skip


def sizes() -> list[tuple[int, int]]:
    """Widths and heights: the known ones, then some at random, many at a rounding's edge."""
    rng = random.Random(13)
    found = list(KNOWN)
    while len(found) < 140:
        kind = rng.choice(("edge", "edge", "any", "long", "large"))
        if kind == "edge":  # half a patch of 28, where `round` goes to the even one
            width, height = (14 * rng.randint(1, 90) + rng.choice((-1, 0, 0, 1)) for _ in "wh")
        elif kind == "any":
            width, height = (rng.randint(1, 1600) for _ in "wh")
        elif kind == "long":
            width, height = rng.randint(600, 2400), rng.randint(12, 60)
        else:
            width, height = (rng.randint(900, 2600) for _ in "wh")
        if rng.random() < 0.5:
            width, height = height, width
        if width > 0 and height > 0 and max(width, height) <= 200 * min(width, height):
            found.append((width, height))
    return found


def _pixtral_processor() -> Any:
    """`PixtralProcessor`, whose module imports torchvision and uses nothing of it here."""
    for name in ("torchvision", "torchvision.transforms", "torchvision.transforms.v2"):
        module = types.ModuleType(name)
        module.__path__ = []
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules.setdefault(name, module)
    functional = types.ModuleType("torchvision.transforms.v2.functional")
    sys.modules.setdefault(functional.__name__, functional)
    sys.modules["torchvision.transforms.v2"].functional = functional  # type: ignore[attr-defined]
    from transformers.models.pixtral.processing_pixtral import PixtralProcessor

    return PixtralProcessor


def cases() -> Iterator[dict[str, Any]]:
    """A line with the version; then of each size what each processor says.

    `qwen2_vl`: by entry of `LIMITS` the grid in merged patches [height, width]. `pixtral`: the size
    in pixels that the picture is brought to [height, width], its tokens, and those of them that
    take an embedding. `llava_1_5`: the side of the square that the encoder gets.
    """
    import transformers
    from PIL import Image
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    clip = CLIPImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}
    )
    pixtral, text = PixtralImageProcessorPil(), _pixtral_processor()
    qwen = [Qwen2VLImageProcessorPil(min_pixels=low, max_pixels=high) for low, high in LIMITS]
    yield {"transformers": transformers.__version__, "limits": LIMITS}
    names = types.SimpleNamespace(
        patch_size=16, spatial_merge_size=1, image_token="I", image_break_token="B",
        image_end_token="E",
    )  # fmt: skip
    for width, height in sizes():
        picture = Image.new("RGB", (width, height))
        grids = []
        for processor in qwen:
            [[frames, rows, columns]] = processor(picture)["image_grid_thw"]
            assert frames == 1
            grids.append([int(rows) // 2, int(columns) // 2])
        found = pixtral(picture)["image_sizes"]
        tokens = text.replace_image_token(names, {"image_sizes": found}, 0)
        side = clip(picture)["pixel_values"][0].shape[-1]
        yield {
            "size": [width, height],
            "qwen2_vl": grids,
            "pixtral": {
                "size": [int(edge) for edge in found[0]], "tokens": len(tokens),
                "embeds": tokens.count("I"),
            },
            "llava_1_5": int(side),
        }  # fmt: skip


if __name__ == "__main__":
    with gzip.GzipFile(Path(sys.argv[1]), "wb", mtime=0) as file:
        for line in cases():
            file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
