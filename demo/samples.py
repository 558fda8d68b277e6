"""The sample pictures of the documentation and the tests, and what the model must say about them.

`python -m demo.samples` draws `demo/pictures/*.png` and writes `demo/questions.json` again. The
two circles differ in the fill colour alone: an answer that changes with it was read from pixels.
"""

import json
from pathlib import Path

from demo.scenes import Scene, Shape, render

HERE = Path(__file__).parent
PICTURES = HERE / "pictures"
QUESTIONS = HERE / "questions.json"

SCENES = {
    "red_circle.png": Scene("white", 160, 160, 1, (Shape("circle", "red", "large", 0),)),
    "blue_circle.png": Scene("white", 160, 160, 1, (Shape("circle", "blue", "large", 0),)),
    "three_shapes.png": Scene(
        "black",
        160,
        160,
        2,
        (
            Shape("square", "green", "large", 0),
            Shape("star", "yellow", "small", 1),
            Shape("triangle", "orange", "large", 3),
        ),
    ),
    "two_stars.png": Scene(
        "yellow",
        160,
        128,
        3,
        (Shape("star", "purple", "large", 0), Shape("star", "red", "small", 3)),
    ),
    "number_42.png": Scene("white", 128, 128, 4, number="42", ink="blue"),
}

EXPECTED = [
    (["red_circle.png"], "What colour is the circle?", "The circle is red."),
    (["blue_circle.png"], "What colour is the circle?", "The circle is blue."),
    (["red_circle.png"], "Describe the image.", "A large red circle on a white background."),
    (["blue_circle.png"], "Describe the image.", "A large blue circle on a white background."),
    (["three_shapes.png"], "How many shapes are there?", "There are three shapes."),
    (["three_shapes.png"], "What colour is the star?", "The star is yellow."),
    (["three_shapes.png"], "What colour is the background?", "The background is black."),
    (["three_shapes.png"], "Is the star large or small?", "The star is small."),
    (["two_stars.png"], "How many stars are there?", "There are two stars."),
    (
        ["red_circle.png", "two_stars.png"],
        "What colour is the background of the second image?",
        "The background is yellow.",
    ),
    (["number_42.png"], "Read the number.", "The number is 42."),
    (["red_circle.png"], "Where is the circle?", "The circle is at the top left."),
    (["red_circle.png"], "Is there a blue circle?", "No, there is no blue circle."),
    (
        ["three_shapes.png"],
        "Describe the image.",
        "A large green square, a small yellow star and a large orange triangle "
        "on a black background.",
    ),
    (
        ["three_shapes.png"],
        "What shapes are in the image?",
        "The image has a green square, a yellow star and an orange triangle.",
    ),
    (["three_shapes.png"], "What colour is the circle?", "There is no circle."),
    (
        ["three_shapes.png"],
        "Is the star on the left or on the right?",
        "The star is on the right.",
    ),
    (["number_42.png"], "Describe the image.", "The number 42 in blue on a white background."),
    (
        ["red_circle.png", "blue_circle.png"],
        "Compare the images.",
        "The first image has a red circle. The second image has a blue circle.",
    ),
    (
        ["red_circle.png", "number_42.png"],
        "Read the number in the second image.",
        "The number is 42.",
    ),
]


def main() -> None:
    PICTURES.mkdir(exist_ok=True)
    for name, scene in SCENES.items():
        render(scene).save(PICTURES / name)
    entries = [{"pictures": p, "question": q, "answer": a} for p, q, a in EXPECTED]
    QUESTIONS.write_text(json.dumps(entries, indent=1) + "\n")


if __name__ == "__main__":
    main()
