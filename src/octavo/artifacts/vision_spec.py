"""What a model does with images: how pixels are processed, and which tokens stand for an image in a prompt.

Owns: VisionSpec, with the sizes that follow from it. Does not: read files (read_vision.py does), decode or resize
images (octavo.media does), or run a vision tower (models/transformers_vision.py does).
An item is what a tower encodes at once, and has one run of placeholder tokens: an image, or with `splits` one tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

KINDS = ("llava", "llava_next", "gemma3", "idefics3", "qwen2_vl")


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """The processing of images for one model. Sizes of pixels are (height, width).

    `kind` is the rule of the processor: "llava" makes a square of the image by borders of the mean colour if `pads`,
    resizes the shortest edge to `shortest_edge` and crops the centre to `tile_size`; "llava_next" also makes such tiles
    of the image at the best of `resolutions`; "gemma3" resizes to `tile_size`; "idefics3" resizes the longest edge to
    `longest_edge` and cuts tiles of `tile_size`; "qwen2_vl" resizes to multiples of `merge_size` patches, with
    `min_pixels` to `max_pixels` in all. `resample` is Pillow's number of the filter. Processed pixels are uint8; the
    tower gets (pixel * rescale_factor - mean) / std.

    Templates mark the place of an image with `prompt_token_id`. That token is replaced by the image's `layout`, in
    which every position of an item is `image_token_id`. `has_rope_positions`: these positions are temporal, height and
    width positions in the item's grid. `is_both_ways`: the positions of an item see each other.
    """

    kind: str
    image_token_id: int
    prompt_token_id: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    rescale_factor: float
    resample: int
    patch_size: int
    tile_size: tuple[int, int]
    tokens_per_tile: int
    shortest_edge: int = 0
    longest_edge: int = 0
    resolutions: tuple[tuple[int, int], ...] = ()
    merge_size: int = 1
    min_pixels: int = 0
    max_pixels: int = 0
    has_rope_positions: bool = False
    is_both_ways: bool = False
    pads: bool = False

    @property
    def settings(self) -> bytes:
        """Return bytes that differ for processors that make different pixels or embeddings; for the keys of items."""
        return repr(self).encode()

    def merged_grid(self, grid: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the temporal size, height and width of an item in placeholder tokens."""
        return grid[0], grid[1] // self.merge_size, grid[2] // self.merge_size

    @property
    def max_item_tokens(self) -> int:
        """Return the most tokens that an item can have."""
        if self.kind == "qwen2_vl":
            return self.max_pixels // (self.patch_size * self.merge_size) ** 2
        sizes = ((height // self.tile_size[0], width // self.tile_size[1]) for height, width in self.resolutions)
        return max((self._num_tiled(*grid, grid) for grid in sizes), default=self.tokens_per_tile)

    @property
    def max_grid(self) -> tuple[int, int, int]:
        """Return the `grid` of the image that has most items, or (1, 1, 1) if an image is one item."""
        side = -(-self.longest_edge // self.tile_size[0]) if self.kind == "idefics3" else 1
        return 1, side, side

    @property
    def max_items(self) -> int:
        """Return the most items that an image can have: its tiles, and the whole image beside several."""
        num_tiles = prod(self.max_grid)
        return num_tiles + (num_tiles > 1)

    def num_tokens(self, shape: tuple[int, int, int], grid: tuple[int, int, int], size: tuple[int, int]) -> int:
        """Return how many placeholder tokens an item of MediaItem's `shape`, `grid` and `size` has."""
        if self.kind == "qwen2_vl":
            return prod(self.merged_grid(grid))
        if self.kind == "llava_next":
            return self._num_tiled(*size, grid[1:])
        return self.tokens_per_tile * shape[0]

    def _num_tiled(self, height: int, width: int, tiles: tuple[int, ...]) -> int:
        """Return LLaVA-NeXT's tokens of an image: the whole, then rows of its tiles without padding, with their ends.

        The rounding is that of transformers' unpad_image.
        """
        rows, columns = (tiles[axis] * (self.tile_size[axis] // self.patch_size) for axis in (0, 1))
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        return self.tokens_per_tile + rows * columns + rows

    def layout(self, items: tuple[int, ...], grid: tuple[int, int, int]) -> tuple[str | int, ...]:
        """Return what replaces the token at an image's place: texts, and for each of its items the number of tokens.

        `items` has the `num_tokens` of the image's items in order, and `grid` the rows and columns of its tiles. Texts
        may contain special tokens, which count as such.
        """
        if self.kind == "gemma3":
            return "\n\n<start_of_image>", *items, "<end_of_image>\n\n"
        if self.kind != "idefics3":
            return items
        around, parts = "<fake_token_around_image>", list[str | int]()
        for index, count in enumerate(items[:-1]):
            row, column = divmod(index, grid[2])
            parts += [f"{around}<row_{row + 1}_col_{column + 1}>", count]
            parts += ["\n"] if column == grid[2] - 1 else []
        start = "\n" if parts else ""
        return *parts, f"{start}{around}<global-img>", items[-1], around
