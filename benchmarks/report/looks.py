"""How methods look: each has a colour, a marker, dashes and a hatch of its own, the same in all pictures.

Colours are those of M. Okabe and K. Ito (Color Universal Design, 2008) and, for the rest, of P. Tol (Colour Schemes,
2021, "muted"), which the colour-blind can tell apart. Markers, dashes and hatches tell the same without any colour.
"""

from collections.abc import Iterable, Mapping
from itertools import cycle
from typing import Any, NamedTuple


class Look(NamedTuple):
    colour: str
    marker: str
    hatch: str
    dashes: tuple[float, ...] = ()
    """Lengths of dashes and gaps in turns; none is a solid line."""

    @property
    def line(self) -> dict[str, Any]:
        """Arguments of matplotlib's lines."""
        return {"color": self.colour, "marker": self.marker, "linestyle": (0.0, self.dashes)}

    @property
    def bar(self) -> dict[str, Any]:
        """Arguments of matplotlib's bars."""
        return {"facecolor": self.colour, "hatch": self.hatch, "edgecolor": "white"}


DDP = Look("#4d4d4d", "o", "")
LOOKS: Mapping[str, Look] = {
    "ddp": DDP,
    "each step": DDP,  # which is what it is, beside trainings that synchronise less often
    "fastsync.register_comm_hook/none": Look("#E69F00", "s", "///", (5, 1.5)),
    "fastsync.attach/none": Look("#0072B2", "D", "...", (1.5, 1)),
    "fastsync.attach/fp16": Look("#009E73", "^", "\\\\\\", (5, 1.5, 1, 1.5)),
    "fastsync.attach/bf16": Look("#56B4E9", "v", "|||", (9, 2)),
    "fastsync.attach/int8+ef": Look("#D55E00", "P", "xxx", (3, 1, 1, 1)),
    "fastsync.attach/int8": Look("#CC79A7", "X", "+++", (7, 1.5, 3, 1.5)),
}
OTHERS = (
    Look("#332288", "<", "--", (2, 2)),
    Look("#88CCEE", ">", "oo"),
    Look("#44AA99", "*", "//", (6, 2)),
    Look("#882255", "h", "\\\\", (1, 1)),
    Look("#DDCC77", "p", "xx"),
    Look("#117733", "d", "++", (4, 1, 1, 1)),
    Look("#CC6677", "8", "||", (8, 3)),
    Look("#999933", "H", "**", (3, 3)),
)
"""Of methods that have none in ``LOOKS``, in the order in which a picture shows them."""


def looks(methods: Iterable[str]) -> dict[str, Look]:
    """The look of each of the methods that a picture shows."""
    others = cycle(OTHERS)
    return {method: LOOKS.get(method) or next(others) for method in dict.fromkeys(methods)}
