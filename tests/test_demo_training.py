"""The scripts that make the embedded model: text, split, order of data, resuming, export."""

import argparse
import gzip
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import demo_corpus  # noqa: E402
import demo_data  # noqa: E402
import demo_net  # noqa: E402
import demo_text  # noqa: E402
import train_demo_model  # noqa: E402

TINY = demo_net.Shape(64, 32, layers=2, heads=2, kv_heads=1, head_dim=16, experts=4, expert_hidden=16, context=16)


def test_html_keeps_paragraphs_and_code_and_drops_furniture():
    page = b"""<html><head><title>T</title></head><body><nav>Menu</nav><div class="docnav">Next</div>
    <h1>A  title</h1><p>One <b>bold</b>\n word &amp; more.</p><pre>if x:\n    y</pre><script>z</script></body></html>"""
    assert demo_text.html_text(page, "x.html") == "A title\n\nOne bold word & more.\n\nif x:\n    y\n"


def test_man_page_becomes_running_text():
    page = b'.\\" licence\n.TH LS 1\n.SH NAME\nls \\- list\n.PP\nUse\n.BR ls (1)\nwith \\fB\\-a\\fR.\n'
    assert demo_text.man_text(gzip.compress(page), "ls.1.gz") == "NAME\n\nls - list\n\nUse ls(1) with -a.\n"


@pytest.mark.parametrize(
    "path, header",
    [("a.py", "#!/bin/x\n# Copyright A\n# B\n\n"), ("a.go", "// Licensed B\n\n"), ("a.c", "/* Copyright C\n c */\n\n")],
)
def test_source_loses_its_licence_header_only(path, header):
    code = "/* keep */\nint x;\n" if path == "a.c" else "x = 1  # keep\n"
    assert demo_text.source_text((header + code).encode(), path).endswith(code.split("\n")[-2] + "\n")
    assert "opyright" not in demo_text.source_text((header + code).encode(), path)
    assert demo_text.source_text(b"1, 2, 3, 4, 5, 6,\n", path) == ""
    assert demo_text.source_text(b"\xff\xfe", path) == ""


def test_split_holds_out_whole_documents_and_drops_near_copies():
    texts = {"\n".join(f"statement number {i} of file {j};" for i in range(40)) for j in range(300)}
    copies = {text + "\nanother last line of it;" for text in list(texts)[:50]}
    parts = {name: text.split("\0") for name, text in demo_corpus.split(texts | copies, "c").items()}
    assert len(parts["train"]) + len(parts["heldout"]) == 300 and 3 <= len(parts["heldout"]) <= 40
    first_lines = {name: {text.split("\n")[0] for text in found} for name, found in parts.items()}
    assert not first_lines["train"] & first_lines["heldout"]


def test_every_epoch_visits_every_window_once():
    order = demo_data.BatchOrder((5000,) * 6, batch=20, window=16, seed=3)
    windows = (5000 - 16) // 16
    per_step = order.counts()[0]
    assert sum(order.counts()) == 20 and all(order.counts())
    steps = windows // per_step
    seen = np.concatenate([order.starts(step)[:per_step] for step in range(steps)])
    assert len(set(seen.tolist())) == steps * per_step and len({start % 16 for start in seen.tolist()}) == 1
    assert seen.min() >= 0 and seen.max() + 17 <= 5000
    assert np.array_equal(order.starts(7), demo_data.BatchOrder((5000,) * 6, 20, 16, 3).starts(7))
    assert not np.array_equal(order.starts(7), demo_data.BatchOrder((5000,) * 6, 20, 16, 4).starts(7))


def test_entropies_are_their_formulas():
    random = np.random.default_rng(0)
    train, heldout = random.integers(0, 5, 4000).astype(np.uint16), random.integers(0, 5, 500).astype(np.uint16)
    found = demo_data.entropies(train, heldout, 6)
    pairs = list(zip(heldout[:-1].tolist(), heldout[1:].tolist()))
    bigram = -sum(np.log(pairs.count(p) / sum(q[0] == p[0] for q in pairs)) for p in pairs) / len(pairs)
    assert found["bigram"] == pytest.approx(bigram)
    assert found["bigram"] < found["unigram"] < np.log(5)
    assert found["bigram"] < found["bigram_trained"] < 1.02 * np.log(5)  # below would be a table that saw the future


