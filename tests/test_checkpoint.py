"""The loader: strict accounting, a rank's own bytes only, the right bytes in the right slots."""

import json
import shutil
import struct
from contextlib import nullcontext
from dataclasses import replace
from math import prod
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import save_tiny

import epmoe.checkpoint
import epmoe.layout
from epmoe import checkpoint, reading
from epmoe.checkpoint import account, load_weights
from epmoe.families import FAMILIES, LAYER, MLPNames
from epmoe.model_config import ModelConfig
from epmoe.ops.experts import interleave_gate_up
from epmoe.reading import _job, _parts, _put_span, _spans
from epmoe.shards import read_bytes
from placement.errors import UserError
from placement.plan import linear_plan, make_plan, round_robin_plan

E = 10
EXPERT = "model.layers.1.block_sparse_moe.experts.3.w1.weight"
NORM = "model.layers.0.input_layernorm.weight"


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """A Mixtral of 10 experts in one file."""
    return save_tiny(tmp_path_factory.mktemp("single"), "mixtral", num_experts=E, top_k=3)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory):
    """The same weights in small shards."""
    return save_tiny(tmp_path_factory.mktemp("sharded"), "mixtral", num_experts=E, top_k=3, sharded=True)


@pytest.fixture
def copy(single, tmp_path):
    """A copy of the single file to damage."""
    return shutil.copytree(single, tmp_path / "copy")


def stored(folder) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def load(folder, held=None, dtype=torch.float32, **options):
    config = ModelConfig.from_folder(folder)
    return load_weights(folder, config, held or [range(E)] * len(config.moe_layers), dtype, **options)


def error_of(folder) -> str:
    """The loader's one line; the same for a rank whether or not the damage is in its own experts."""
    config = ModelConfig.from_folder(folder)
    with pytest.raises(UserError) as caught:
        account(folder, config)
    text = str(caught.value)
    for held in ([3], [9]):
        with pytest.raises(UserError) as again:
            load(folder, [held] * 3)
        assert str(again.value) == text
    assert "\n" not in text and "download it again" in text and str(folder) in text
    return text


def flat(weights) -> list[torch.Tensor]:
    if isinstance(weights, torch.Tensor):
        return [weights]
    if isinstance(weights, tuple):
        return [tensor for item in weights for tensor in flat(item)]
    return [tensor for item in vars(weights).values() if item is not None for tensor in flat(item)]


# -- accounting -------------------------------------------------------------------------------------------------------


