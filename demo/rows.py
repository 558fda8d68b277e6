"""Training rows: many independent question/answer segments behind one shared beginning.

A block mask lets each segment see the shared prefix and itself only, and the M-RoPE positions
restart after the prefix. So a row is numerically the same as that many separate chats about the
same pictures, at a fraction of their cost.

Shapes: B rows, L tokens of a row, P patches, V image tokens of all pictures of a batch.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedTokenizerBase

from demo.questions import Question, about_number, about_pair, about_shapes
from demo.scenes import (
    FEW_COUNTS,
    USUAL_COUNTS,
    Scene,
    random_number_scene,
    random_shapes_scene,
    render,
)
from demo.small_talk import without_picture
from demo.tokenizer import IMAGE, IMAGE_TEXT
from demo.vision import MERGE, patchify, token_labels

MAX_SEGMENTS = 12
MAX_TOKENS = 320
"""Segments that would make a row longer are left out: attention's cost grows with the square."""
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful vision assistant.",
    "Answer the question in one short sentence.",
    "Please be brief.",
)
PAIR_COUNTS = (0.03, 0.45, 0.4, 0.12)
# Kinds that are learned early are asked less often. (Chance to keep a question; otherwise 1.)
KEEP = {
    "background": 0.25,
    "pair_background": 0.25,
    "count_all": 0.35,
    "number_colour": 0.7,
    "exist": 0.5,
    "colour": 0.6,
    "size": 0.6,
    "side": 0.6,
    "which": 0.6,
    "shapes": 0.7,
}
NOT_TRAINED = -100
PADDING_SEGMENT = -1
"""Segment number of padding; 0 is the prefix, 1 and up are the segments."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One exchange: the model reads `prompt` and is trained to write `answer`."""

    kind: str
    prompt: str
    answer: str


@dataclass(frozen=True, slots=True)
class Row:
    scenes: tuple[Scene, ...]
    """Shown by every run of image markers, in the prefix or once in each segment."""
    prefix: str
    segments: list[list[Turn]]


@dataclass(slots=True)
class EncodedRow:
    patches: list[npt.NDArray[np.float32]] = field(default_factory=list)
    grids: list[tuple[int, int]] = field(default_factory=list)
    labels: list[npt.NDArray[np.int64]] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    segment: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    """The token itself where it is trained, else `NOT_TRAINED`."""
    position: list[tuple[int, int, int]] = field(default_factory=list)
    visual: list[int] = field(default_factory=list)
    """Row of the picture features that each image token shows, counted within this row."""
    answers: list[tuple[str, int, int]] = field(default_factory=list)
    """(kind of question, first token, end)."""


@dataclass(frozen=True, slots=True)
class Batch:
    ids_BL: torch.Tensor
    target_BL: torch.Tensor
    """Position t holds the token that follows t, or `NOT_TRAINED`."""
    position_3BL: torch.Tensor
    mask_B1LL: torch.Tensor
    patches: torch.Tensor | None
    grids: torch.Tensor | None
    labels: torch.Tensor | None
    visual: torch.Tensor
    answers: list[list[tuple[str, int, int]]]


# --- inventing rows


def random_row(rng: random.Random, easy: float = 0.0) -> Row:
    """`easy` is the chance that a picture has few shapes: the first lessons."""
    system = ""
    if rng.random() < 0.15:
        system = f"<|im_start|>system\n{rng.choice(SYSTEM_PROMPTS)}<|im_end|>\n"
    scenes, questions = pictures_and_questions(rng, rng.random() < easy)
    questions = [_casual(q, rng) for q in questions if rng.random() < KEEP.get(q.kind, 1.0)]
    if not scenes:
        return Row((), system, [[_turn(q)] for q in questions])
    rng.shuffle(questions)
    images = IMAGE_TEXT * len(scenes)
    manner = rng.random()
    if manner < 0.14:
        return Row(scenes, system, [_conversation(questions[:4], images, rng)])
    questions = questions[:MAX_SEGMENTS]
    if manner < 0.29:  # as many clients do it: the text first, then the pictures
        return Row(scenes, system, [[_turn(q, after=images)] for q in questions])
    prefix = f"{system}<|im_start|>user\n{images}"
    return Row(scenes, prefix, [[_turn(q, header=False)] for q in questions])


def pictures_and_questions(
    rng: random.Random, few: bool = False
) -> tuple[tuple[Scene, ...], list[Question]]:
    """No, one or two pictures and everything that is asked about them."""
    subject = rng.random()
    if subject < 0.05:
        return (), [without_picture(rng) for _ in range(MAX_SEGMENTS)]
    if subject < 0.38:
        counts = FEW_COUNTS if few else PAIR_COUNTS
        first, second = (_either_scene(rng, counts) for _ in range(2))
        return (first, second), about_pair(first, second, rng)
    if subject < 0.58:
        scene = random_number_scene(rng)
        return (scene,), about_number(scene, rng)
    scene = random_shapes_scene(rng, FEW_COUNTS if few else USUAL_COUNTS)
    return (scene,), about_shapes(scene, rng)


def _either_scene(rng: random.Random, counts: tuple[float, ...]) -> Scene:
    return random_number_scene(rng) if rng.random() < 0.35 else random_shapes_scene(rng, counts)


def _casual(question: Question, rng: random.Random) -> Question:
    """Sometimes as people type: no capital, no mark at the end."""
    if rng.random() > 0.1:
        return question
    text = question.text[0].lower() + question.text[1:].rstrip("?.")
    return replace(question, text=text)


