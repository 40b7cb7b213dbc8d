"""A sandbox process that decodes and processes images; its own processes, so that images delay no other job.

Owns: the job `process_image`, and loading all of Pillow that it uses before the process can open no more files.
Does not: serve orders (child does).
"""

from __future__ import annotations

from io import BytesIO

from PIL import Image, MpoImagePlugin, TiffImagePlugin  # noqa: F401  (Pillow imports these two when they are needed)

from octavo.artifacts.vision_spec import VisionSpec
from octavo.media.decode import decode_image
from octavo.media.item import MediaItem
from octavo.media.processors import process_image
from octavo.sandbox import wire
from octavo.sandbox.child import Job, main

_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
_ORIENTATION = 0x0112  # a tag of EXIF


def _process(order: wire.ProcessImage) -> list[MediaItem]:
    return process_image(decode_image(order.data, order.max_pixels), order.vision)


def _warm_up() -> None:
    """Process one image of each format, with the orientation that EXIF data has."""
    colours = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
    vision = VisionSpec("llava", 0, 0, *colours, 1 / 255, 3, 2, (4, 4), 4, shortest_edge=4)
    for name in _FORMATS:
        file, exif = BytesIO(), Image.Exif()
        exif[_ORIENTATION] = 6
        Image.new("RGB", (8, 6)).save(file, name, exif=exif)
        process_image(decode_image(file.getvalue(), 64), vision)


if __name__ == "__main__":
    main({wire.PROCESS_IMAGE: Job(wire.ProcessImage, _process)}, warm_up=_warm_up)