def rewrite(folder, change) -> None:
    tensors = stored(folder)
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def edit_header(path, change) -> None:
    """Change the JSON header in place; the data and its offsets stay."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    change(header)
    text = json.dumps(header, separators=(",", ":")).encode().ljust(length)
    path.write_bytes(struct.pack("<Q", len(text)) + text + raw[8 + length :])


MUTATIONS = {
    "missing expert": (lambda t: t.pop(EXPERT), [f"missing: {EXPERT}"]),
    "missing norm": (lambda t: t.pop(NORM), [f"missing: {NORM}"]),
    "extra": (lambda t: t.update({f"{EXPERT}_scale": torch.ones(1)}), [f"unknown: {EXPERT}_scale"]),
    "renamed": (lambda t: t.update({"x": t.pop(EXPERT)}), [f"missing: {EXPERT}", "unknown: x"]),
    "misshapen": (
        lambda t: t.update({EXPERT: t[EXPERT][:-1]}),
        [f"misshapen: {EXPERT} ([79, 64], config.json asks for [80, 64])"],
    ),
    "transposed": (lambda t: t.update({EXPERT: t[EXPERT].T}), ["[64, 80], config.json asks for [80, 64]"]),
    "flattened": (lambda t: t.update({EXPERT: t[EXPERT].flatten()}), [f"misshapen: {EXPERT} ([5120]"]),
    "integers": (lambda t: t.update({EXPERT: t[EXPERT].int()}), [f"{EXPERT} (I32)"]),
    "fp8": (lambda t: t.update({EXPERT: t[EXPERT].to(torch.float8_e4m3fn)}), [f"{EXPERT} (F8_E4M3)"]),
    "another layer": (lambda t: t.update({"model.layers.3.x": torch.ones(2)}), ["unknown: model.layers.3.x"]),
    "many": (
        lambda t: [t.pop(name) for name in list(t) if "layers.2" in name],
        ["missing: model.layers.2.input_layernorm.weight", "and 33 more"],
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_changed_checkpoint_is_one_line_that_says_how(mutation, copy):
    change, expected = MUTATIONS[mutation]
    rewrite(copy, change)
    text = error_of(copy)
    assert all(part in text for part in expected), text
    assert len(text) < 1000


def test_all_findings_are_in_one_error(copy):
    rewrite(copy, lambda t: (t.pop(NORM), t.update({EXPERT: t[EXPERT][1:], "x": torch.ones(1)})))
    text = error_of(copy)
    assert f"missing: {NORM}" in text and "unknown: x" in text and f"misshapen: {EXPERT}" in text


def test_truncated_data(copy):
    path = copy / "model.safetensors"
    last = max(json_header(path).items(), key=lambda item: item[1]["data_offsets"][1])[0]
    path.write_bytes(path.read_bytes()[:-4])
    text = error_of(copy)
    assert f"truncated: {last} (ends at byte" in text and "missing" not in text


def json_header(path) -> dict:
    raw = path.read_bytes()
    header = json.loads(raw[8 : 8 + struct.unpack("<Q", raw[:8])[0]])
    header.pop("__metadata__", None)
    return header


@pytest.mark.parametrize("size", [0, 7, 8, 100])
def test_truncated_header(size, copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert "unreadable files: model.safetensors (" in error_of(copy)


@pytest.mark.parametrize(
    "header",
    [
        *("[]", "5", "null", '"x"', "[" * 50_000, '{"a": {}}', '{"a": 5}'),
        '{"a": {"dtype": "F32", "shape": [1e999], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": [], "shape": [1], "data_offsets": [0, 4]}}',
        '{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, null]}}',
    ],
)
def test_damaged_header(header, copy):
    (copy / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode() + bytes(8))
    assert "unreadable files: model.safetensors (" in error_of(copy)


def test_no_header(copy):
    (copy / "model.safetensors").write_bytes(b"\xff" * 64)
    assert "unreadable files: model.safetensors (" in error_of(copy)


def test_offsets_that_do_not_fit(copy):
    edit_header(copy / "model.safetensors", lambda h: h[EXPERT].update(shape=[79, 64]))
    assert EXPERT in error_of(copy)


def test_one_tensor_of_the_other_half_precision_type(copy):
    rewrite(copy, lambda t: t.update({name: tensor.bfloat16() for name, tensor in t.items()}))
    load(copy)
    edit_header(copy / "model.safetensors", lambda h: h[EXPERT].update(dtype="F16"))
    assert f"of mixed types: {EXPERT} (F16 among BF16)" in error_of(copy)


def test_no_weights_at_all(copy):
    (copy / "model.safetensors").unlink()
    assert "neither model.safetensors.index.json nor model.safetensors is there" in error_of(copy)


def test_a_shard_is_missing_or_damaged_or_in_the_wrong_place(sharded, tmp_path):
    folder = shutil.copytree(sharded, tmp_path / "copy")
    first, second = sorted(folder.glob("*.safetensors"))[:2]
    kept = first.read_bytes()
    first.unlink()
    assert f"unreadable files: {first.name} (No such file" in error_of(folder)
    first.write_bytes(second.read_bytes())
    text = error_of(folder)
    assert "stored twice: " in text and "missing: " in text
    first.write_bytes(kept)
    load(folder)
    index = folder / "model.safetensors.index.json"
    raw = json.loads(index.read_text())
    raw["weight_map"][NORM] = second.name if raw["weight_map"][NORM] == first.name else first.name
    index.write_text(json.dumps(raw))
    assert f"not where the index says: {NORM}" in error_of(folder)
    for damaged in (
        "{}",
        "[" * 50_000,
        '{"weight_map": 5}',
        '{"weight_map": {"a": 5}}',
        '{"weight_map": {"a": "../x"}}',
    ):
        index.write_text(damaged)
        assert "unreadable files: model.safetensors.index.json" in error_of(folder)


def test_what_may_be_left_over(single, tmp_path):
    folder = shutil.copytree(single, tmp_path / "copy")
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}))
    load(folder)
    tied = save_tiny(tmp_path / "tied", "mixtral", num_experts=E, tie_word_embeddings=True)
    weights, _ = load(tied)
    assert weights.head is weights.embed
    rewrite(tied, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load(tied)


def test_an_expert_of_zeros_is_refused_by_the_rank_that_holds_it(copy):
    rewrite(copy, lambda t: t.update({EXPERT.replace("w1", "w2"): torch.zeros(64, 80)}))
    load(copy, [[2, 4]] * 3)
    with pytest.raises(UserError, match="layer 1, expert 3: its down weights are all zero"):
        load(copy, [[2, 3]] * 3)


# -- bytes and slots --------------------------------------------------------------------------------------------------


def check_slots(folder, weights, held, dtype=torch.float32) -> None:
    """Every local slot holds the expert that the plan says, laid out as the kernels want it."""
    tensors = stored(folder)
    for i, (layer, experts) in enumerate(zip(weights.layers, held)):
        assert layer.mlp.experts.gate_up.shape[0] == layer.mlp.experts.down.shape[0] == len(experts)
        for slot, expert in enumerate(experts):
            w1, w2, w3 = (
                tensors[f"model.layers.{i}.block_sparse_moe.experts.{expert}.w{n}.weight"].to(dtype) for n in (1, 2, 3)
            )
            assert torch.equal(layer.mlp.experts.gate_up[slot], interleave_gate_up(w1, w3))
            assert torch.equal(layer.mlp.experts.down[slot], w2)


def rank_slots(plan, rank: int) -> list[tuple[int, ...]]:
    return [layer[rank] for layer in plan.slots]


@pytest.mark.parametrize("kind", ["linear", "round-robin", "ragged", "replicas"])
def test_each_rank_gets_its_experts_and_reads_only_their_bytes(kind, sharded):
    shape = ModelConfig.from_folder(sharded).moe_shape
    plan = {
        "linear": linear_plan(shape, 4),  # 3, 3, 2, 2 experts
        "round-robin": round_robin_plan(shape, 3),
        "ragged": make_plan(shape, 3, [[[9], [*range(8)], [8]], [[0, 2, 4], [6, 8, 1], [9, 7, 5, 3]], [*SPREAD]]),
        "replicas": make_plan(shape, 2, [[[4, 1, 0, 2, 3], [5, 6, 7, 8, 9, 4, 0]]] * 3),
    }[kind]
    tensors = stored(sharded)
    sizes = {name: tensor.numel() * 4 for name, tensor in tensors.items()}
    common = sum(size for name, size in sizes.items() if ".experts." not in name)
    for rank in range(plan.ranks):
        held = rank_slots(plan, rank)
        weights, report = load(sharded, held)
        check_slots(sharded, weights, held)
        own = sum(
            sizes[f"model.layers.{i}.block_sparse_moe.experts.{expert}.w{n}.weight"]
            for i, experts in enumerate(held)
            for expert in experts
            for n in (1, 2, 3)
        )
        headers = report.bytes_total - sum(sizes.values())
        assert report.bytes_read == common + own + headers
        assert report.experts == sum(map(len, held))


SPREAD = [[7, 0, 3], [1, 2], [4, 5, 6, 8, 9]]


def test_bytes_of_disjoint_ranks_sum_to_the_checkpoint(single):
    plan = linear_plan(ModelConfig.from_folder(single).moe_shape, 2)
    reports = [load(single, rank_slots(plan, rank))[1] for rank in (0, 1)]
    tensors = stored(single)
    common = sum(tensor.numel() * 4 for name, tensor in tensors.items() if ".experts." not in name)
    header = reports[0].bytes_total - sum(tensor.numel() * 4 for tensor in tensors.values())
    assert sum(report.bytes_read for report in reports) == reports[0].bytes_total + common + header
    assert reports[0].bytes_total == (single / "model.safetensors").stat().st_size


def test_the_data_of_other_ranks_experts_is_never_read(single, tmp_path):
    """With a file per expert a rank opens only its own; all else may be NaN and nobody notices."""
    folder = shutil.copytree(single, tmp_path / "copy")
    shards: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in stored(folder).items():
        expert = name.split(".experts.")[1].split(".")[0] if ".experts." in name else "common"
        foreign = expert not in ("common", "3", "7")
        shards.setdefault(f"{expert}.safetensors", {})[name] = tensor.fill_(float("nan")) if foreign else tensor
    for file, tensors in shards.items():
        save_file(tensors, folder / file)
    index = {name: file for file, tensors in shards.items() for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    weights, report = load(folder, [[3, 7], [7], [7]])
    assert not any(tensor.isnan().any() for tensor in flat(weights))
    assert report.files == 3


def test_shards_and_a_single_file_give_the_same_weights(single, sharded):
    pairs = zip(flat(load(single)[0]), flat(load(sharded)[0]), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("saved", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wanted", [torch.float32, torch.bfloat16, torch.float16])
def test_dtypes_are_converted_once(saved, wanted, tmp_path):
    folder = save_tiny(tmp_path, "mixtral", dtype=saved, num_experts=E)
    held = [[7, 2]] * 3
    weights, _ = load(folder, held, wanted)
    assert {tensor.dtype for tensor in flat(weights)} == {wanted}
    check_slots(folder, weights, held, wanted)
    assert torch.equal(weights.embed, stored(folder)["model.embed_tokens.weight"].to(wanted))


def test_progress_ends_at_the_bytes_to_read(single):
    calls = []
    _, report = load(single, [[1]] * 3, progress=lambda done, total: calls.append((done, total)))
    assert calls == sorted(calls) and calls[-1][0] == calls[-1][1] <= report.bytes_read
    assert len({total for _, total in calls}) == 1


def test_the_real_checkpoint(shared_dir):
    folder = shared_dir / "models" / "small32x4"
    config = ModelConfig.from_folder(folder)
    plan = linear_plan(config.moe_shape, 2)
    loaded = [load_weights(folder, config, rank_slots(plan, rank), torch.bfloat16) for rank in (0, 1)]
    expert_bytes = 12 * 32 * 3 * 64 * 256 * 2
    for _, report in loaded:
        assert report.experts == 12 * 16 and report.bytes_read == report.bytes_total - expert_bytes // 2
    weights, tensors = loaded[1][0], stored(folder)
    names = [f"model.layers.5.mlp.experts.20.{n}_proj.weight" for n in ("gate", "up", "down")]
    gate, up, down = (tensors[name] for name in names)
    assert torch.equal(weights.layers[5].mlp.experts.gate_up[4], interleave_gate_up(gate, up))
    assert torch.equal(weights.layers[5].mlp.experts.down[4], down)


# -- stacked experts on disk ------------------------------------------------------------------------------------------


def with_names(monkeypatch, **names) -> None:
    """Let the Mixtral entry look for other names."""
    family = replace(FAMILIES["mixtral"], names=replace(FAMILIES["mixtral"].names, **names))
    for module in (epmoe.checkpoint, epmoe.layout):
        monkeypatch.setattr(module, "FAMILIES", {"mixtral": family})


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_stacked_in_one_tensor_are_read_by_slices(transposed, single, tmp_path, monkeypatch):
    """Granite stores ``[E, 2F, D]``, Llama 4 ``[E, D, 2F]``."""
    folder = shutil.copytree(single, tmp_path / "copy")
    held = [[8, 0, 5]] * 3
    whole, _ = load(single, held)

    def stack(tensors):
        for i in range(3):
            prefix = f"model.layers.{i}.block_sparse_moe.experts."
            w1, w2, w3 = (torch.stack([tensors.pop(f"{prefix}{e}.w{n}.weight") for e in range(E)]) for n in (1, 2, 3))
            both = torch.cat([w1, w3], 1)
            tensors[f"{prefix}gate_up"] = both.mT if transposed else both
            tensors[f"{prefix}down"] = w2.mT if transposed else w2

    rewrite(folder, stack)
    prefix = LAYER + "block_sparse_moe.experts."
    with_names(monkeypatch, experts=MLPNames(gate_up=f"{prefix}gate_up", down=f"{prefix}down", transposed=transposed))
    weights, report = load(folder, held)
    assert all(torch.equal(a, b) for a, b in zip(flat(weights), flat(whole), strict=True))
    expert_bytes = sum(prod(t.shape) * 4 for name, t in stored(folder).items() if ".experts." in name)
    assert report.bytes_read == report.bytes_total - expert_bytes * 7 // 10


def test_correction_biases_stay_float32(single, tmp_path, monkeypatch):
    folder = shutil.copytree(single, tmp_path / "copy")
    name = "model.layers.{}.block_sparse_moe.bias"
    bias = torch.linspace(0.1, 0.10001, E)
    rewrite(folder, lambda t: t.update({name.format(i): bias.clone() for i in range(3)}))
    with_names(monkeypatch, correction_bias=LAYER + "block_sparse_moe.bias")
    weights, _ = load(folder, dtype=torch.bfloat16)
    assert torch.equal(weights.layers[2].mlp.correction_bias, bias)


@pytest.mark.parametrize("part_bytes", [300, 5000, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_spans_bring_what_single_reads_bring(sharded, dtype, part_bytes, monkeypatch):
    """The reads for a GPU, done on the CPU: neighbours together, large matrices in parts."""

    def by_spans(pieces, entries, progress, readers):
        jobs = sorted((_job(p, entries) for p in pieces), key=lambda j: (j.entry.file, j.entry.start, j.piece.row))
        parts = [part for job in jobs for part in _parts(job)]
        spans = _spans(parts)
        assert [job for span in spans for job in span.jobs] == parts
        for span in spans:
            stored = torch.empty(span.end - span.start, dtype=torch.uint8)
            with open(span.file, "rb") as file:
                read_bytes(file.fileno(), span.start, stored)
            _put_span(stored, span)
        counts.append(len(spans))
        return sum(job.bytes for job in jobs)

    counts = []
    want, report = load(sharded, dtype=dtype)
    monkeypatch.setattr(reading, "PART_BYTES", part_bytes)
    monkeypatch.setattr(checkpoint, "read_pieces", by_spans)
    got, other = load(sharded, dtype=dtype)
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))
    assert other.bytes_read == report.bytes_read
    assert counts[0] == report.files if part_bytes > 1 << 20 else counts[0] > report.files


@pytest.mark.parametrize("part_bytes", [300, 5000, 1 << 25])
def test_readers_in_threads_bring_what_single_reads_bring(sharded, part_bytes, monkeypatch):
    """The threads that read for a GPU, copying to the CPU instead; buffers grow for what is larger than a part."""
    want, report = load(sharded, dtype=torch.bfloat16)
    empty, read = torch.empty, checkpoint.read_pieces
    for name in ("set_device", "synchronize", "Stream"):
        monkeypatch.setattr(torch.cuda, name, lambda device: None)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda: None, synchronize=lambda: None))
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **more: empty(*size, **more))
    monkeypatch.setattr(reading, "PART_BYTES", part_bytes)
    told = []
    with reading.Readers(torch.device("cpu", 0)) as readers:
        monkeypatch.setattr(checkpoint, "read_pieces", lambda p, e, progress, _: read(p, e, progress, readers))
        got, other = load(sharded, dtype=torch.bfloat16, progress=lambda *at: told.append(at))
    assert all(torch.equal(a, b) for a, b in zip(flat(got), flat(want), strict=True))
    assert other.bytes_read == report.bytes_read and told[-1][0] == told[-1][1] > 0


@pytest.mark.gpu
@pytest.mark.parametrize("part_bytes", [300, 1 << 25])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gpu_gets_the_same_weights(sharded, dtype, part_bytes, monkeypatch):
    want, report = load(sharded, dtype=dtype)
    monkeypatch.setattr(reading, "PART_BYTES", part_bytes)
    got, other = load(sharded, dtype=dtype, device="cuda")
    assert all(torch.equal(a.cpu(), b) for a, b in zip(flat(got), flat(want), strict=True))
    assert other.bytes_read == report.bytes_read
