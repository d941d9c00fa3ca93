"""Reads the pieces of a checkpoint into their places.

On CPU one thread reads straight into the final tensors.  For a GPU several threads read large parts of the files, in
order, each into pinned buffers of its own; while one buffer is copied to the GPU (and there converted, transposed or
interleaved as the place needs) the next one fills.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from epmoe.layout import Piece
from epmoe.ops.fp8 import SCALE_SUFFIX, dequantize
from epmoe.shards import FP8, STORED, Entry, read_bytes, read_rows, read_tensor
from placement.errors import UserError

READERS = 6
PART_BYTES = 16 << 20

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class Job:
    """One read: a piece, the tensor it lies in, the scales of an 8-bit matrix whose place is of another type."""

    piece: Piece
    entry: Entry
    scale: Entry | None

    @property
    def matrix_bytes(self) -> int:
        return self.piece.rows * self.piece.shape[-1] * STORED[self.entry.dtype].itemsize

    @property
    def start(self) -> int:
        """The matrix's first byte in its file."""
        return self.entry.start + self.piece.row * self.piece.shape[-1] * STORED[self.entry.dtype].itemsize

    @property
    def bytes(self) -> int:
        return self.matrix_bytes + (0 if self.scale is None else self.scale.end - self.scale.start)

    @property
    def straight(self) -> bool:
        """Whether the place takes the bytes as they are."""
        return self.scale is None and not self.piece.transposed and self.place.dtype == STORED[self.entry.dtype]

    @property
    def place(self) -> torch.Tensor:
        return self.piece.into[0][1]


def read_pieces(
    pieces: Sequence[Piece],
    entries: Mapping[str, Entry],
    progress: Progress | None = None,
    readers: Readers | None = None,
) -> int:
    """Read all pieces, in file order; returns the bytes. UserError naming the file that cannot be read.

    ``readers``: of the device where the places are, if that is a GPU.
    """
    jobs = [_job(piece, entries) for piece in pieces]
    jobs.sort(key=lambda job: (job.entry.file, job.entry.start, job.piece.row))
    if readers is not None:
        return readers.read(jobs, progress)
    with _Files() as files:
        return _count((_read_on_cpu(files, job) for job in jobs), jobs, progress)


def _job(piece: Piece, entries: Mapping[str, Entry]) -> Job:
    entry = entries[piece.name]
    converted = entry.dtype == FP8 and piece.into[0][1].dtype != STORED[FP8]
    return Job(piece, entry, entries[piece.name + SCALE_SUFFIX] if converted else None)


def _count(done, jobs: Sequence[Job], progress: Progress | None) -> int:
    read, total = 0, sum(job.bytes for job in jobs)
    for size in done:
        read += size
        if progress:
            progress(read, total)
    return read


class _Files(ExitStack):
    """Open descriptors by path; reads are positional, so threads share them."""

    def __init__(self) -> None:
        super().__init__()
        self._open: dict[Path, int] = {}
        self._lock = threading.Lock()

    def __getitem__(self, path: Path) -> int:
        with self._lock:
            if path not in self._open:
                self._open[path] = os.open(path, os.O_RDONLY)
                self.callback(os.close, self._open[path])
            return self._open[path]


@contextmanager
def _words_for(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, EOFError) as error:
        raise UserError(f"cannot read {path}: {error}; it changed or the disk fails: download it again") from None


# -- on CPU ---------------------------------------------------------------------------------------------------------


def _read_on_cpu(files: _Files, job: Job) -> int:
    """Straight into place where the bytes need no change, through one staging matrix elsewhere; returns the bytes."""
    piece = job.piece
    with _words_for(job.entry.file):
        file = files[job.entry.file]
        if job.straight:
            for offset, view in piece.into:
                for part in view if view.dim() == 3 else (view,):
                    read_rows(file, job.entry, piece.row + offset, part)
                    offset += len(part)
            return job.bytes
        matrix = torch.empty(piece.rows, piece.shape[-1], dtype=STORED[job.entry.dtype])
        read_rows(file, job.entry, piece.row, matrix)
        _put(matrix, job)
        return job.bytes


def _put(matrix: torch.Tensor, job: Job) -> None:
    """Bring a matrix as it was stored into its place, on the device where both are."""
    if job.scale is not None:
        matrix = dequantize(matrix, read_tensor(job.scale).to(matrix.device), torch.float32)
    matrix = matrix.T if job.piece.transposed else matrix
    for offset, view in job.piece.into:
        rows = view.numel() // view.shape[-1]
        view.copy_(matrix[offset : offset + rows].reshape(view.shape))


