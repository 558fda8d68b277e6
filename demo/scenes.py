"""Pictures: up to four coloured shapes on a plain background, or one large printed number.

A `Scene` is the whole truth about a picture. `layout` turns it into exact geometry and `render`
draws that, so the training labels and the pixels can't disagree. The same scene always gives the
same picture: every random choice left to drawing comes from `Scene.seed`.
"""

import math
import random
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from PIL import Image, ImageDraw, ImageFont

Colour = tuple[int, int, int]
COLOURS: dict[str, Colour] = {
    "red": (222, 38, 38),
    "green": (38, 160, 60),
    "blue": (40, 70, 215),
    "yellow": (246, 222, 50),
    "orange": (246, 140, 28),
    "purple": (138, 56, 190),
    "cyan": (50, 205, 222),
    "pink": (252, 150, 196),
}
NEUTRAL: dict[str, Colour] = {
    "white": (250, 250, 250),
    "black": (12, 12, 12),
    "gray": (128, 128, 128),
}
ALL_COLOURS = COLOURS | NEUTRAL
KINDS = ("circle", "square", "triangle", "star", "cross")
SIZES = ("large", "small")
CELLS = ("top left", "top right", "bottom left", "bottom right")
MIN_SIDE, MAX_SIDE = 96, 192

# Numbers are printed only in pairs that a person tells apart at a glance.
INK = {
    "white": ("black", "red", "blue", "green", "purple"),
    "black": ("white", "yellow", "cyan", "pink"),
    "gray": ("white", "black", "yellow"),
    "yellow": ("black", "blue", "red"),
    "cyan": ("black", "blue", "red"),
    "pink": ("black", "blue", "red"),
}
# Chance of 0, 1, 2, ... shapes.
USUAL_COUNTS = (0.03, 0.27, 0.33, 0.23, 0.14)
FEW_COUNTS = (0.03, 0.6, 0.37)
SUPERSAMPLING = 2


@dataclass(frozen=True, slots=True)
class Shape:
    kind: str
    colour: str
    size: str
    cell: int
    """Index into `CELLS`; a cell holds at most one shape."""

    @property
    def column(self) -> int:
        return self.cell % 2

    @property
    def row(self) -> int:
        return self.cell // 2


@dataclass(frozen=True, slots=True)
class Scene:
    background: str
    width: int
    height: int
    seed: int
    shapes: tuple[Shape, ...] = ()
    """In reading order of their cells."""
    number: str = ""
    ink: str = ""
    """Colour of the number; empty in a picture of shapes."""

    def of_kind(self, kind: str) -> list[Shape]:
        return [s for s in self.shapes if s.kind == kind]


@dataclass(frozen=True, slots=True)
class PlacedShape:
    shape: Shape
    x: float
    y: float
    radius: float
    fill: Colour


@dataclass(frozen=True, slots=True)
class PlacedNumber:
    text: str
    x: float
    y: float
    """Origin that PIL draws from."""
    height: float
    """Of the ink."""
    top: float
    font_size: int
    fill: Colour

    def spans(self) -> list[tuple[str, float, float]]:
        """(digit, left, right) in pixels."""
        length = _font(self.font_size * SUPERSAMPLING).getlength
        edges = [self.x + length(self.text[:i]) / SUPERSAMPLING for i in range(len(self.text) + 1)]
        return [(d, a, b) for d, (a, b) in zip(self.text, pairwise(edges), strict=True)]


@dataclass(frozen=True, slots=True)
class Layout:
    background: Colour
    shapes: tuple[PlacedShape, ...] = ()
    number: PlacedNumber | None = None


# --- inventing scenes


def random_shapes_scene(rng: random.Random, counts: tuple[float, ...] = USUAL_COUNTS) -> Scene:
    """Up to `len(counts) - 1` shapes, each in its own cell, never in the background's colour."""
    count = rng.choices(range(len(counts)), counts)[0]
    background = rng.choice(list(NEUTRAL if rng.random() < 0.6 else COLOURS))
    colours = [c for c in COLOURS if c != background]
    shapes: list[Shape] = []
    for cell in sorted(rng.sample(range(len(CELLS)), count)):
        kind = rng.choice(KINDS)
        if shapes and rng.random() < 0.25:  # else "two stars" would be rare
            kind = shapes[-1].kind
        shapes.append(Shape(kind, rng.choice(colours), rng.choice(SIZES), cell))
    width, height = _random_size(rng)
    return Scene(background, width, height, rng.randrange(1 << 30), tuple(shapes))


