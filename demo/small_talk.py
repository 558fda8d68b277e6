"""What is said without a picture: small talk, sums, copying, and questions that need one."""

import random

from demo.questions import BACKGROUND, COUNT_ALL, DESCRIBE, LIST_SHAPES, Question, plural
from demo.scenes import KINDS

ABOUT = (
    "I am a tiny demo model. I can describe a few simple shapes, their colours "
    "and large one or two digit numbers in pictures."
)
ABOUT_QUESTIONS = (
    "What can you do?",
    "Who are you?",
    "What are you?",
    "Help",
    "What can you do for me?",
)
GREETINGS = ("Hello", "Hello!", "Hi", "Hi!", "Hello there.")
NEEDS_IMAGE = "I need an image to answer that."
# The words that the model learns to repeat.
WORDS = (
    "cat",
    "dog",
    "sun",
    "moon",
    "tree",
    "river",
    "cloud",
    "stone",
    "bird",
    "fish",
    "green",
    "blue",
    "red",
    "small",
    "large",
    "open",
    "door",
    "window",
    "table",
    "chair",
    "hello",
    "world",
    "paper",
    "music",
    "light",
    "water",
    "fire",
    "wind",
    "snow",
    "rain",
)


def without_picture(rng: random.Random) -> Question:
    ask = rng.choices((_small_talk, _arithmetic, _copy, _count_to, _needs_image), (3, 6, 5, 3, 3))[
        0
    ]
    return ask(rng)


def _small_talk(rng: random.Random) -> Question:
    choices = (
        (ABOUT_QUESTIONS, ABOUT),
        (GREETINGS, "Hello! Show me an image and ask me about it."),
        (("Thank you.", "Thanks!"), "You are welcome."),
    )
    texts, answer = rng.choices(choices, (3, 2, 1))[0]
    return Question("about", rng.choice(texts), answer)


def _arithmetic(rng: random.Random) -> Question:
    if rng.random() < 0.6:
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        sum_, value = f"{a} + {b}", a + b
    else:
        a = rng.randint(0, 18)
        b = rng.randint(max(0, a - 9), min(9, a))
        sum_, value = f"{a} - {b}", a - b
    text = rng.choice(("What is {}?", "{} =", "Compute {}.")).format(sum_)
    return Question("arithmetic", text, f"{sum_} = {value}")


def _copy(rng: random.Random) -> Question:
    words = " ".join(rng.choice(WORDS) for _ in range(rng.randint(1, 5)))
    text = rng.choice(("Repeat: {}", "Say: {}", "Repeat after me: {}")).format(words)
    return Question("copy", text, words)


def _count_to(rng: random.Random) -> Question:
    n = rng.randint(2, 20)
    text = rng.choice((f"Count to {n}.", f"Count from 1 to {n}."))
    return Question("count_to", text, " ".join(str(i) for i in range(1, n + 1)))


def _needs_image(rng: random.Random) -> Question:
    kind = rng.choice(KINDS)
    texts = (
        *DESCRIBE,
        *LIST_SHAPES,
        *BACKGROUND,
        *COUNT_ALL,
        "Read the number.",
        f"What colour is the {kind}?",
        f"How many {plural(kind)} are there?",
        f"Is there a {kind}?",
        "Compare the images.",
        f"Where is the {kind}?",
    )
    return Question("no_image", rng.choice(texts), NEEDS_IMAGE)
