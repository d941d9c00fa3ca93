"""Every producer's layout gives back the routing it was made from, and damage is named with its place."""

import base64
import io
import json

import numpy as np
import pytest

from placement import readers
from placement.errors import UserError
from placement.home_rules import read_homes
from placement.plan import MoEShape
from placement.profile import Profile
from placement.recording import ReadOptions
from placement.trace import Trace

E, K, L = 8, 2, 3
OPTIONS = ReadOptions(num_experts=E, top_k=K)


def routing(tokens, layers=L, seed=0, k=K):
    """int64 [tokens, layers, k] distinct ids: a token's row names it (a function of seed and its index)."""
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((tokens, layers, E)), axis=-1)[..., :k]


def same_choices(a, b):
    return np.array_equal(np.sort(np.asarray(a, np.int64), -1), np.sort(np.asarray(b, np.int64), -1))


# -- SGLang -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def sglang_map():
    """int [L + 1, P = 10]: layer 0 is dense; experts 0 and 1 have two physical slots."""
    rng = np.random.default_rng(5)
    return np.stack([rng.permutation([*range(E), 0, 1]) for _ in range(L + 1)])


def sglang_record(torch, logical_TLK, slot_map, ids, positions, lens=None, number=0, rank=0, pad=0):
    """One pass as the recorder writes it: physical slots, width 8, -1 elsewhere, layer 0 empty."""
    T = len(logical_TLK)
    topk = np.full((L + 1, T + pad, 8), -1, np.int32)
    for t in range(T):
        for layer in range(L):
            for k, expert in enumerate(logical_TLK[t, layer]):
                slots = np.flatnonzero(slot_map[layer + 1] == expert)
                topk[layer + 1, t, k] = slots[(t + k) % len(slots)]  # either copy of a replicated expert
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "input_ids": [*ids, *[0] * pad],
        "positions": [*positions, *[0] * pad],
        "extend_seq_lens": lens,
        "forward_mode": 1 if lens else 2,
        "topk_ids_of_layer": torch.tensor(topk),
        "misc_objects": [],
        "global_physical_count": torch.zeros(L + 1, 10, dtype=torch.int32),
    }


def save_records(torch, path, records, slot_map):
    torch.save({"records": records, "last_physical_to_logical_map": torch.tensor(slot_map)}, path)


def test_sglang_per_token_maps_slots_and_rebuilds_sequences(tmp_path, torch):
    """Two prompts of 3 and 2 tokens, then two decode steps of both, and padding that chose nothing."""
    slot_map, ids = sglang_map(), routing(9)
    records = [
        sglang_record(torch, ids[:5], slot_map, [10, 11, 12, 20, 21], [0, 1, 2, 0, 1], [3, 2], 0, pad=2),
        sglang_record(torch, ids[5:7], slot_map, [13, 22], [3, 2], None, 1),
        sglang_record(torch, ids[7:9], slot_map, [14, 23], [4, 3], None, 2, pad=1),
    ]
    save_records(torch, tmp_path / "expert_distribution_recorder_1.5_0.pt", records, slot_map)
    trace = readers.read_trace(tmp_path / "expert_distribution_recorder_1.5_0.pt")
    assert trace.seq_lens.tolist() == [5, 4]
    assert trace.token_ids_T.tolist() == [10, 11, 12, 13, 14, 20, 21, 22, 23]
    assert same_choices(trace.expert_ids_TLK, ids[[0, 1, 2, 5, 7, 3, 4, 6, 8]])
    assert trace.shape == MoEShape((1, 2, 3), E, K)


def test_sglang_chunked_prefill_continues_its_sequence(tmp_path, torch):
    slot_map, ids = sglang_map(), routing(6)
    records = [
        sglang_record(torch, ids[:4], slot_map, [1, 2, 3, 4], [0, 1, 2, 3], [4], 0),
        sglang_record(torch, ids[4:], slot_map, [5, 6], [4, 5], [2], 1),
    ]
    save_records(torch, tmp_path / "a_0.pt", records, slot_map)
    assert readers.read_trace(tmp_path / "a_0.pt").seq_lens.tolist() == [6]


def test_sglang_folder_joins_ranks_and_counts_copies_once(tmp_path, torch):
    slot_map, ids = sglang_map(), routing(6)
    first = [sglang_record(torch, ids[:3], slot_map, [1, 2, 3], [0, 1, 2], [3])]
    other = [sglang_record(torch, ids[3:], slot_map, [4, 5, 6], [0, 1, 2], [3], rank=2)]
    save_records(torch, tmp_path / "x_0.pt", first, slot_map)
    save_records(torch, tmp_path / "x_1.pt", first, slot_map)  # tensor-parallel peer of rank 0
    save_records(torch, tmp_path / "x_2.pt", other, slot_map)
    notes = []
    trace = readers.read_trace(tmp_path, ReadOptions(note=notes.append))
    assert trace.seq_lens.tolist() == [3, 3] and same_choices(trace.expert_ids_TLK, ids)
    assert any("counted once" in note for note in notes)


