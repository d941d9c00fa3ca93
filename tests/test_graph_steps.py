"""Which graph a step runs, and the buffers its inputs travel in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from epmoe.config import EngineConfig
from epmoe.engine.agreement import HEADER_MOVES, Header, Kind, agreed_kind, graph_sizes, padded_size
from epmoe.engine.staging import HostCopy, Staging, buffer_bytes, views


@pytest.mark.parametrize("most", [1, 2, 3, 8, 64, 100, 256, 1000])
def test_padding_wastes_little(most):
    sizes = graph_sizes(most)
    assert list(sizes) == sorted(set(sizes)) and sizes[-1] == most
    for count in range(1, most + 1):
        size = padded_size(count, sizes)
        assert count <= size <= max(count + 7, 1.25 * count)
    assert padded_size(1, sizes) == 1, "one sequence has kernels of its own"


def header(tokens: int, decodes: bool, homes=()) -> Header:
    return Header(3, tokens, int(decodes), 1, 100, 7, 0, homes)


def test_all_ranks_run_the_same_kind_of_step():
    """A graph only if every rank can, of the busiest rank's size; a rank without tokens can."""
    engine = EngineConfig("model", device="cuda", max_requests=64)
    assert agreed_kind([header(5, True), header(0, True)], engine, True) == Kind(1, 8, 8)
    assert agreed_kind([header(5, True), header(9, False)], engine, True) == Kind(1, 9)
    assert agreed_kind([header(5, True), header(64, True)], engine, True) == Kind(1, 64, 64)
    assert agreed_kind([header(5, True), header(6, True)], engine, False) == Kind(1, 6)
    assert agreed_kind([header(0, True), header(0, True)], engine, True) is None
    two = EngineConfig("model", device="cuda", max_requests=64, overlap="on")
    assert agreed_kind([header(5, False), header(9, True)], two, True).lanes == 2


def test_headers_travel_whole():
    for homes in ((), tuple((n, n % 3) for n in range(HEADER_MOVES))):
        assert Header.unpack(header(9, True, homes).pack()) == header(9, True, homes)


def test_inputs_arrive_as_they_were():
    arrays = [np.arange(5), np.array([[1.5, 2.5]], np.float32), np.zeros((0, 3), np.int32), np.array([True, False])]
    for array, tensor in zip(arrays, Staging(torch.device("cpu")).upload(arrays)):
        assert np.array_equal(tensor.numpy(), array) and tensor.numpy().dtype == array.dtype
    buffer = torch.zeros(buffer_bytes(arrays), dtype=torch.uint8)
    parts = views(buffer, arrays)
    for part, array in zip(parts, arrays):
        part.copy_(torch.from_numpy(array))
    assert [part.data_ptr() % 16 for part in parts if part.numel()] == [buffer.data_ptr() % 16] * 3
    for part, array in zip(parts, arrays):
        assert np.array_equal(part.numpy(), array), "parts of one buffer overlap"


@pytest.mark.gpu
def test_buffers_take_turns_on_a_gpu():
    """Many uploads in a row into one place, each read by the device after the host has moved on."""
    staging = Staging(torch.device("cuda"))
    place = torch.zeros(buffer_bytes([np.zeros(1000, np.int64)]), dtype=torch.uint8, device="cuda")
    (there,) = views(place, [np.zeros(1000, np.int64)])
    kept = []
    for n in range(50):
        staging.refill(place, [np.full(1000, n)])
        torch.cuda._sleep(100_000)
        kept.append(HostCopy(there + 1))
    assert [copy.numpy().tolist() for copy in kept] == [[n + 1] * 1000 for n in range(50)]
