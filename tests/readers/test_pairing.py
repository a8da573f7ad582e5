from pathlib import Path

import pytest
import torch

from stabilitykit.readers.checkpoints import Checkpoint, Entry
from stabilitykit.readers.pairing import paired


def checkpoint(*names, path="x"):
    """A tensor of one number per name."""

    def entry(name):
        return Entry((1,), "float32", name, lambda: torch.ones(1))

    return Checkpoint(Path(path), {name: entry(name) for name in names})


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (["h.w", "h.b"], ["model.h.w", "model.h.b"]),
        (["h.w", "h.b"], ["module._orig_mod.h.w", "module._orig_mod.h.b"]),
        (["h._orig_mod.w", "h.b"], ["model.h.w", "model.h.b"]),
        (["h._fsdp_wrapped_module.w"], ["state_dict.model.h.w"]),
        # A head beside the model, as in Llama, under a LightningModule's own `model`.
        (["model.embed.w", "lm_head.w"], ["model.model.embed.w", "model.lm_head.w"]),
    ],
)
def test_prefixes_are_taken_off_until_names_agree(ours, theirs):
    for one, other in ((ours, theirs), (theirs, ours)):
        pairs, notes = paired(checkpoint(*one), checkpoint(*other))
        assert len(pairs) == len(ours)
        assert notes == []


def test_names_that_agree_stay_as_they_are():
    assert list(paired(checkpoint("model.w"), checkpoint("model.w"))[0]) == ["model.w"]


def test_prefixes_that_would_make_two_names_one_stay():
    names = ["model.w", "w"]
    assert list(paired(checkpoint(*names), checkpoint(*names))[0]) == names
    with pytest.raises(ValueError, match=r"only in x: model.w"):
        paired(checkpoint(*names), checkpoint("w"))


def test_many_names_are_counted():
    names = [f"w{i}" for i in range(9)]
    with pytest.raises(ValueError, match=r"only in a: w1, w2, w3, w4, w5 and 3 more;"):
        paired(checkpoint(*names, path="a"), checkpoint("w0", path="b"))
