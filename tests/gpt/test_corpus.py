import sysconfig

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stabilitykit.gpt.corpus import SEPARATOR, Batches, batch, read_corpus, starts

COUNTING = np.arange(1000, dtype=np.uint16)  # token i at place i: windows tell where they come from


def batches(tokens=COUNTING, **changes) -> Batches:
    given_ = {"seed": 3, "batch_size": 4, "context": 10, "vocab_size": 1000}
    return Batches(tokens, **{**given_, **changes})


def equal(a, b) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_the_standard_library_is_ten_megabytes_of_text_and_always_the_same():
    corpus, again = read_corpus(), read_corpus()
    assert corpus.vocab_size == 256
    assert len(corpus.train) + len(corpus.validation) >= 10_000_000
    assert np.array_equal(corpus.train, again.train)
    assert np.array_equal(corpus.validation, again.validation)
    text = bytes(corpus.train)
    assert text.count(SEPARATOR) > 400
    assert b"def main(" in text
    # Real text: nearly all of it ASCII, and far from uniform.
    assert np.mean(corpus.train < 128) > 0.99


def test_a_stripped_library_is_refused(monkeypatch, tmp_path):
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "big.py").write_bytes(b"x" * 2_000_000)
    (tmp_path / "os.py").write_text("x")
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(ValueError, match=r"expected 1,000,000 bytes or more .*, got 1; give a path"):
        read_corpus()


def test_a_text_file_is_its_bytes_mapped(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes("0123456789é".encode())
    corpus = read_corpus(path, validation_fraction=0.25)
    assert bytes(corpus.train) + bytes(corpus.validation) == path.read_bytes()
    assert bytes(corpus.validation) == "9é".encode()
    assert isinstance(corpus.train, np.memmap)
    assert (corpus.name, corpus.vocab_size) == ("a.txt", 256)


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_text("third")
    (tmp_path / "a.txt").write_text("first")
    (tmp_path / "b" / "a.txt").write_text("second")
    (tmp_path / ".hidden").write_text("no")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "x").write_text("no")
    corpus = read_corpus(tmp_path, validation_fraction=0.01)
    assert bytes(corpus.train) == b"first\0second\0third"


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_bin_tokens(tmp_path, dtype):
    tokens = np.arange(100, dtype=dtype) + 60_000
    tokens.tofile(tmp_path / "train.bin")
    tokens[:7].tofile(tmp_path / "val.bin")
    both = read_corpus(tmp_path, vocab_size=65_000, dtype=dtype)
    assert np.array_equal(both.train, tokens)
    assert np.array_equal(both.validation, tokens[:7])
    assert both.train.dtype == dtype
    one = read_corpus(tmp_path / "train.bin", vocab_size=65_000, dtype=dtype)
    assert np.array_equal(one.train, tokens[:95])
    assert np.array_equal(one.validation, tokens[95:])
    assert isinstance(one.train, np.memmap)
    (tmp_path / "val.bin").unlink()
    split = read_corpus(tmp_path, vocab_size=65_000, dtype=dtype)
    assert np.array_equal(split.validation, tokens[95:])


def test_bad_corpora_are_named(tmp_path):
    def refused(match, path, **how):
        with pytest.raises(ValueError, match=match):
            read_corpus(path, **how)

    refused("got no such file or folder", tmp_path / "none")
    refused("got no bytes", tmp_path)
    (tmp_path / "empty.txt").write_bytes(b"")
    refused("empty.txt, got 0 bytes", tmp_path / "empty.txt")
    (tmp_path / "odd.bin").write_bytes(b"123")
    refused("whole number of uint16 tokens in .*odd.bin, got 3", tmp_path / "odd.bin", vocab_size=9)
    refused("expected vocab_size with the .bin tokens", tmp_path / "odd.bin")
    (tmp_path / "a.txt").write_text("text")
    refused("vocab_size 256 .* got 50257", tmp_path / "a.txt", vocab_size=50257)
    refused(r"validation_fraction in \(0, 1\), got 1", tmp_path / "a.txt", validation_fraction=1)


