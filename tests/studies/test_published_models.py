"""analyze.py, and evaluate.py without a block, with --init_from, on folders that `transformers` and
export.py made: against numbers of `transformers`' own streams."""

import json
import math

import pytest
import torch
import torch.nn.functional as F

import analyze
from interop.huggingface.write import write_pretrained
from nanodnt.data.tokenizer import Tokenizer
from studies.analysis import streams
from studies.analysis.pipeline import FIGURES
from support import evaluation
from support.models import S5, build
from support.peers import CHARS, edit_config, make_peer, save_tokenizer
from support.runs import call as call_main
from support.tolerances import FORWARD

BYTES, T, TEXT = (
    Tokenizer.meta_for("bytes"),
    32,
    "Angles between what enters and what leaves a block. " * 3,
)


@pytest.fixture
def made(tmp_path):
    """A folder with a text of four windows and a part of a fifth."""
    (tmp_path / "text.txt").write_text(TEXT)
    return tmp_path


def save(name, folder):
    """A tiny model of `transformers` with a tokenizer of bytes, in a folder."""
    peer = make_peer(name, vocab_size=257)
    peer.save_pretrained(folder / "peer")
    save_tokenizer(BYTES, folder / "peer")
    return peer.double()


def call(made, *argv):
    flags = (
        f"--init_from={made / 'peer'}",
        f"--dataset={made / 'text.txt'}",
        f"--out={made / 'out'}",
        "--device=cpu",
    )
    names = {flag.split("=")[0] for flag in argv}
    return call_main(
        analyze.main, *argv, *(flag for flag in flags if flag.split("=")[0] not in names)
    )


def found(made, name):
    (run,) = json.loads((made / "out" / f"{name}.json").read_text())["runs"].values()
    return run[-1]


def windows():
    """(inputs, targets) of all whole windows of the text, which follows the end of text."""
    ids = torch.tensor([256, *TEXT.encode()])
    n = (len(ids) - 1) // T
    return ids[: n * T].view(n, T), ids[1 : n * T + 1].view(n, T)


@torch.no_grad()
def their_distance(peer, idx):
    """Angular distance of each two streams in float64; hidden_states ends with the final norm, so
    that is hooked."""
    last, norm = [], getattr(peer.base_model, "norm", None) or peer.base_model.ln_f
    handle = norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))
    *xs, _ = peer(idx, output_hidden_states=True).hidden_states
    handle.remove()
    xs.append(last[0])
    angles = [
        [F.cosine_similarity(x, y, dim=-1).clamp(-1, 1).arccos().mean() / math.pi for y in xs]
        for x in xs
    ]
    return torch.tensor(angles).fill_diagonal_(0)


@pytest.mark.parametrize("name", ["GPT-2", "Qwen2"])
def test_depth_of_a_published_model_is_that_of_transformers(name, made, capsys):
    peer, (idx, targets) = save(name, made), windows()
    assert call(made, "--figures=angular,removal,tracking,experts,sharpness", "--draws=1") == 0
    output = capsys.readouterr().out
    assert (
        "tracking is left out: a model of Hugging Face has no record" in output
        and "experts is left out" in output
    )

    assert found(made, "sharpness")["types"]["qk"]["lr_ratio"] is None
    angular, distance = found(made, "angular"), their_distance(peer, idx)
    assert (angular["tokens"], angular["step"], angular["checkpoint"]) == (4 * T, 0, "peer")
    assert (torch.tensor(angular["distance"], dtype=torch.float64) - distance).abs().max() < FORWARD

    def loss():
        with torch.no_grad():
            return F.cross_entropy(
                peer(idx, use_cache=False).logits.flatten(0, 1), targets.flatten()
            ).item()

    (made / "whole.txt").write_text(TEXT[: 4 * T])
    flags = dict(
        out_dir=made / "out", init_from=made / "peer", tasks="text", input=made / "whole.txt"
    )
    assert evaluation.call(**flags, without_block="all") == 0
    layers, whole = getattr(peer.base_model, "layers", None) or peer.base_model.h, loss()
    kept = list(layers)
    for i, drop in enumerate(found(made, "removal")["drop"]):
        del layers[:]
        layers.extend(kept[:i] + kept[i + 1 :])
        peer.config.num_hidden_layers = len(layers)
        assert loss() - whole == pytest.approx(drop, abs=2 * whole * FORWARD) and abs(drop) > 1e-3
        evaluated = evaluation.values(
            made / "out", f"text {made / 'whole.txt'} without block {i + 1}"
        )
        assert evaluated["nats_per_token"] == pytest.approx(loss(), rel=FORWARD)


@pytest.mark.parametrize("names", ["angular,jacobian", pytest.param("all", marks=pytest.mark.deep)])
def test_an_export_of_ours_and_a_prepared_dataset(names, made):
    """All figures but those that need a record of training."""
    model = build(dict(S5, vocab_size=257, block_size=T), dtype=torch.float32)
    write_pretrained(model, BYTES, made / "peer", "nanodnt", check=False)
    assert call(made, f"--figures={names}", "--tokens=128", "--draws=1") == 0
    drawn = (
        set(FIGURES) - {"alpha", "experts", "tracking"} if names == "all" else set(names.split(","))
    )
    assert {path.stem for path in (made / "out").glob("*.png")} == drawn
    wanted = streams.angular_distance(model, [(windows()[0], None)])
    assert (
        torch.tensor(found(made, "angular")["distance"]).sub(torch.tensor(wanted)).abs().max()
        < FORWARD
    )
    data = evaluation.make_byte_dataset(made / "data")
    assert call(made, "--figures=variance", f"--dataset={data}", "--tokens=64") == 0
    assert found(made, "variance")["tokens"] == 64


BAD = {  # flags → words of the one line
    "no dataset": (["--dataset="], "init_from needs --dataset=FILE"),
    "no such text": (["--dataset=nowhere"], "input nowhere is not readable"),
    "a run too": (["out/run"], "is in place of runs: leave it out, or out/run"),
    "no folder": (["--init_from=no/such/folder"], "neither a folder nor a name"),
    "training alone": (["--figures=tracking"], "has no record of its training"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_flags_in_one_line(case, made, capsys):
    save("GPT-2", made)
    argv, words = BAD[case]
    assert_refused(made, capsys, words, *argv)


def test_bad_folders_and_texts_in_one_line(made, capsys):
    save("GPT-2", made)
    (made / "text.txt").write_text("a" * (T - 1))
    assert_refused(made, capsys, "text.txt has 31 tokens, too few for a window of 32")
    (made / "text.txt").write_text("a" * T)
    assert call(made, "--figures=angular") == 0 and found(made, "angular")["tokens"] == T
    (made / "peer" / "tokenizer.json").unlink()
    assert_refused(made, capsys, "has no tokenizer.json")
    save_tokenizer(CHARS, made / "peer")
    assert_refused(made, capsys, "can be evaluated on prepared datasets only")
    edit_config(made / "peer", model_type="mamba")
    assert_refused(made, capsys, "model_type='mamba' is not one of gpt2, llama, qwen2, qwen3")


def assert_refused(made, capsys, words, *argv):
    capsys.readouterr()
    code, error = call(made, *argv), capsys.readouterr().err
    assert (
        code in (1, 2) and error.startswith("error: ") and error.count("\n") == 1 and words in error
    ), error
