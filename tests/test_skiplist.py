import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, SequentialSampler, TensorDataset

from stabilitykit.skiplist import SkipList, SkippingBatchSampler


def entry(step, samples, reason="spike"):
    return {"step": step, "reason": reason, "batches": [step], "samples": samples}


def written(folder, *entries):
    path = folder / "skip.json"
    SkipList(entries).write(path)
    return path


def test_a_list_survives_its_file(tmp_path):
    entries = [entry(3, [1, 2]), entry(9, ["a.txt:4"], "nonfinite"), entry(11, None)]
    path = written(tmp_path, *entries)
    assert json.loads(path.read_text()) == {"skip": entries}
    again = SkipList.read(path)
    assert again.entries == entries
    assert again.samples == {1, 2, "a.txt:4"}
    assert [file.name for file in tmp_path.iterdir()] == ["skip.json"]


def test_what_is_listed_already_is_not_listed_twice():
    found = SkipList([entry(3, [1])])
    assert not found.add([entry(3, [1], "transient")])
    assert found.add([entry(3, [1]), entry(4, [1])])
    assert [row["step"] for row in found.entries] == [3, 4]


@pytest.mark.parametrize("text", ["", "[]", '{"skip": [3]}', '{"skip": [{"samples": 3}]}', '{"skip": {}'])
def test_another_file_is_named(tmp_path, text):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"expected a skip list, \{'skip': \[...\]\}, in .*other.json"):
        SkipList.read(path)
    with pytest.raises(ValueError, match="expected a skip list at .*nowhere.json, got no such file"):
        SkippingBatchSampler([[1]], tmp_path / "nowhere.json")


def loader(size, batch_size, path=None):
    batches = BatchSampler(SequentialSampler(range(size)), batch_size, drop_last=False)
    return DataLoader(TensorDataset(torch.arange(size)), batch_sampler=SkippingBatchSampler(batches, path))


def read(data):
    return [row[0].tolist() for row in data]


def test_without_a_list_every_batch_is_as_it_was():
    assert read(loader(7, 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def test_a_bad_batch_is_left_out_and_a_bad_sample_replaced(tmp_path):
    path = written(tmp_path, entry(1, [3, 4, 5]), entry(2, [7]))
    assert read(loader(12, 3, path)) == [[0, 1, 2], [6, 8, 6], [9, 10, 11], [0, 1, 2]]


def test_a_list_of_everything_is_refused(tmp_path):
    with pytest.raises(ValueError, match="expected a sample that is not in the skip list, got none"):
        read(loader(4, 2, written(tmp_path, entry(0, [0, 1, 2, 3]))))


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 40), st.integers(1, 6), st.sets(st.integers(0, 39)))
def test_passes_keep_their_length_batches_their_size_and_nothing_listed_is_read(size, batch, listed):
    plain = list(BatchSampler(SequentialSampler(range(size)), batch, drop_last=False))
    sampler = SkippingBatchSampler(plain)
    sampler.skipped = frozenset(listed)
    if listed >= set(range(size)):
        return
    got = list(sampler)
    assert len(got) == len(plain) == len(sampler)
    assert not listed & {sample for row in got for sample in row}
    assert set(range(size)) - listed == {sample for row in got for sample in row}


def test_a_batch_is_named_by_its_place_in_the_pass_also_when_workers_read_ahead(tmp_path):
    data = loader(12, 3, written(tmp_path, entry(0, [0, 1, 2])))
    for place, row in enumerate(data):
        assert data.batch_sampler.sample_ids(place) == row[0].tolist()
    walk = iter(data.batch_sampler)
    for _ in range(3):  # a loader that prefetches has drawn three when the first arrives
        next(walk)
    assert data.batch_sampler.sample_ids(0) == [3, 4, 5]
    assert data.batch_sampler.sample_ids(3) is None
    assert SkippingBatchSampler([[5]] * 3000).sample_ids(0) is None


def test_ranks_stay_in_step_and_the_epoch_reaches_the_sampler(tmp_path):
    path = written(tmp_path, entry(0, list(range(0, 8))))
    shares = []
    for rank in range(2):
        inner = DistributedSampler(range(40), num_replicas=2, rank=rank, seed=3)
        sampler = SkippingBatchSampler(BatchSampler(inner, 4, drop_last=True), path)
        sampler.sampler.set_epoch(2)
        shares.append(list(sampler))
    assert len(shares[0]) == len(shares[1]) == 5
    assert all(len(batch) == 4 for share in shares for batch in share)