def run(work: Path, steps: int, stop: int | None = None, noise: bool = False) -> demo_net.DemoNet:
    """Train the tiny net on six random streams; ``stop`` ends the process's share of the work early."""
    recipe = train_demo_model.Recipe(replace(TINY, noise=noise), steps, batch=12, micro_batch=6, lr=0.01, warmup=2)
    train = [np.random.default_rng(i).integers(0, 64, 400).astype(np.uint16) for i in range(6)]
    args = argparse.Namespace(device="cpu", work=work, no_compile=True, noise=noise)
    net = demo_net.DemoNet(recipe.shape, recipe.seed)
    if stop is not None:
        with pytest.raises(KeyboardInterrupt), pytest.MonkeyPatch.context() as patch:
            patch.setattr(train_demo_model, "SAVE_EVERY", stop)
            saved = train_demo_model.save

            def save_and_stop(*arguments):
                saved(*arguments)
                raise KeyboardInterrupt

            patch.setattr(train_demo_model, "save", save_and_stop)
            train_demo_model.fit(net, train, recipe, args)
        net = demo_net.DemoNet(recipe.shape, recipe.seed + 1)
    train_demo_model.fit(net, train, recipe, args)
    return net


@pytest.mark.parametrize("noise", [False, True])
def test_a_stopped_run_goes_on_to_the_same_weights(tmp_path, noise):
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    whole, parts = run(tmp_path / "whole", 6, noise=noise), run(tmp_path / "parts", 6, stop=3, noise=noise)
    for (name, a), b in zip(whole.named_parameters(), parts.parameters()):
        assert torch.equal(a, b), name


def test_a_run_of_another_recipe_is_not_resumed(tmp_path):
    run(tmp_path, 4)
    with pytest.raises(SystemExit, match="another recipe"):
        run(tmp_path, 5)


def test_training_learns_and_steps_are_orthogonal(tmp_path):
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(demo_net.orthogonal(matrices).float())
    assert values.min() > 0.5 and values.max() < 1.4
    token_BS = torch.arange(24).repeat(4, 1)[:, :17]
    net = demo_net.DemoNet(TINY, 0)
    before = net(token_BS)[0].item()
    for _ in range(30):
        loss, balance, _ = net(token_BS)
        (loss / token_BS.numel() + 0.01 * balance).backward()
        for stepper in demo_net.optimizers(net, 0.01):
            stepper.step()
        net.zero_grad()
    assert net(token_BS)[0].item() < 0.2 * before


def test_wide_mlp_equals_sparse_experts():
    layer = demo_net.Experts(TINY)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, 0, 0.3, torch.Generator().manual_seed(parameter.numel()))
    x_TD = torch.randn(9, TINY.hidden, generator=torch.Generator().manual_seed(1))
    y_TD, _, load_E = layer(x_TD)
    routed = demo_net.route_for_training(layer.router(x_TD), demo_net.RULE, TINY.top_k)
    for t in range(9):
        expected_D = torch.zeros(TINY.hidden)
        for weight, e in zip(routed.weight_TK[t], routed.expert_TK[t]):
            gate, up = (layer.gate_up[i, e] @ x_TD[t] for i in range(2))
            expected_D += weight * (layer.down[e].T @ (torch.nn.functional.silu(gate) * up))
        assert torch.allclose(y_TD[t], expected_D, atol=1e-4)
    assert load_E.sum() == 9 * TINY.top_k


def test_exported_weights_are_transformers_model(tmp_path):
    from demo_report import Made, parity, write_checkpoint
    from tokenizers import Tokenizer, models

    net = demo_net.DemoNet(TINY, 0)
    for parameter in net.parameters():
        parameter.data.mul_(3)
    heldout = {"c": np.arange(40).astype(np.uint16)}
    made = Made(net, Tokenizer(models.BPE()), heldout, heldout, {})
    write_checkpoint(made, tmp_path)
    assert parity(made, tmp_path) < 1e-5
