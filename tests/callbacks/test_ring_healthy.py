"""Healthy rings of every layout, format and size stay within the catalog's limits, sharp softmax included.

The worst numbers, from which the limits are, of six seeds: python tests/callbacks/test_ring_healthy.py
"""

import itertools
from functools import partial

import pytest
import torch

from ranks import Ranks, ranks
from ring_cases import shards
from stabilitykit.catalog import CATALOG
from stabilitykit.parallel.call import watched
from stabilitykit.parallel.layout import LAYOUTS
from stabilitykit.parallel.measured import measured
from stabilitykit.parallel.ring import ring_attention

DTYPES = ("float32", "bfloat16", "float16")
WORLDS = (1, 2, 3, 4)
JUDGED = [key.removeprefix("ring/") for key in CATALOG if key.startswith("ring/") and CATALOG[key].threshold]
KINDS = ({}, {"h_kv": 1}, {"window": (17, 0)}, {"mean": 2.0})


def worst_of(rank, world, *, dtype, seeds):
    """A case of tests/ranks.py: of each judged number the largest over layouts, input scales and kinds."""
    largest = dict.fromkeys(JUDGED, (0.0, ""))
    for layout, sd, seed, kind in itertools.product(LAYOUTS, (0.1, 1.0, 3.0, 8.0), range(seeds), KINDS):
        draw = {"n": 96, "d": 16, "h_kv": kind.get("h_kv"), "dtype": getattr(torch, dtype)}
        (q, k, v), grad = shards(rank, world, layout, {**draw, "sd": sd, "seed": seed})
        mean = kind.get("mean", 0.0)  # of values and gradients, as in any trained model
        qkv, found = (q, k, (v.detach() + mean).requires_grad_()), []
        watch = partial(measured, rows=8, seed=str(seed))
        with watched(lambda call, watch=watch, found=found: found.append(watch(call))):
            out = ring_attention(*qkv, layout=layout, window=kind.get("window"))
            torch.autograd.grad(out, qkv, grad + mean / 2)
        for name in JUDGED:
            for row in (found[0], *found[0]["heads"]):
                value = row.get(name, 0.0)
                if not value <= largest[name][0]:  # NaN too
                    largest[name] = (value, f"{layout}, {world} ranks, sd {sd}, seed {seed}, {kind}")
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("world", WORLDS)
def test_no_healthy_number_is_over_its_limit(world, dtype):
    for found in ranks(world).run(worst_of, dtype=dtype, seeds=1):
        for name, (value, where) in found.items():
            assert value < CATALOG[f"ring/{name}"].limit(dtype), (name, where)


if __name__ == "__main__":
    for dtype in DTYPES:
        for world in WORLDS:
            running = Ranks(world)
            every = running.run(worst_of, dtype=dtype, seeds=6)
            running.close()
            told = {name: max(found[name] for found in every) for name in JUDGED}
            print(dtype, world, *(f"{name} {value:.2g} ({where});" for name, (value, where) in told.items()))