def _turn(question: Question, before: str = "", after: str = "", header: bool = True) -> Turn:
    start = "<|im_start|>user\n" if header else ""
    prompt = f"{start}{before}{question.text}{after}<|im_end|>\n<|im_start|>assistant\n"
    return Turn(question.kind, prompt, question.answer + "<|im_end|>")


def _conversation(questions: list[Question], images: str, rng: random.Random) -> list[Turn]:
    """Several exchanges; the pictures come with the first question, or after some small talk."""
    turns = [_turn(without_picture(rng))] if rng.random() < 0.3 else []
    for i, question in enumerate(questions):
        turns.append(_turn(question, before=images if i == 0 else ""))
    return turns[:1] + [replace(t, prompt="\n" + t.prompt) for t in turns[1:]]


# --- encoding


class RowEncoder:
    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._image = tokenizer.convert_tokens_to_ids(IMAGE)
        self._cache: dict[str, list[int]] = {}

    def __call__(self, row: Row) -> EncodedRow:
        out = EncodedRow()
        for scene in row.scenes:
            patches, height, width = patchify(render(scene))
            out.patches.append(patches)
            out.grids.append((height, width))
            out.labels.append(token_labels(scene, height, width))
        start = self._put(out, row.prefix, 0, 0, _image_cells(out.grids))
        for number, turns in enumerate(row.segments, 1):
            if number > 1 and len(out.ids) + self._length(turns, out) > MAX_TOKENS:
                break
            position, cells = start, _image_cells(out.grids)
            for turn in turns:
                position = self._put(out, turn.prompt, number, position, cells)
                first = len(out.ids)
                position = self._put(out, turn.answer, number, position, cells, trained=True)
                out.answers.append((turn.kind, first, len(out.ids)))
        return out

    def _length(self, turns: list[Turn], out: EncodedRow) -> int:
        texts = [text for turn in turns for text in (turn.prompt, turn.answer)]
        pictures = sum(len(x) for x in out.labels) if any(IMAGE in t for t in texts) else 0
        return sum(len(self._tokens(t)) for t in texts) + pictures

    def _put(
        self,
        out: EncodedRow,
        text: str,
        segment: int,
        position: int,
        cells: Iterator[tuple[int, int, int]],
        trained: bool = False,
    ) -> int:
        """Append `text`; -> the position after it. A picture takes as many as its longer side."""
        for token in self._tokens(text):
            if token == self._image:
                position = _put_image(out, token, segment, position, *next(cells))
                continue
            out.ids.append(token)
            out.segment.append(segment)
            out.target.append(token if trained else NOT_TRAINED)
            out.position.append((position,) * 3)
            position += 1
        return position

    def _tokens(self, text: str) -> list[int]:
        if text not in self._cache:
            if len(self._cache) > 50_000:
                self._cache.clear()
            self._cache[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cache[text]


def _image_cells(grids: list[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """(first feature row, rows, columns) of each picture, in image tokens."""
    first = 0
    for height, width in grids:
        rows, columns = height // MERGE, width // MERGE
        yield first, rows, columns
        first += rows * columns


def _put_image(
    out: EncodedRow, token: int, segment: int, position: int, first: int, rows: int, columns: int
) -> int:
    count = rows * columns
    out.ids += [token] * count
    out.segment += [segment] * count
    out.target += [NOT_TRAINED] * count
    out.visual += range(first, first + count)
    out.position += [
        (position, position + y, position + x) for y in range(rows) for x in range(columns)
    ]
    return position + max(rows, columns)


# --- batches


def collate(rows: list[EncodedRow], pad: int) -> Batch:
    length = -(-max(len(r.ids) for r in rows) // 16) * 16
    shape = (len(rows), length)
    ids, segment = np.full(shape, pad, np.int64), np.full(shape, PADDING_SEGMENT, np.int64)
    target, position = np.full(shape, NOT_TRAINED, np.int64), np.zeros((3, *shape), np.int64)
    for b, row in enumerate(rows):
        n = len(row.ids)
        ids[b, :n], segment[b, :n] = row.ids, row.segment
        target[b, : n - 1] = row.target[1:]
        position[:, b, :n] = np.array(row.position).T
    has_pictures = any(r.patches for r in rows)
    return Batch(
        ids_BL=torch.from_numpy(ids),
        target_BL=torch.from_numpy(target),
        position_3BL=torch.from_numpy(position),
        mask_B1LL=_block_mask(torch.from_numpy(segment)),
        patches=_concatenate([p for r in rows for p in r.patches]) if has_pictures else None,
        grids=torch.tensor([(1, *g) for r in rows for g in r.grids]) if has_pictures else None,
        labels=_concatenate([x for r in rows for x in r.labels]) if has_pictures else None,
        visual=_visual_index(rows),
        answers=[r.answers for r in rows],
    )


def _block_mask(segment_BL: torch.Tensor) -> torch.Tensor:
    length = segment_BL.shape[1]
    query, key = segment_BL[:, :, None], segment_BL[:, None, :]
    causal = torch.ones(length, length, dtype=torch.bool).tril()
    return (((query == key) | (key == 0)) & causal)[:, None]


def _concatenate(arrays: list[npt.NDArray[np.generic]]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def _visual_index(rows: list[EncodedRow]) -> torch.Tensor:
    index: list[int] = []
    first = 0
    for row in rows:
        index += [first + v for v in row.visual]
        first += sum(len(x) for x in row.labels)
    return torch.tensor(index, dtype=torch.long)
