"""The language of arms: every word, what it sets, and what is refused with a list of all there are."""

import pytest
import torch

from stabilitykit.observe.arm import Arm

WORDS = {
    "same": {},
    "float32": {"dtype": torch.float32, "autocast": False, "scaled": False},
    "float64": {"dtype": torch.float64, "autocast": False, "scaled": False},
    "bfloat16": {"autocast": torch.bfloat16, "scaled": False},
    "float16": {"autocast": torch.float16, "scaled": True},
    "float16=unscaled": {"autocast": torch.float16, "scaled": False},
    "jitter": {"jitter": "ulp"},
    "jitter=1e-6": {"jitter": 1e-6},
    "seed=3": {"seed": 3},
    "eager": {"eager": True},
    "exact_attention": {"attention": "exact"},
    "attention=flash": {"attention": "flash"},
    "attention=emulated(state_dtype=bfloat16,tile_k=64,variant=fa1)": {
        "attention": "emulated(state_dtype=bfloat16,tile_k=64,variant=fa1)"
    },
    "attention=torch.nn.functional:scaled_dot_product_attention": {
        "attention": "torch.nn.functional:scaled_dot_product_attention"
    },
    "skip=120": {"skip": ((120, 120),)},
    "skip=120-125": {"skip": ((120, 125),)},
    "lr*0.5": {"lr": 0.5},
    "lr*0": {"lr": 0.0},
    "lr_hold": {"lr_held": True},
    "clip=1e+2": {"clip": 100.0},
    "update_rms_clip": {"rms_clip": True},
    "beta2=0.95": {"beta2": 0.95},
}


@pytest.mark.parametrize("text", WORDS)
def test_each_word_sets_its_own_respect(text):
    assert Arm.parse(text) == Arm(text, **WORDS[text])


def test_words_combine_in_any_order_and_skips_add_up():
    arm = Arm.parse("skip=9 + lr*1e+1 + float16+skip=3-4+attention=emulated(tile_k=8,probs_dtype=7)+clip=2")
    assert (arm.lr, arm.clip, arm.scaled, arm.skip) == (10.0, 2.0, True, ((9, 9), (3, 4)))
    assert [step for step in range(12) if arm.skips(step)] == [3, 4, 9]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("momentum=1", "got 'momentum=1'"),
        ("lr=0.5", "got 'lr=0.5'"),
        ("lr*0.5*2", "got 'lr*0.5*2'"),
        ("clip", "got 'clip'"),
        ("float32+", "got 'float32+'"),
        ("same+same", "got 'same+same'"),
        ("float32x", "got 'float32x'"),
        ("lr*0.5+lr*2", "got two for lr in"),
        ("exact_attention+attention=math", "got two for attention in"),
        ("float16+bfloat16", "got two for autocast in"),
        ("float16+float16=unscaled", "got two for autocast in"),
    ],
)
def test_unknown_and_contradictory_words_list_what_exists(text, words):
    with pytest.raises(ValueError, match="expected") as caught:
        Arm.parse(text)
    told = str(caught.value)
    assert words in told
    assert "\n" not in told
    for known in (
        "float16=unscaled",
        "exact_attention",
        "lr*FACTOR",
        "update_rms_clip",
        "emulated(",
        "skip=",
    ):
        assert known in told


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr*1", "finite factor >= 0 that is not 1, got 'lr\\*1'"),
        ("lr*-1", "finite factor >= 0"),
        ("lr*inf", "finite factor >= 0"),
        ("clip=0", "finite norm > 0"),
        ("beta2=1", r"decay rate in \[0, 1\)"),
        ("skip=5-3", "expected skip=STEP or skip=FIRST-LAST"),
        ("skip=-1", "expected skip=STEP"),
        ("float16=scaled", "float16=unscaled, without loss scaling, got 'float16=scaled'"),
        ("attention=fast", r"attention=exact\|plain\|math\|flash.*got attention=fast"),
        ("attention=emulated(tile=4)", "of accumulator_dtype, beta, .*got 'emulated\\(tile=4\\)'"),
        ("attention=emulated(tile_k=0)", "tile_k must be an int >= 1, got 0"),
        ("attention=emulated(state_dtype=float7)", "got 'float7'"),
        (
            "attention=nowhere:kernel",
            "expected attention= to name what can be imported, got 'nowhere:kernel'",
        ),
        ("attention=math:pi", "expected attention= to name a function, got float"),
    ],
)
def test_values_out_of_their_range_are_named(text, words):
    with pytest.raises(ValueError, match=words):
        Arm.parse(text)