def random_number_scene(rng: random.Random) -> Scene:
    """One or two digits; 0 to 99 without leading zeros."""
    number = str(rng.randint(0, 9) if rng.random() < 0.3 else rng.randint(10, 99))
    background = rng.choice(("white", "white", *INK))
    ink = rng.choice(INK[background])
    width, height = _random_size(rng)
    return Scene(background, width, height, rng.randrange(1 << 30), number=number, ink=ink)


def _random_size(rng: random.Random) -> tuple[int, int]:
    def side() -> int:
        return rng.randint(MIN_SIDE, 160 if rng.random() < 0.8 else MAX_SIDE)

    return side(), side()


# --- drawing


def layout(scene: Scene) -> Layout:
    """Exact geometry, in pixels of the final picture."""
    rng = random.Random(scene.seed)
    background = _jitter(ALL_COLOURS[scene.background], rng, 6)
    if scene.number:
        return Layout(background, number=_place_number(scene, rng))
    return Layout(background, tuple(_place_shape(scene, s, rng) for s in scene.shapes))


def render(scene: Scene) -> Image.Image:
    """The picture, RGB, `scene.width` by `scene.height`."""
    plan = layout(scene)
    k = SUPERSAMPLING
    image = Image.new("RGB", (scene.width * k, scene.height * k), plan.background)
    draw = ImageDraw.Draw(image)
    for p in plan.shapes:
        _draw_shape(draw, p.shape.kind, p.x * k, p.y * k, p.radius * k, p.fill)
    if n := plan.number:
        draw.text((n.x * k, n.y * k), n.text, font=_font(n.font_size * k), fill=n.fill)
    return image.resize((scene.width, scene.height), Image.Resampling.BOX)


def _place_shape(scene: Scene, shape: Shape, rng: random.Random) -> PlacedShape:
    cell_width, cell_height = scene.width / 2, scene.height / 2
    cell = min(cell_width, cell_height)
    low, high = (0.42, 0.47) if shape.size == "large" else (0.23, 0.28)
    return PlacedShape(
        shape,
        x=(shape.column + 0.5) * cell_width + rng.uniform(-0.06, 0.06) * cell,
        y=(shape.row + 0.5) * cell_height + rng.uniform(-0.06, 0.06) * cell,
        radius=cell * rng.uniform(low, high),
        fill=_jitter(COLOURS[shape.colour], rng, 10),
    )


def _place_number(scene: Scene, rng: random.Random) -> PlacedNumber:
    k = SUPERSAMPLING
    size = rng.randint(48, 66)
    while size > 30 and _font(size * k).getlength(scene.number) > 0.92 * scene.width * k:
        size -= 1
    left, top, right, bottom = (v / k for v in _font(size * k).getbbox(scene.number))
    width, height = right - left, bottom - top
    x = rng.uniform(2, max(2, scene.width - width - 2))
    y = rng.uniform(0.15 * scene.height, max(0.15 * scene.height, 0.85 * scene.height - height))
    fill = _jitter(ALL_COLOURS[scene.ink], rng, 6)
    return PlacedNumber(scene.number, x - left, y - top, height, y, size, fill)


def _draw_shape(
    draw: ImageDraw.ImageDraw, kind: str, x: float, y: float, r: float, fill: Colour
) -> None:
    if kind == "circle":
        draw.ellipse([x - r, y - r, x + r, y + r], fill=fill)
    elif kind == "square":
        half = r * 0.88
        draw.rectangle([x - half, y - half, x + half, y + half], fill=fill)
    elif kind == "triangle":
        corners = [(x, y - r), (x - r * 0.95, y + r * 0.8), (x + r * 0.95, y + r * 0.8)]
        draw.polygon(corners, fill=fill)
    elif kind == "cross":
        arm = r * 0.34
        draw.rectangle([x - r, y - arm, x + r, y + arm], fill=fill)
        draw.rectangle([x - arm, y - r, x + arm, y + r], fill=fill)
    else:
        draw.polygon(_star(x, y, r), fill=fill)


def _star(x: float, y: float, r: float) -> list[tuple[float, float]]:
    points = []
    for i in range(10):
        reach = r * (0.45 if i % 2 else 1.08)
        angle = -math.pi / 2 + i * math.pi / 5
        points.append((x + reach * math.cos(angle), y + reach * math.sin(angle)))
    return points


def _jitter(rgb: Colour, rng: random.Random, amount: int) -> Colour:
    r, g, b = (min(255, max(0, c + rng.randint(-amount, amount))) for c in rgb)
    return r, g, b


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.load_default(size=size)
