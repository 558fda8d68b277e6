"""From a picture to what training needs: pixel patches, and labels of what each patch shows."""

import math

import numpy as np
import numpy.typing as npt
from PIL import Image

from demo.scenes import (
    ALL_COLOURS,
    KINDS,
    MAX_SIDE,
    MIN_SIDE,
    PlacedNumber,
    PlacedShape,
    Scene,
    layout,
)

PATCH, MERGE = 16, 2
TOKEN = PATCH * MERGE
"""Side of the square that one image token stands for, in pixels."""
MEAN = STD = 0.5
MIN_PIXELS, MAX_PIXELS = MIN_SIDE * MIN_SIDE, MAX_SIDE * MAX_SIDE

# What an image token can be asked about in training, with the number of classes; class 0 means
# "nothing here", except for the background, which is everywhere.
LABELS = {
    "kind": len(KINDS) + 1,
    "colour": len(ALL_COLOURS) + 1,
    "size": 3,
    "row": 3,
    "column": 3,
    "background": len(ALL_COLOURS),
    "left_digit": 11,
    "right_digit": 11,
}
_COLUMN = {name: i for i, name in enumerate(LABELS)}
_COLOUR = {name: i for i, name in enumerate(ALL_COLOURS)}


def patchify(image: Image.Image) -> tuple[npt.NDArray[np.float32], int, int]:
    """(patches, grid rows, grid columns), as Qwen2VLImageProcessorPil makes them, but faster."""
    width, height = _fitting_size(*image.size)
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.BICUBIC)
    x = np.asarray(image, np.uint8).astype(np.float32) * np.float32(1 / 255)
    x = ((x - np.float32(MEAN)) / np.float32(STD)).transpose(2, 0, 1)
    rows, columns = height // PATCH, width // PATCH
    x = x.reshape(3, rows // MERGE, MERGE, PATCH, columns // MERGE, MERGE, PATCH)
    x = x.transpose(1, 4, 2, 5, 0, 3, 6)
    x = np.broadcast_to(x[:, :, :, :, :, None], (*x.shape[:5], 2, PATCH, PATCH))  # two equal frames
    return x.reshape(rows * columns, -1), rows, columns


def _fitting_size(width: int, height: int) -> tuple[int, int]:
    """Nearest size in whole image tokens within the allowed number of pixels."""

    def whole(side: float, rounding: object = round) -> int:
        return max(TOKEN, rounding(side / TOKEN) * TOKEN)  # type: ignore[operator]

    new = whole(width), whole(height)
    if new[0] * new[1] > MAX_PIXELS:
        shrink = math.sqrt(width * height / MAX_PIXELS)
        return whole(width / shrink, math.floor), whole(height / shrink, math.floor)
    if new[0] * new[1] < MIN_PIXELS:
        grow = math.sqrt(MIN_PIXELS / (width * height))
        return whole(width * grow, math.ceil), whole(height * grow, math.ceil)
    return new


def token_labels(scene: Scene, grid_height: int, grid_width: int) -> npt.NDArray[np.int64]:
    """[image tokens, len(LABELS)]: what each token shows. Only a training aid reads it."""
    rows, columns = grid_height // MERGE, grid_width // MERGE
    labels = np.zeros((rows, columns, len(LABELS)), np.int64)
    labels[..., _COLUMN["background"]] = _COLOUR[scene.background]
    scale = (columns * TOKEN / scene.width, rows * TOKEN / scene.height)
    plan = layout(scene)
    covered = np.full((rows, columns), 0.12 * TOKEN * TOKEN)  # less than this doesn't count
    for shape in plan.shapes:
        _label_shape(labels, covered, shape, scale)
    if plan.number:
        _label_number(labels, plan.number, scene.ink, scale)
    return labels.reshape(rows * columns, -1)


def _label_shape(
    labels: npt.NDArray[np.int64],
    covered: npt.NDArray[np.float64],
    placed: PlacedShape,
    scale: tuple[float, float],
) -> None:
    """A token belongs to the shape whose box covers most of it."""
    shape, (sx, sy) = placed.shape, scale
    left, right = (placed.x - placed.radius) * sx, (placed.x + placed.radius) * sx
    top, bottom = (placed.y - placed.radius) * sy, (placed.y + placed.radius) * sy
    rows, columns = covered.shape
    x0, y0 = np.arange(columns) * TOKEN, np.arange(rows) * TOKEN
    dx = np.clip(np.minimum(x0 + TOKEN, right) - np.maximum(x0, left), 0, None)
    dy = np.clip(np.minimum(y0 + TOKEN, bottom) - np.maximum(y0, top), 0, None)
    area = dy[:, None] * dx[None, :]
    mine = area > covered
    covered[mine] = area[mine]
    values = {
        "kind": KINDS.index(shape.kind) + 1,
        "colour": _COLOUR[shape.colour] + 1,
        "size": 1 + (shape.size == "small"),
        "row": 1 + shape.row,
        "column": 1 + shape.column,
    }
    for label, value in values.items():
        labels[mine, _COLUMN[label]] = value


def _label_number(
    labels: npt.NDArray[np.int64], placed: PlacedNumber, ink: str, scale: tuple[float, float]
) -> None:
    """Each half of a token shows the digit at its middle."""
    sx, sy = scale
    rows, columns = labels.shape[:2]
    row = min(rows - 1, max(0, int((placed.top + placed.height / 2) * sy / TOKEN)))
    for digit, left, right in placed.spans():
        for column in range(columns):
            for half, label in enumerate(("left_digit", "right_digit")):
                middle = column * TOKEN + (half + 0.5) * PATCH
                if left * sx <= middle < right * sx:
                    labels[row, column, _COLUMN[label]] = int(digit) + 1
                    labels[row, column, _COLUMN["colour"]] = _COLOUR[ink] + 1