# -- to a GPU -------------------------------------------------------------------------------------------------------


def _parts(job: Job) -> list[Job]:
    """A large matrix that is one run of rows at its place, in parts of about ``PART_BYTES``; any other as it is."""
    piece = job.piece
    rows = max(1, PART_BYTES * piece.rows // max(job.matrix_bytes, 1))
    if rows >= piece.rows or not job.straight or len(piece.into) > 1 or job.place.dim() == 3:
        return [job]
    cuts = [(first, min(rows, piece.rows - first)) for first in range(0, piece.rows, rows)]
    return [
        replace(
            job,
            piece=replace(piece, row=piece.row + first, rows=count, into=((0, job.place[first : first + count]),)),
        )
        for first, count in cuts
    ]


@dataclass(frozen=True)
class Span:
    """Bytes ``start .. end`` of a file, which the jobs take one after the other without a gap."""

    file: Path
    start: int
    end: int
    jobs: tuple[Job, ...]


def _spans(jobs: Sequence[Job]) -> list[Span]:
    """Neighbours in a file read together, up to about ``PART_BYTES``."""
    spans: list[Span] = []
    for job in jobs:
        end = job.start + job.matrix_bytes
        last = spans[-1] if spans else None
        if last and (last.file, last.end) == (job.entry.file, job.start) and end - last.start <= PART_BYTES:
            spans[-1] = replace(last, end=end, jobs=(*last.jobs, job))
        else:
            spans.append(Span(job.entry.file, job.start, end, (job,)))
    return spans


class _Reader:
    """One thread's stream, and two pinned buffers and two on the device that take turns."""

    def __init__(self, device: torch.device) -> None:
        torch.cuda.set_device(device)
        self.device, self.stream = device, torch.cuda.Stream(device)
        self._turns = [self._turn(PART_BYTES) for _ in range(2)]

    def _turn(self, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.cuda.Event]:
        host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        with torch.cuda.stream(self.stream):
            return host, torch.empty(size, dtype=torch.uint8, device=self.device), torch.cuda.Event()

    def __call__(self, files: _Files, span: Span) -> int:
        self._turns.reverse()
        self._turns[0][2].synchronize()  # what was read into it two spans ago has been copied
        size = span.end - span.start
        if size > len(self._turns[0][0]):
            self._turns[0] = self._turn(size)
        host, landed, copied = self._turns[0]
        with _words_for(span.file), torch.cuda.stream(self.stream):
            read_bytes(files[span.file], span.start, host[:size])
            _put_span(landed[:size].copy_(host[:size], non_blocking=True), span)
            copied.record()
        return sum(job.bytes for job in span.jobs)


class Readers:
    """Threads that read to a GPU; their buffers are pinned from here on, while headers are still being looked at."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            device = torch.device(device.type, torch.cuda.current_device())
        self._own, self._device = threading.local(), device
        ready = threading.Barrier(READERS)  # each thread takes one of as many tasks
        self.pool = ThreadPoolExecutor(READERS)
        self._started = [self.pool.submit(self._start, ready) for _ in range(READERS)]

    def _start(self, ready: threading.Barrier) -> None:
        try:
            self._own.reader = _Reader(self._device)
        finally:
            ready.wait()

    def read(self, jobs: Sequence[Job], progress: Progress | None) -> int:
        spans = _spans([part for job in jobs for part in _parts(job)])
        torch.cuda.synchronize(self._device)  # whatever was done to the places before
        for started in self._started:
            started.result()
        with _Files() as files, self.pool:  # threads end before their files are closed
            try:
                read = _count(self.pool.map(lambda span: self._own.reader(files, span), spans), jobs, progress)
            except BaseException:
                self.pool.shutdown(wait=False, cancel_futures=True)
                raise
        torch.cuda.synchronize(self._device)
        return read

    def __enter__(self) -> Readers:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown(cancel_futures=True)


def _put_span(stored: torch.Tensor, span: Span) -> None:
    """Bring the bytes of a span, uint8 on the places' device, into all of them."""
    for job in span.jobs:
        _put(_matrix(stored[job.start - span.start :][: job.matrix_bytes], job), job)


def _matrix(stored: torch.Tensor, job: Job) -> torch.Tensor:
    """The stored bytes as the matrix they are; a copy where they lie between two of its elements."""
    dtype = STORED[job.entry.dtype]
    aligned = stored if stored.storage_offset() % dtype.itemsize == 0 else stored.clone()
    return aligned.view(dtype).view(job.piece.rows, job.piece.shape[-1])