def test_sglang_damage_is_named(tmp_path, torch):
    slot_map, ids = sglang_map(), routing(4)
    path = tmp_path / "bad.pt"

    def message(change):
        record = sglang_record(torch, ids, slot_map, [1, 2, 3, 4], [0, 1, 2, 3], [4], number=7)
        change(record)
        save_records(torch, path, [record], slot_map)
        with pytest.raises(UserError) as error:
            readers.read_trace(path)
        return str(error.value)

    def drop_layer(record):
        record["topk_ids_of_layer"][2, 1] = -1

    def foreign_slot(record):
        record["topk_ids_of_layer"][2, 1, 0] = 10

    def repeated(record):
        record["topk_ids_of_layer"][2, 1, 1] = record["topk_ids_of_layer"][2, 1, 0]

    def cut(record):
        record["input_ids"] = record["input_ids"][:-1]

    def nothing(record):
        record["topk_ids_of_layer"][:] = -1

    assert "pass 7, rank 0: token 1, layer 2 has 0 choices" in message(drop_layer)
    assert "slot 10 is outside the map of 10" in message(foreign_slot)
    assert "token 1, layer 1 chose one expert twice" in message(repeated)
    assert "pass 7" in message(cut) and "cut" in message(cut)
    assert "no layer recorded a choice" in message(nothing)


def test_sglang_stat_sums_steps_and_drops_empty_ones(tmp_path, torch):
    counts = np.zeros((5, L + 1, E), np.int32)
    counts[1:3, 1:] = np.random.default_rng(0).integers(1, 9, (2, L, E))
    torch.save(
        {"rank": 0, "logical_count": torch.tensor(counts), "average_utilization_rate_over_window": None},
        tmp_path / "s.pt",
    )
    notes = []
    profile = readers.read_profile(tmp_path / "s.pt", ReadOptions(top_k=K, note=notes.append))
    assert isinstance(profile, Profile) and profile.shape.moe_layers == (1, 2, 3)
    assert np.array_equal(profile.load_LE, counts.sum(0)[1:])
    assert any("3 empty steps" in n for n in notes) and any("1 layers" in n for n in notes)
    with pytest.raises(UserError, match="loads only"):
        readers.read_trace(tmp_path / "s.pt", OPTIONS)
    with pytest.raises(UserError, match="--top-k"):
        readers.read_profile(tmp_path / "s.pt")
    assert not readers.holds_tokens(tmp_path / "s.pt")


def test_sglang_per_pass_maps_slots_to_experts(tmp_path, torch):
    slot_map = sglang_map()
    counts = np.random.default_rng(1).integers(1, 9, (2, L + 1, 10))
    counts[:, 0] = 0
    records = [{"forward_pass_id": 0, "rank": 0, "global_physical_count": torch.tensor(c)} for c in counts]
    save_records(torch, tmp_path / "p.pt", records, slot_map)
    profile = readers.read_profile(tmp_path / "p.pt", ReadOptions(top_k=K))
    expected = [[counts[:, layer, slot_map[layer] == e].sum() for e in range(E)] for layer in range(1, L + 1)]
    assert np.array_equal(profile.load_LE, expected)


