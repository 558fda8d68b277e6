"""Questions about scenes with their exact answers, in one fixed manner of speaking.

Every kind of question has a name; accuracy is measured and reported per kind. Answers are whole
sentences in a canonical order (reading order of the cells), so that "right" can mean "equal".
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from demo.scenes import CELLS, COLOURS, KINDS, Scene, Shape


@dataclass(frozen=True, slots=True)
class Question:
    kind: str
    text: str
    answer: str


NUMBER_WORDS = ("zero", "one", "two", "three", "four", "five", "six")

DESCRIBE = (
    "Describe the image.",
    "Describe this image.",
    "What do you see?",
    "What is in the image?",
    "What is in this image?",
    "Describe the picture.",
    "What is in this picture?",
    "Please describe the image.",
)
BACKGROUND = (
    "What colour is the background?",
    "What color is the background?",
    "What is the background colour?",
    "What is the background color?",
)
LIST_SHAPES = (
    "What shapes are in the image?",
    "Which shapes are in the image?",
    "What shapes do you see?",
    "Which shapes are there?",
    "List the shapes.",
)
COUNT_ALL = (
    "How many shapes are there?",
    "How many shapes are in the image?",
    "Count the shapes.",
)
READ = (
    "Read the number.",
    "What number is shown?",
    "What does the image say?",
    "What is written?",
    "Which number is it?",
)
COMPARE = (
    "Compare the images.",
    "Compare the two images.",
    "What is different?",
    "How do the images differ?",
)

# --- saying things


def plural(noun: str) -> str:
    return noun + ("es" if noun.endswith("s") else "s")


def with_article(noun: str) -> str:
    return ("an " if noun[0] in "aeio" else "a ") + noun


def join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


def capitalised(sentence: str) -> str:
    return sentence[0].upper() + sentence[1:]


def name(shape: Shape, size: bool = True) -> str:
    return f"{shape.size} {shape.colour} {shape.kind}" if size else f"{shape.colour} {shape.kind}"


def contents(scene: Scene, size: bool = True) -> str:
    if scene.number:
        return "the number " + scene.number
    if not scene.shapes:
        return "nothing"
    return join([with_article(name(s, size)) for s in scene.shapes])


def description(scene: Scene) -> str:
    background = with_article(scene.background) + " background"
    if scene.number:
        return f"The number {scene.number} in {scene.ink} on {background}."
    return capitalised(f"{contents(scene)} on {background}.")


def there_are(count: int, noun: str) -> str:
    if count == 0:
        return f"There are no {plural(noun)}."
    if count == 1:
        return f"There is one {noun}."
    return f"There are {NUMBER_WORDS[count]} {plural(noun)}."


def _colour_word(rng: random.Random) -> str:
    return rng.choice(("colour", "color"))


# --- one picture of shapes


def about_shapes(scene: Scene, rng: random.Random) -> list[Question]:
    out = _overview(scene, rng)
    out += _counts(scene, rng)
    out += _existence(scene, rng)
    for shape in _unambiguous(scene, rng)[:2]:
        out += _attributes(shape, rng)
        out += _position(shape, rng)
        out += _relation(scene, shape, rng)
    out += _by_colour(scene, rng)
    out += _absent(scene, rng)
    return out


def _overview(scene: Scene, rng: random.Random) -> list[Question]:
    shapes = contents(scene, size=False) if scene.shapes else "no shapes"
    return [
        Question("describe", rng.choice(DESCRIBE), description(scene)),
        Question("background", rng.choice(BACKGROUND), f"The background is {scene.background}."),
        Question("shapes", rng.choice(LIST_SHAPES), f"The image has {shapes}."),
    ]


def _counts(scene: Scene, rng: random.Random) -> list[Question]:
    count = len(scene.shapes)
    out = [Question("count_all", rng.choice(COUNT_ALL), there_are(count, "shape"))]
    for _ in range(2):
        kind = _some_kind(scene, rng, present=0.7)
        these = plural(kind)
        texts = (
            f"How many {these} are there?",
            f"How many {these} are in the image?",
            f"How many {these} do you see?",
            f"Count the {these}.",
        )
        answer = there_are(len(scene.of_kind(kind)), kind)
        out.append(Question("count_kind", rng.choice(texts), answer))
    return out


def _existence(scene: Scene, rng: random.Random) -> list[Question]:
    def ask(kind_of_question: str, noun: str, there: bool) -> Question:
        text = rng.choice(("Is there a {}?", "Is there a {} in the image?", "Do you see a {}?"))
        text = text.format(noun).replace(" a orange", " an orange")
        if there:
            return Question(kind_of_question, text, f"Yes, there is {with_article(noun)}.")
        return Question(kind_of_question, text, f"No, there is no {noun}.")

    kind = _some_kind(scene, rng, present=0.5)
    out = [ask("exist", kind, bool(scene.of_kind(kind)))]
    kind = _some_kind(scene, rng, present=0.9)
    colours = [s.colour for s in scene.of_kind(kind)]
    colour = rng.choice(colours if colours and rng.random() < 0.5 else list(COLOURS))
    out.append(ask("exist_coloured", f"{colour} {kind}", colour in colours))
    return out


def _attributes(shape: Shape, rng: random.Random) -> list[Question]:
    kind, colour = shape.kind, _colour_word(rng)
    colour_texts = (
        f"What {colour} is the {kind}?",
        f"Which {colour} is the {kind}?",
        f"What is the {colour} of the {kind}?",
    )
    size_texts = (
        f"Is the {kind} large or small?",
        f"What size is the {kind}?",
        f"How big is the {kind}?",
    )
    return [
        Question("colour", rng.choice(colour_texts), f"The {kind} is {shape.colour}."),
        Question("size", rng.choice(size_texts), f"The {kind} is {shape.size}."),
    ]


def _position(shape: Shape, rng: random.Random) -> list[Question]:
    kind = shape.kind
    where = (f"Where is the {kind}?", f"Where in the image is the {kind}?")
    if rng.random() < 0.5:
        side = f"Is the {kind} on the left or on the right?"
        half = f"The {kind} is on the {('left', 'right')[shape.column]}."
    else:
        side = f"Is the {kind} at the top or at the bottom?"
        half = f"The {kind} is at the {('top', 'bottom')[shape.row]}."
    return [
        Question("where", rng.choice(where), f"The {kind} is at the {CELLS[shape.cell]}."),
        Question("side", side, half),
    ]


RELATIONS: dict[str, Callable[[Shape, Shape], bool]] = {
    "left of": lambda other, shape: other.column < shape.column,
    "right of": lambda other, shape: other.column > shape.column,
    "above": lambda other, shape: other.row < shape.row,
    "below": lambda other, shape: other.row > shape.row,
}


def _relation(scene: Scene, shape: Shape, rng: random.Random) -> list[Question]:
    """One question with at most one shape as its answer, sometimes with none."""
    if len(scene.shapes) < 2:
        return []
    found = {
        relation: [o for o in scene.shapes if o is not shape and test(o, shape)]
        for relation, test in RELATIONS.items()
    }
    clear = {r: hits for r, hits in found.items() if len(hits) <= 1}
    if rng.random() < 0.75:
        clear = {r: hits for r, hits in clear.items() if hits} or clear
    if not clear:
        return []
    relation = rng.choice(list(clear))
    hits = clear[relation]
    answer = capitalised(with_article(name(hits[0], size=False))) if hits else "Nothing"
    text = rng.choice(("What is {} the {}?", "Which shape is {} the {}?"))
    place = f"{relation} the {shape.kind}"
    return [Question("relation", text.format(relation, shape.kind), f"{answer} is {place}.")]


def _by_colour(scene: Scene, rng: random.Random) -> list[Question]:
    colours = [s.colour for s in scene.shapes]
    single = [s for s in scene.shapes if colours.count(s.colour) == 1]
    if single and rng.random() < 0.85:
        shape = rng.choice(single)
        text = rng.choice((f"Which shape is {shape.colour}?", f"What is {shape.colour}?"))
        return [Question("which", text, f"The {shape.kind} is {shape.colour}.")]
    colour = rng.choice([c for c in COLOURS if c not in colours])
    return [Question("which", f"Which shape is {colour}?", f"No shape is {colour}.")]


def _absent(scene: Scene, rng: random.Random) -> list[Question]:
    """A question about what isn't there, answered by saying so."""
    missing = [k for k in KINDS if not scene.of_kind(k)]
    if not scene.number and (not missing or rng.random() < 0.25):
        return [Question("absent", rng.choice(READ), "There is no number.")]
    kind = rng.choice(missing)
    texts = (
        f"What {_colour_word(rng)} is the {kind}?",
        f"Is the {kind} large or small?",
        f"Where is the {kind}?",
    )
    return [Question("absent", rng.choice(texts), f"There is no {kind}.")]


