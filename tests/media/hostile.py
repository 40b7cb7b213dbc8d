"""Two hundred files and URLs that are no images to decode: bombs, damaged files, other formats, animations."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from io import BytesIO

import numpy as np
from PIL import Image

from tests.media.items import file_of, make_image

KINDS = ("PNG", "JPEG", "GIF", "BMP", "WEBP")


def chunk(kind: bytes, data: bytes) -> bytes:
    """One chunk of a PNG file."""
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, body: bytes, *more: bytes) -> bytes:
    """A PNG file of any claimed size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(more) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


def zeros(size: int) -> bytes:
    """A zip bomb of zeros."""
    packer = zlib.compressobj(9)
    return b"".join(packer.compress(bytes(1 << 20)) for _ in range(size >> 20)) + packer.flush()


def bombs() -> Iterator[tuple[str, bytes]]:
    """Small files that claim, or unpack to, much."""
    body = zeros(64 << 20)
    for width, height in (
        (10_000, 10_000),
        (65_535, 65_535),
        (2**31 - 1, 2),
        (30_000, 3_000),
        (1, 16_384),
        (16_384, 1),
    ):
        yield f"png of {width} x {height}", png(width, height, body)
        yield f"bmp of {width} x {height}", _bmp(width, height)
    for width, height in ((65_535, 65_535), (20_000, 20_000)):
        yield f"gif of {width} x {height}", b"GIF89a" + struct.pack("<HHBBB", width, height, 0, 0, 0) + b";"
        yield f"webp of {width} x {height}", _webp(width, height)
        yield f"jpeg of {width} x {height}", _jpeg(width, height)
    huge = Image.new("L", (10_000, 10_000))
    yield "a jpeg of 100 megapixels", file_of(huge, "JPEG", quality=5)
    yield "a png of 100 megapixels", file_of(huge.convert("1"))
    text = chunk(b"zTXt", b"a\0\0" + zeros(256 << 20))
    yield "a png with a compressed text", png(4, 4, zlib.compress(bytes(4 * 13)), *[text] * 3)
    yield "a png with a compressed profile", png(4, 4, body, chunk(b"iCCP", b"a\0\0" + zeros(256 << 20)))
    yield "a png of many chunks", png(4, 4, b"", *[chunk(b"tEXt", b"a\0b")] * 50_000)


def _bmp(width: int, height: int) -> bytes:
    return b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, width, height, 1, 24, *[0] * 6)


def _webp(width: int, height: int) -> bytes:
    size = struct.pack("<I", width - 1)[:3] + struct.pack("<I", height - 1)[:3]
    body = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + size
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _jpeg(width: int, height: int) -> bytes:
    whole = bytearray(file_of(make_image(16, 16), "JPEG"))
    at = whole.index(b"\xff\xc0") + 5
    whole[at : at + 4] = struct.pack(">HH", height, width)
    return bytes(whole)


def animated() -> Iterator[tuple[str, bytes]]:
    """Files of several frames."""
    frames = [make_image(8, 8), make_image(8, 9).resize((8, 8)), make_image(9, 8).resize((8, 8))]
    for kind in ("GIF", "PNG", "WEBP"):
        yield f"an animated {kind}", file_of(frames[0], kind, save_all=True, append_images=frames[1:])
    many = [Image.new("L", (4, 4), color=index % 2 * 255) for index in range(2000)]
    yield "a GIF of 2000 frames", file_of(many[0], "GIF", save_all=True, append_images=many[1:])


def others() -> Iterator[tuple[str, bytes]]:
    """Files of formats that are not read, some beginning as one that is."""
    image = make_image(12, 12)
    svg = b"<?xml version='1.0'?><svg xmlns='http://www.w3.org/2000/svg'><image href='file:///etc/passwd'/></svg>"
    yield "an svg", svg
    yield "an svg without a head", svg[21:]
    for kind in ("TIFF", "PPM", "ICO", "TGA", "PDF", "EPS", "PCX", "DDS", "SGI", "XBM", "JPEG2000"):
        file = BytesIO()
        (image.convert("1") if kind == "XBM" else image).save(file, kind)
        yield f"a {kind}", file.getvalue()
    for name, data in (
        ("nothing", b""), ("a space", b" "), ("html", b"<html><img></html>"), ("a zip", b"PK\x03\x04" + bytes(99)),
        ("an elf", b"\x7fELF" + bytes(99)), ("a script", b"#!/bin/sh\n"), ("a pickle", b"\x80\x04K\x01."),
        ("json", b"{}"), ("postscript", b"%!PS-Adobe-3.0\n"), ("a font", b"OTTO" + bytes(99)), ("mpeg", bytes(99)),
        ("avif", b"\0\0\0\x20ftypavif" + bytes(99)), ("heic", b"\0\0\0\x20ftypheic" + bytes(99)),
    ):  # fmt: skip
        yield name, data
        for kind, head in (("PNG", b"\x89PNG\r\n\x1a\n"), ("JPEG", b"\xff\xd8\xff"), ("GIF", b"GIF89a")):
            yield f"{name} that begins as {kind}", head + data


def damaged() -> Iterator[tuple[str, bytes]]:
    """Files cut short, or with other bytes, whose head or data cannot be read."""
    for kind in KINDS:
        whole = file_of(make_image(64, 64), kind)
        for share in (0.02, 0.1, 0.3, 0.5, 0.7, 0.9):
            yield f"{kind} cut at {share}", whole[: max(9, int(share * len(whole)))]
        random = np.random.default_rng(len(whole))
        for number in range(16):
            changed = bytearray(whole)
            for place in random.integers(8, 40, 16):
                changed[place] = int(random.integers(0, 256))
            yield f"{kind} with another head {number}", bytes(changed)


def hostile_files() -> list[tuple[str, bytes]]:
    """All of them."""
    return [*bombs(), *animated(), *others(), *damaged()]
