"""The speed-ups that Striped Attention's authors printed: their bound and what they observed."""

import csv
from importlib.resources import files
from typing import NamedTuple

from stabilitykit.parallel.speedup import PAPER_MODELS, Published


class Printed(NamedTuple):
    """A row of the tables of arXiv 2311.09431v1: striped over contiguous; the bound as it is printed.

    The observed columns of TPUv3 are the same for 1B and 3B, in the paper too.
    """

    device: str
    model: str
    model_parallel: int
    ranks: int
    tokens: int
    theoretical_max: str
    observed: float

    @property
    def attention_cost(self) -> float:
        """Time of an attention product over that of another: TF32 by bf16 on its A100 (section 3)."""
        return 2.0 if self.device == "A100" else 1.0

    @property
    def published(self) -> Published:
        """As `fit_overhead` takes it."""
        return Published(PAPER_MODELS[self.model], self.tokens, self.ranks, self.observed)


def printed() -> list[Printed]:
    """All 137 rows; the bound does not depend on the model-parallel degree, which leaves 99 of them.

    >>> len(printed()), printed()[0].theoretical_max, printed()[0].observed
    (137, '1.22', 0.94)
    """
    text = (files("stabilitykit.parallel") / "striped_attention_speedups.csv").read_text(encoding="utf-8")
    return [
        Printed(device, model, int(degree), int(ranks), int(tokens), bound, float(observed))
        for device, model, degree, ranks, tokens, bound, observed in list(csv.reader(text.splitlines()))[1:]
    ]