def _some_kind(scene: Scene, rng: random.Random, present: float) -> str:
    """A kind that is in the picture with at least this chance, if any is."""
    there = [k for k in KINDS if scene.of_kind(k)]
    return rng.choice(there if there and rng.random() < present else KINDS)


def _unambiguous(scene: Scene, rng: random.Random) -> list[Shape]:
    """Shapes that "the circle" names without doubt, in random order."""
    shapes = [s for s in scene.shapes if len(scene.of_kind(s.kind)) == 1]
    rng.shuffle(shapes)
    return shapes


# --- one picture of a number


def about_number(scene: Scene, rng: random.Random) -> list[Question]:
    out = [Question("read", q, f"The number is {scene.number}.") for q in rng.sample(READ, 2)]
    colour = f"What {_colour_word(rng)} is the number?"
    out += [
        Question("number_colour", colour, f"The number is {scene.ink}."),
        Question("background", rng.choice(BACKGROUND), f"The background is {scene.background}."),
        Question("describe_number", rng.choice(DESCRIBE), description(scene)),
    ]
    if rng.random() < 0.4:
        out += _absent(scene, rng)
    if rng.random() < 0.2:
        out.append(Question("count_all", rng.choice(COUNT_ALL), there_are(0, "shape")))
    return out


# --- two pictures