def test_pt_files_never_run_code(tmp_path, torch):
    class Evil:
        def __reduce__(self):
            return (open, (str(tmp_path / "ran"), "w"))

    torch.save({"logical_count": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="plain tensors"):
        readers.read_profile(tmp_path / "evil.pt", OPTIONS)
    assert not (tmp_path / "ran").exists()
    (tmp_path / "cut.pt").write_bytes((tmp_path / "evil.pt").read_bytes()[:50])
    (tmp_path / "junk.pt").write_bytes(b"junk" * 50)
    for name in ("cut.pt", "junk.pt"):
        with pytest.raises(UserError, match=name):
            readers.read_profile(tmp_path / name, OPTIONS)


# -- vLLM -------------------------------------------------------------------------------------------------------------


def npy64(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return base64.b64encode(buffer.getvalue()).decode()


ENCODINGS = {
    "lists": lambda ids: ids.tolist(),
    "npy": lambda ids: npy64(ids.astype(np.int16)),
    "uint8 npy": lambda ids: npy64(ids.astype(np.uint8)),
    "raw": lambda ids: {
        "data": base64.b64encode(ids.astype(np.int16).tobytes()).decode(),
        "shape": list(ids.shape),
        "dtype": "int16",
    },
}


@pytest.mark.parametrize("encode", ENCODINGS.values(), ids=ENCODINGS.keys())
@pytest.mark.parametrize("lines", [False, True])
def test_vllm_responses(tmp_path, encode, lines):
    """The first response has prompt and generated rows apart, the second all rows in one field, two choices."""
    ids = routing(12)
    responses = [
        {"id": "a", "prompt_routed_experts": encode(ids[:3]), "choices": [{"routed_experts": encode(ids[3:5])}]},
        {"id": "b", "choices": [{"routed_experts": encode(ids[5:9])}, {"routed_experts": encode(ids[9:])}]},
    ]
    path = tmp_path / ("r.jsonl" if lines else "r.json")
    path.write_text("\n".join(map(json.dumps, responses)) if lines else json.dumps(responses))
    trace = readers.read_trace(path, OPTIONS)
    assert trace.seq_lens.tolist() == [5, 4, 3] and same_choices(trace.expert_ids_TLK, ids)


def test_vllm_arrays(tmp_path):
    ids = routing(7)
    np.save(tmp_path / "a.npy", ids.astype(np.int16))
    np.savez(tmp_path / "b.npz", prompt_routed_experts=ids[:4], routed_experts=ids[4:])
    for name in ("a.npy", "b.npz"):
        trace = readers.read_trace(tmp_path / name, OPTIONS)
        assert trace.seq_lens.tolist() == [7] and same_choices(trace.expert_ids_TLK, ids)
    cut = readers.read_trace(tmp_path / "a.npy", ReadOptions(num_experts=E, sequence_length=3))
    assert cut.seq_lens.tolist() == [3, 3, 1]


@pytest.mark.parametrize(
    "value, match",
    [
        (np.zeros((4, L, K), np.int16), "every id is 0"),
        (routing(4) + 1, "token . layer . chose expert 8|token \\d, layer \\d chose expert 8"),
        (np.where(np.arange(4)[:, None, None] == 2, -1, routing(4)), "token 2, layer 0 chose expert -1"),
        (np.where(np.arange(4)[:, None, None] == 2, 5, routing(4)), "token 2, layer 0 chose one expert twice"),
        (routing(4)[:, :, 0], "expected integers"),
    ],
)
def test_vllm_damage_is_named(tmp_path, value, match):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"choices": [{"routed_experts": npy64(value)}]}))
    with pytest.raises(UserError, match=match) as error:
        readers.read_trace(path, OPTIONS)
    assert "r.json" in str(error.value)


def test_vllm_cut_response(tmp_path):
    path = tmp_path / "r.json"
    path.write_text(json.dumps({"choices": [{"routed_experts": npy64(routing(40))[:200]}]}))
    with pytest.raises(UserError, match="response 0, choice 0"):
        readers.read_trace(path, OPTIONS)
    path.write_text(json.dumps({"choices": [{"text": "hi"}]}))
    with pytest.raises(UserError, match="enable-return-routed-experts"):
        readers.read_trace(path, OPTIONS)


# -- JSON lines -------------------------------------------------------------------------------------------------------


def batch_lines(ids, first_batch=0, shuffle=None):
    """Two batches; each layer of the second lists its rows in another order, told by origin_rows."""
    half = len(ids) // 2
    lines = []
    for batch, part in enumerate((ids[:half], ids[half:]), first_batch):
        for layer in range(L):
            order = np.random.default_rng(layer).permutation(len(part)) if batch else np.arange(len(part))
            rows = part[order, layer].tolist()
            lines.append({"layer": layer + 1, "batch_id": batch, "origin_rows": order.tolist(), "topk_experts": rows})
    return lines


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_jsonl_batches(tmp_path):
    ids = routing(10)
    path = write_lines(tmp_path / "t.jsonl", batch_lines(ids))
    assert readers.sniff(path) == "jsonl"
    trace = readers.read_trace(path, OPTIONS)
    assert trace.seq_lens.tolist() == [5, 5] and same_choices(trace.expert_ids_TLK, ids)
    assert trace.shape.moe_layers == (1, 2, 3)


