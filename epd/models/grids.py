"""Whether the grids of a request's images are those of its placeholders.

transformers takes one grid for each run of neighbouring placeholders, in order, and looks
only at whether all of them together are of the right number of rows. Grids that changed
places would give wrong position rows, and a right-looking answer; a huge one would be
written out before it is compared with anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import prod

from epd.errors import invalid
from epd.jobs import ImageItem


def check_grids(marks: Sequence[bool], items: Sequence[ImageItem], merge: int) -> None:
    """`marks`: which tokens of the prompt are placeholders. `merge`: vision patches along
    either side of what one row stands for.

    Raises:
        EpdError: an image's grid (t, h, w), in patches, is not of its rows, or its
            placeholders are not one run of their own.
    """
    for item in items:
        whole = len(item.grid) == 3 and not any(size % merge for size in item.grid[1:])
        if not whole or prod(item.grid) != item.rows * merge**2:
            reason = f"the grid {item.grid} of image {item.index} is not of {item.rows} rows"
            raise invalid(reason, "items")
    runs = [sum(1 for _ in run) for marked, run in groupby(marks) if marked]
    rows = [item.rows for item in items]
    if runs != rows:
        raise invalid(f"images of {rows} rows, and placeholders in runs of {runs}", "items")