@pytest.mark.parametrize("length", [0, 1, 10])
def test_shorter_than_a_window_is_named(length):
    with pytest.raises(ValueError, match=rf"more than 10 tokens .*, got {length}"):
        batches(COUNTING[:length])
    with pytest.raises(ValueError, match=rf"more than 10 tokens .*, got {length}"):
        batch(COUNTING[:length], seed=0, index=0, batch_size=1, context=10)


def test_the_only_window_is_read_whole():
    inputs, targets = batch(COUNTING[:11], seed=0, index=0, batch_size=2, context=10)
    assert starts(COUNTING[:11], 10) == 1
    assert inputs.tolist() == [list(range(10))] * 2
    assert targets.tolist() == [list(range(1, 11))] * 2


def test_a_token_outside_the_vocabulary_is_named():
    with pytest.raises(ValueError, match=r"below vocab_size 500, got \d+ in batch 0"):
        next(iter(batches(vocab_size=500, batch_size=64)))


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 2**40), st.integers(0, 2**40))
def test_windows_are_runs_of_the_corpus(seed, index):
    inputs, targets = batch(COUNTING, seed=seed, index=index, batch_size=4, context=10)
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.shape == targets.shape == (4, 10)
    assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))
    assert torch.equal(targets, inputs + 1)


@settings(deadline=None, max_examples=30)
@given(st.integers(0, 10**6), st.integers(0, 10**6), st.sampled_from([1, 2, 4]))
def test_ranks_together_see_what_one_sees(seed, index, world):
    whole = batch(COUNTING, seed=seed, index=index, batch_size=8, context=10)
    parts = [
        batch(
            COUNTING,
            seed=seed,
            index=index,
            batch_size=8 // world,
            context=10,
            rank=rank,
            world=world,
        )
        for rank in range(world)
    ]
    assert equal(whole, [torch.cat(half) for half in zip(*parts, strict=True)])


def test_neighbouring_seeds_and_indices_are_unrelated():
    def offsets(seed, index):
        return batch(COUNTING, seed=seed, index=index, batch_size=64, context=10)[0][:, 0].tolist()

    seen = [tuple(offsets(seed, index)) for seed in range(20) for index in range(20)]
    assert len(set(seen)) == 400
    assert offsets(1, 2) != offsets(2, 1)
    drawn = np.bincount([place for row in seen for place in row], minlength=990)
    # Uniform over all 990 windows: 25,600 draws, chi-squared within 6 sigma of its mean 989.
    expected = 25_600 / 990
    assert abs(((drawn - expected) ** 2 / expected).sum() - 989) < 6 * np.sqrt(2 * 989)
    assert len(drawn) == 990


def test_length_is_one_pass_over_the_tokens():
    assert len(batches()) == 1000 // 40
    assert len(batches(world=4)) == 1000 // 160
    assert len(batches(batch_size=400)) == 1
    assert len(batches(length=7)) == 7


def test_passes_go_on_and_a_state_resumes_within_one():
    reader = batches(length=5)
    first, second = list(reader), list(reader)
    assert len(first) == len(second) == 5
    assert all(equal(seen, reader[i]) for i, seen in enumerate(first + second))
    cut = batches(length=5)
    walk = iter(cut)
    for _ in range(3):
        next(walk)
    state = cut.state_dict()
    assert state == {"index": 3}
    resumed = batches(length=5)
    resumed.load_state_dict(state)
    assert equal(next(iter(resumed)), reader[3])
    assert resumed.state_dict() == {"index": 4}


def test_rewound_passes_are_the_same():
    reader = batches(length=3, rewind=True)
    assert all(equal(a, b) for a, b in zip(list(reader), list(reader), strict=True))