def about_pair(first: Scene, second: Scene, rng: random.Random) -> list[Question]:
    out = _which_has_more(first, second, rng)
    if max(len(first.shapes), len(second.shapes)) <= 2:
        answer = (
            f"The first image has {contents(first, size=False)}. "
            f"The second image has {contents(second, size=False)}."
        )
        out.append(Question("pair_compare", rng.choice(COMPARE), answer))
    for which, scene in (("first", first), ("second", second)):
        describe = rng.choice((f"Describe the {which} image.", f"What is in the {which} image?"))
        out.append(Question("pair_describe", describe, description(scene)))
        background = f"What {_colour_word(rng)} is the background of the {which} image?"
        answer = f"The background is {scene.background}."
        out.append(Question("pair_background", background, answer))
        if scene.number:
            read = f"Read the number in the {which} image."
            out.append(Question("pair_read", read, f"The number is {scene.number}."))
    return out


def _which_has_more(first: Scene, second: Scene, rng: random.Random) -> list[Question]:
    def ask(what: str, a: int, b: int) -> Question:
        text = rng.choice(("Which image has more {}?", "Which picture has more {}?"))
        if a == b:
            return Question(
                "pair_more", text.format(what), f"Both images have the same number of {what}."
            )
        which = "first" if a > b else "second"
        return Question("pair_more", text.format(what), f"The {which} image has more {what}.")

    if first.number or second.number:
        return []
    there = [k for k in KINDS if first.of_kind(k) or second.of_kind(k)] or list(KINDS)
    out = [ask("shapes", len(first.shapes), len(second.shapes))]
    for kind in rng.sample(there, min(2, len(there))):
        out.append(ask(plural(kind), len(first.of_kind(kind)), len(second.of_kind(kind))))
    return out