def test_jsonl_routes_of_interleaved_requests(tmp_path):
    ids = routing(5)
    lines = [{"type": "meta", "num_experts": E, "model": "m"}]
    for token, (request, index) in enumerate([("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]):
        for layer in range(L):
            chosen = ids[token, layer].tolist()
            lines.append({"type": "route", "req_id": request, "token_idx": index, "layer": layer, "topk_ids": chosen})
    trace = readers.read_trace(write_lines(tmp_path / "t.jsonl", lines))
    assert trace.seq_lens.tolist() == [3, 2] and same_choices(trace.expert_ids_TLK, ids[[0, 2, 4, 1, 3]])


def test_jsonl_streams_in_pieces(tmp_path, monkeypatch):
    from placement import readers_json

    monkeypatch.setattr(readers_json, "_TOKENS_PER_TRACE", 8)
    ids = routing(30)
    lines = batch_lines(ids[:10]) + batch_lines(ids[10:20], 2) + batch_lines(ids[20:], 4)
    pieces = list(readers.stream(write_lines(tmp_path / "t.jsonl", lines), OPTIONS))
    assert [p.num_tokens for p in pieces] == [10, 10, 10]
    assert sum(p.load_LE().sum() for p in pieces) == 30 * L * K


@pytest.mark.parametrize(
    "damage, match",
    [
        (lambda lines: lines.pop(4), "batch 1 .up to line 5. has layers .1, 3."),
        (lambda lines: lines[4]["topk_experts"].pop(), "line 5 has 4 rows for 5 origin_rows"),
        (lambda lines: lines[4].update(origin_rows=4), "line 5 has 5 rows, origin_rows says 4"),
        (lambda lines: (lines[4]["topk_experts"].pop(), lines[4].pop("origin_rows")), "layer 2 has 4 tokens, layer 1"),
        (lambda lines: lines[1]["topk_experts"][0].pop(), "every token needs the same k"),
        (lambda lines: lines[1]["topk_experts"].__setitem__(0, [3, 3]), "token 0, layer 1 chose one expert twice"),
        (lambda lines: lines[1]["topk_experts"].__setitem__(0, [3, 99]), "token 0, layer 1 chose expert 99"),
        (lambda lines: lines[1].pop("layer"), "line 2 needs layer"),
        (lambda lines: lines[1].update(layer="first"), "line 2: layer and origin_rows must be integers"),
    ],
)
def test_jsonl_damage_is_named(tmp_path, damage, match):
    lines = batch_lines(routing(10))
    damage(lines)
    with pytest.raises(UserError, match=match):
        readers.read_trace(write_lines(tmp_path / "t.jsonl", lines), OPTIONS)


def test_jsonl_cut_in_a_line(tmp_path):
    path = write_lines(tmp_path / "t.jsonl", batch_lines(routing(10)))
    path.write_text(path.read_text()[:-20])
    with pytest.raises(UserError, match="line 6 is not JSON"):
        readers.read_trace(path, OPTIONS)


@pytest.mark.parametrize("kind", ["vllm", "jsonl"])
def test_json_that_is_nested_too_deeply(tmp_path, kind):
    (tmp_path / "deep.jsonl").write_text("[" * 50_000)
    with pytest.raises(UserError, match="deep.jsonl.*is not JSON"):
        readers.read_trace(tmp_path / "deep.jsonl", OPTIONS, kind)


def test_homes_that_are_nested_too_deeply(tmp_path):
    (tmp_path / "homes.json").write_text("[" * 50_000)
    with pytest.raises(UserError, match="cannot read homes .*homes.json"):
        read_homes(tmp_path / "homes.json", 3)


# -- ExFlow, load tables, doubt ---------------------------------------------------------------------------------------


def test_exflow(tmp_path):
    ids = routing(9, k=1)
    np.save(tmp_path / "e.npy", ids[..., 0])
    trace = readers.read_trace(tmp_path / "e.npy", ReadOptions(num_experts=E, sequence_length=4), "exflow")
    assert trace.shape.top_k == 1 and trace.seq_lens.tolist() == [4, 4, 1] and same_choices(trace.expert_ids_TLK, ids)
    trace.save(tmp_path / "t.npz")
    with pytest.raises(UserError, match="expected a .npy"):
        readers.read_trace(tmp_path / "t.npz", OPTIONS, "exflow")


@pytest.mark.parametrize("steps", [False, True])
@pytest.mark.parametrize("name", ["l.npy", "l.csv", "l.json", "named.json"])
def test_load_tables(tmp_path, name, steps):
    load = np.random.default_rng(0).integers(0, 50, (L, E))
    table = np.stack([load // 2, load - load // 2]) if steps else load
    path = tmp_path / name
    if name == "l.csv":
        if steps:
            pytest.skip("a csv has no third dimension")
        np.savetxt(path, table, delimiter=",", fmt="%d")
    elif name == "l.npy":
        np.save(path, table)
    else:
        path.write_text(json.dumps({"logical_count": table.tolist()} if name == "named.json" else table.tolist()))
    profile = readers.read_profile(path, OPTIONS, "load")
    assert np.array_equal(profile.load_LE, load) and profile.transitions_LEE is None
    assert profile.tokens == load.sum(-1).max() / K


@pytest.mark.parametrize(
    "text, match",
    [
        ("1,2\n3,nan\n", "layer 1, expert 1 has load nan"),
        ("1,2\n3,-4\n", "layer 1, expert 1 has load -4"),
        ("1,2\n3\n", "separated by commas"),
        ("0,0\n0,0\n", "every load is 0"),
        ("1e300,0\n", "no count of tokens"),
        ("", "is empty"),
    ],
)
def test_bad_load_tables(tmp_path, text, match):
    (tmp_path / "l.csv").write_text(text)
    with pytest.raises(UserError, match=match):
        readers.read_profile(tmp_path / "l.csv", OPTIONS)


def test_doubt_and_absence_are_errors(tmp_path):
    np.save(tmp_path / "two.npy", routing(4)[..., 0])
    (tmp_path / "x.json").write_text('{"hello": 1}')
    (tmp_path / "x.txt").write_text("hello")
    for path, match in [
        ("two.npy", "--from load or exflow"),
        ("x.json", "no known recording"),
        ("x.txt", "no reader"),
        ("none.npz", "no trace at"),
    ]:
        with pytest.raises(UserError, match=match):
            readers.read_trace(tmp_path / path, OPTIONS)
    np.save(tmp_path / "three.npy", routing(4))
    with pytest.raises(UserError, match="--num-experts"):
        readers.read_trace(tmp_path / "three.npy")
    with pytest.raises(UserError, match="has 3 MoE layers and 2 choices, the model given has 5 and 2"):
        readers.read_trace(tmp_path / "three.npy", ReadOptions(like=MoEShape(tuple(range(5)), E, K)))


def test_native_trace_and_truncation(tmp_path):
    ids = routing(40)
    trace = Trace(MoEShape((0, 1, 2), E, K, "m"), ids.astype(np.uint8), np.array([15, 25]))
    trace.save(tmp_path / "t.npz")
    assert same_choices(readers.read_trace(tmp_path / "t.npz").expert_ids_TLK, ids)
    data = (tmp_path / "t.npz").read_bytes()
    for cut in (10, len(data) // 2, len(data) - 4):
        (tmp_path / "cut.npz").write_bytes(data[:cut])
        with pytest.raises(UserError, match="cut.npz"):
            readers.read_trace(tmp_path / "cut.npz")


def test_a_changed_bit_is_a_mistake_of_the_file(tmp_path):
    """Whatever part of the archive it hits: headers, compressed data, the directory at its end."""
    Trace(MoEShape((0, 1, 2), E, K, "m"), routing(40).astype(np.uint8), np.array([15, 25])).save(tmp_path / "t.npz")
    data = (tmp_path / "t.npz").read_bytes()
    refused = 0
    for bit in range(0, 8 * len(data), 37):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        (tmp_path / "changed.npz").write_bytes(changed)
        try:
            readers.read_trace(tmp_path / "changed.npz")
        except UserError as error:
            refused += "changed.npz" in str(error)
    assert refused > 100


@pytest.mark.soak
def test_fifty_million_rows_in_a_stream(tmp_path):
    """58 layers x 256 experts, top-8, 13 shards: read, checked and counted within 120 s of CPU and 2 GiB."""
    import resource
    import time

    from placement.profile import profile_traces
    from placement.trace import stream_trace

    layers, experts, top_k, tokens = 58, 256, 8, 66400
    shape = MoEShape(tuple(range(3, 3 + layers)), experts, top_k, "large")
    rng = np.random.default_rng(0)
    for shard in range(13):
        first = rng.integers(0, experts, (tokens, layers, 1), dtype=np.uint8)
        ids = first + (np.arange(top_k, dtype=np.uint8) * (2 * shard + 1))  # distinct, wraps at 256
        Trace(shape, ids, np.full(tokens // 400, 400)).save(tmp_path / f"t.{shard:03d}.npz")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    profile = profile_traces(stream_trace(tmp_path / "t"))
    seconds, grown = time.process_time() - started, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert profile.tokens * layers >= 50_000_000
    assert profile.load_LE.sum() == profile.tokens * layers * top_k
    assert seconds < 120 and grown < 2 * 1024**2, f"{seconds:.1f} s, {grown / 1024**2:.2f} GiB"
