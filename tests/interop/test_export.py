"""Exports: an architecture of `transformers` that computes the same, where there is one; tokenizers; the command."""

import json
import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import export
import sample
from interop.huggingface import write
from interop.huggingface.read import load_pretrained
from interop.huggingface.tokenizer_files import make_json, read_tokenizer, tokenizer_files
from interop.huggingface.write import write_pretrained
from nanodnt.data.tokenizer import Tokenizer, json_meta, same_tokenizer
from nanodnt.generate import generate
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.trained import load_trained
from support.models import ALL, LAYERNORM, LLAMA, S5, batch, build, error
from support.peers import CHARS, make_peer
from support.prepared import ids_of, load_script, needs_gpt2
from support.runs import ROOT, make_dataset, run

QWEN3 = LLAMA | dict(qk_norm=True, head_size=6)
# name: (flags, the architecture). What a target has no place for is multiplied into the weights.
EXPORTS = {
    "GPT-2": (LAYERNORM, "gpt2"),
    "GPT-2 without biases, relu, untied": (dict(norm="layernorm", mlp="relu", tie_weights=False), "gpt2"),
    "GPT-2, LNS, no gains": (LAYERNORM | dict(lns="norm", gain="none"), "gpt2"),
    "GPT-2, LNS learned, LayerScale": (LAYERNORM | dict(lns="norm", lns_learn=True, branch_scale="layerscale"), "gpt2"),
    "GPT-2, an untied embedding's scale": (LAYERNORM | dict(embed_scale=True, tie_weights=False), "gpt2"),
    "GPT-2, relu2": (LAYERNORM | dict(mlp="relu2", n_ff=24), "gpt2"),
    "LLaMA": (LLAMA, "llama"),
    "SmolLM": (LLAMA | dict(tie_weights=True), "llama"),
    "LLaMA, LNS": (LLAMA | dict(lns="norm", lns_power=0.7), "llama"),
    "LLaMA, LNS on the branch": (LLAMA | dict(lns="branch", bias=True), "llama"),
    "LLaMA, HG and DP as magnitude and direction": (
        LLAMA | dict(gain="branch", gain_out="scale", gain_param="magdir", bias=True),
        "llama",
    ),
    "LLaMA, SkipInit, sigmaReparam, embedding's scale": (
        LLAMA | dict(branch_scale="skipinit", sigma_reparam=True, embed_scale=True),
        "llama",
    ),
    "Qwen3": (QWEN3, "qwen3"),
    "Qwen3, LNS, ER": (QWEN3 | dict(lns="norm", gain_param="expmagdir", tie_weights=True), "qwen3"),
    "Mixtral": (LLAMA | dict(n_expert=4), "mixtral"),
    "Mixtral, LNS, HG and DP as magnitude and direction": (
        LLAMA | dict(n_expert=3, lns="norm", gain="branch", gain_out="scale", gain_param="magdir"),
        "mixtral",
    ),
    "Mixtral, LayerScale, one expert": (
        LLAMA | dict(n_expert=2, n_expert_active=1, branch_scale="layerscale", balance="none"),
        "mixtral",
    ),
    "Qwen3-MoE": (QWEN3 | dict(n_expert=5, n_expert_active=3), "qwen3_moe"),
    "Qwen3-MoE, HG, raw weights": (QWEN3 | dict(n_expert=4, gain="branch", router_norm=False), "qwen3_moe"),
}
# name: (flags, target, words of the refusal)
UNFIT = {
    "no pre norm in the FFN": (LLAMA | dict(pre_norm="attn"), "llama", "pre_norm=attn both"),
    "Mix-LN": (LLAMA | dict(post_norm_blocks=1), "llama", "post_norm"),
    "LNS on the stream": (LLAMA | dict(lns="residual"), "llama", "lns=residual"),
    "LNS before the norm": (LLAMA | dict(lns="input"), "llama", "lns=input"),
    "DNP": (LLAMA | dict(gain_out="norm"), "llama", "gain_out=norm"),
    "a tied embedding's scale": (LLAMA | dict(tie_weights=True, embed_scale=True), "llama", "embed_scale tie_weights"),
    "LLaMA as GPT-2": (LLAMA, "gpt2", "norm=rmsnorm pos=rope mlp=swiglu n_kv_head=2"),
    "GPT-2 as LLaMA": (LAYERNORM, "llama", "norm=layernorm pos=learned mlp=gelu"),
    "no QK-norm": (LLAMA, "qwen3", "qk_norm=False"),
    "biases": (QWEN3 | dict(bias=True), "qwen3", "bias=True"),
    "experts as LLaMA": (LLAMA | dict(n_expert=4), "llama", "n_expert=4 (0 there)"),
    "dense as Mixtral": (LLAMA, "mixtral", "n_expert=0 (some there)"),
    "shared experts": (LLAMA | dict(n_expert=4, n_expert_shared=1), "mixtral", "n_expert_shared=1 (0 there)"),
    "other scores": (LLAMA | dict(n_expert=4, router="sigmoid"), "mixtral", "router=sigmoid (softmax there)"),
    "scaled experts": (LLAMA | dict(n_expert=4, router_scale=2.5), "mixtral", "router_scale=2.5 (1.0 there)"),
    "raw weights": (LLAMA | dict(n_expert=4, router_norm=False), "mixtral", "router_norm=False (True there)"),
    "a bias on the choice": (LLAMA | dict(n_expert=4, balance="bias"), "mixtral", "balance=bias (loss there)"),
    "experts with biases": (LLAMA | dict(n_expert=4, bias=True), "mixtral", "bias=True (False there)"),
    "DNP on experts": (LLAMA | dict(n_expert=4, gain_out="norm"), "mixtral", "gain_out=norm"),
}


def write_it(model, folder, **how) -> str:
    """Export a model of 50 characters, without the comparison that an export makes itself; the architecture."""
    return write_pretrained(model, CHARS, folder, **dict(check=False) | how)[0]


def load(folder):
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("name", EXPORTS)
def test_transformers_computes_the_same(name, tmp_path):
    layout, kind = EXPORTS[name]
    ours, idx = build(layout, dtype=torch.float32), batch()[0]
    assert write_it(ours, tmp_path / "it") == kind
    theirs = load(tmp_path / "it")
    assert error(theirs(idx).logits, ours(idx)[0]) < 1e-5
    new = ours.config.block_size - 4
    expected = generate(ours, idx[:, :4], new, temperature=0)
    assert torch.equal(theirs.generate(idx[:, :4], max_new_tokens=new, do_sample=False, pad_token_id=0), expected)

    back = load_pretrained(str(tmp_path / "it"))
    assert error(back.model(idx)[0], ours(idx)[0]) < 1e-5 and back.meta == CHARS
    assert write_it(back.model, tmp_path / "again") == kind
    assert (tmp_path / "again" / "config.json").read_text() == (tmp_path / "it" / "config.json").read_text()


@pytest.mark.parametrize("name", UNFIT)
def test_what_a_target_lacks_is_named(name, tmp_path):
    layout, target, words = UNFIT[name]
    ours = build(layout, dtype=torch.float32)
    with pytest.raises(ValueError) as caught:
        write_it(ours, tmp_path / "it", target=target)
    message = str(caught.value)
    assert message.startswith(f"--target={target} cannot hold this layout: ") and "\n" not in message
    assert [word for word in words.split() if word not in message] == [], message
    assert not list(tmp_path.iterdir())


def test_auto_never_changes_the_function(tmp_path):
    """Of every scheme of the tests: what auto writes as an architecture of `transformers` is the same function."""
    kinds = {}
    for name, (layout, _) in ALL.items():
        model, idx = build(layout, dtype=torch.float32), batch()[0]
        kind, config, _ = write.convert(model, "auto")
        kinds.setdefault(kind, []).append(name)
        if kind != "nanodnt":
            write_it(model, tmp_path / str(len(kinds[kind])) / kind)
            theirs = load(tmp_path / str(len(kinds[kind])) / kind)
            assert error(theirs(idx).logits, model(idx)[0]) < 1e-5, name
    assert kinds["gpt2"] == ["pre-LN, bias", "pre-LN, no bias", "LNS, bias", "no gains, bias"]
    assert kinds["llama"] == ["llama", "LNS 1/l, ffn, llama"] and len(kinds["nanodnt"]) > 50


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision(dtype, tmp_path):
    ours = build(LLAMA, dtype=torch.float32)
    write_it(ours, tmp_path / "it", dtype=dtype, check=True)
    theirs = load(tmp_path / "it")
    assert theirs.dtype == dtype and json.loads((tmp_path / "it" / "config.json").read_text())["dtype"] in str(dtype)
    idx = batch()[0]
    assert 1e-4 < error(theirs.float()(idx).logits, ours(idx)[0]) < 0.1  # rounded, and not more


# ---------------------------------------------------------------------------------------------------------- tokenizers

TEXT = "def f(x):\n    return  'naïve ☃'  # 日本\n\n\tThe end, isn't it?"


def metas():
    import tokenizers
    from tokenizers import models, normalizers, processors

    bpe = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(["<s>", "</s>", "▁", *"abcdef"])}, []))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    bpe.decoder = tokenizers.decoders.Sequence(
        [tokenizers.decoders.Replace("▁", " "), tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)]
    )
    config = {"bos_token": "<s>", "eos_token": "</s>", "x": [1], "tokenizer_class": "LlamaTokenizer"}
    llama = json_meta(bpe.to_str(), "</s>", "<s>") | {"json_config": config}
    return {
        "bytes": (Tokenizer.meta_for("bytes"), TEXT),
        "chars": (Tokenizer.meta_for("chars", sorted(set(TEXT))), TEXT),
        "gpt2_4096": (Tokenizer.meta_for("gpt2_4096"), TEXT),
        "gpt2": (Tokenizer.meta_for("gpt2"), TEXT),
        "like LLaMA's": (llama, "abc fed  a"),
    }


def save_tokenizer(meta, folder, block_size=32):
    for file, text in tokenizer_files(meta, block_size).items():
        (folder / file).write_text(text, encoding="utf-8")


def transformers_tokenizer(folder):
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(
    "name", ["bytes", "chars", "gpt2_4096", pytest.param("gpt2", marks=needs_gpt2), "like LLaMA's"]
)
def test_auto_tokenizer_gives_the_same_ids(name, tmp_path):
    meta, text = metas()[name]
    save_tokenizer(meta, tmp_path, block_size=99)
    ours, theirs = Tokenizer(meta), transformers_tokenizer(tmp_path)
    ids = theirs(text)["input_ids"]
    assert ids == [*ours.start, *ours.encode(text)] and (name == "like LLaMA's") == (ours.start == [0])
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids) == text
    assert theirs.eos_token_id == meta["eot"] and theirs.model_max_length == 99
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    back = read_tokenizer(tmp_path)
    assert same_tokenizer(back, meta) and Tokenizer(back).encode(text) == ours.encode(text)
    assert back["tokenizer"] == ("json" if name == "gpt2" else meta["tokenizer"])
    assert name == "gpt2" or back == meta | ({"json_config": config} if "json" in meta else {})
    kept = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    assert "json" not in meta or (config.items() >= kept.items() and "x" not in config)


def test_the_same_tokenizer():
    """By what it does: transformers saves padding and truncation with it, and writes merges in two ways."""
    import tokenizers

    llama = metas()["like LLaMA's"][0]
    for meta in (llama, json_meta(make_json(Tokenizer.meta_for("gpt2_4096")), None)):
        used = tokenizers.Tokenizer.from_str(meta["json"])
        used.enable_padding(pad_id=1)
        used.enable_truncation(9)
        found = json.loads(used.to_str())
        merges = found["model"]["merges"]
        found["model"]["merges"] = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]
        ends = [used.id_to_token(meta[name]) if meta[name] is not None else None for name in ("eot", "bos")]
        assert same_tokenizer(meta, json_meta(json.dumps(found), *ends))
        assert not same_tokenizer(meta, meta | {"eot": 2}) and not same_tokenizer(meta, Tokenizer.meta_for("bytes"))
        split = None if found["pre_tokenizer"] else {"type": "Whitespace"}
        for change in (dict(normalizer={"type": "Lowercase"}), dict(pre_tokenizer=split)):
            assert not same_tokenizer(meta, json_meta(json.dumps(found | change), *ends)), change
    bare = json.dumps(json.loads(llama["json"]) | {"post_processor": None})
    assert not same_tokenizer(llama, json_meta(bare, "</s>", "<s>"))  # no <s> before a text
    assert same_tokenizer(CHARS, CHARS | {"source": "elsewhere"}) and not same_tokenizer(CHARS, metas()["chars"][0])


def test_a_meta_of_earlier_versions_has_no_id():
    for meta, _ in metas().values():
        old = {name: value for name, value in meta.items() if name != "tokenizer_id"}
        assert same_tokenizer(old, meta) and same_tokenizer(meta, old) and same_tokenizer(old, old)
    assert not same_tokenizer(old, {**CHARS})


@pytest.mark.parametrize("where", ["tokenizer_config.json", "special_tokens_map.json", "config.json", "nowhere"])
def test_where_the_end_of_text_is_named(where, tmp_path):
    meta = metas()["like LLaMA's"][0]
    save_tokenizer(meta, tmp_path)
    named = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    named = {"eos_token_id": [1, 5], "bos_token_id": 0} if where == "config.json" else named
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if where != "nowhere":
        (tmp_path / where).write_text(json.dumps(named))
    found = read_tokenizer(tmp_path)
    assert (found["eot"], found["bos"]) == ((None, None) if where == "nowhere" else (1, 0))
    again = json.loads(tokenizer_files(found, 9)["tokenizer_config.json"])
    assert [again.get("eos_token"), again.get("bos_token")] == ([None] * 2 if where == "nowhere" else ["</s>", "<s>"])


def test_a_tokenizer_of_ours_with_a_start_is_another(tmp_path):
    """As some make it of GPT-2's: end of text before every text."""
    import tokenizers

    made = tokenizers.Tokenizer.from_str(make_json(Tokenizer.meta_for("gpt2_4096")))
    template = tokenizers.processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 4095)]
    )
    made.post_processor = template
    save_tokenizer(Tokenizer.meta_for("gpt2_4096"), tmp_path)
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    found = read_tokenizer(tmp_path)
    assert found["tokenizer"] == "json" and Tokenizer(found).start == [4095] == Tokenizer(found).new_document()


def test_a_text_begins_with_the_declared_token():
    """Where the template has none: for an empty prompt, and in evaluations, as in transformers' harness."""
    meta = metas()["like LLaMA's"][0]
    meta |= {"json": json.dumps(json.loads(meta["json"]) | {"post_processor": None})}
    assert Tokenizer(meta).start == [] and Tokenizer(meta).new_document() == [0]
    assert Tokenizer(meta | {"bos": None}).new_document() == [1] == [Tokenizer(meta | {"bos": None}).bos]
    with pytest.raises(ValueError, match="eot, bos"):
        Tokenizer(meta | {"bos": 999})


def test_a_text_without_ids_is_one_line():
    import tokenizers

    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"word": 0}))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    meta = json_meta(made.to_str(), None)
    assert Tokenizer(meta).encode("word word") == [0, 0]
    with pytest.raises(ValueError, match="the tokenizer cannot encode this text"):
        Tokenizer(meta).encode("another")


# --------------------------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run directory of a DNT."""
    folder = tmp_path_factory.mktemp("export")
    dataset = make_dataset(folder / "data")
    assert run(out_dir=folder / "run", dataset=dataset, max_iters=10) == 0
    return folder / "run"


def call(monkeypatch, *argv) -> int:
    monkeypatch.setattr(sys, "argv", ["export.py", *map(str, argv)])
    return export.main()


def test_the_command(begun, tmp_path, monkeypatch, capsys):
    """What lies beside stays, and transformers' own copies of code, in the user's home, do not grow."""
    from transformers import dynamic_module_utils

    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    to, path = tmp_path / "a" / "b", list(sys.path)
    (tmp_path / "a" / "b.partial").mkdir(parents=True)
    assert call(monkeypatch, f"--out_dir={begun}", f"--to={to}") == 0
    out = capsys.readouterr().out
    assert f"best.pt, step 10, as nanodnt in float32: {to} (transformers computes the same)" in out
    assert "trust_remote_code=True" in out
    assert sorted(p.name for p in to.parent.iterdir()) == ["b", "b.partial"] and sys.path == path
    assert not (tmp_path / "cache").exists()
    names = {path.name for path in to.iterdir()}
    assert names >= {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "model.py"}
    assert len({path.stat().st_mode for path in to.iterdir()}) == 1  # as readable as other files
    found = load_pretrained(str(to))
    saved = load_checkpoint(begun / "best.pt")
    assert all(torch.equal(t, saved["model"][name]) for name, t in found.model.state_dict().items())
    assert found.meta["chars"] == saved["meta"]["chars"] and found.model.config.mid_norm == "both"


def test_bad_input_is_one_line_and_nothing_is_written(begun, tmp_path, monkeypatch, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    cases = {
        f"--out_dir={begun}": "--to=FOLDER is needed",
        f"--out_dir={begun} --to={tmp_path / 'there'}": "there exists already",
        f"--out_dir={begun} --to={tmp_path / 'file'}": "file exists already",
        f"--out_dir={begun} --to={tmp_path / 'file' / 'x'}": "cannot write",
        f"--out_dir={begun} --to={tmp_path / 'x'} --target=llama": "--target=llama cannot hold this layout",
        f"--out_dir={tmp_path} --to={tmp_path / 'x'}": "there is no checkpoint",
        f"--out_dir={begun} --to={tmp_path / 'x'} --checkpoint=first.pt": "best.pt, last.pt",
    }
    for argv, words in cases.items():
        assert call(monkeypatch, *argv.split()) == 1, argv
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err
        assert sorted(tmp_path.rglob("*")) == before


def change_the_network(monkeypatch):
    """Attention of another width of the softmax, as a fork might change it: no export can see that in the slots."""
    from layers import attention

    attend = attention.F.scaled_dot_product_attention
    other = SimpleNamespace(**vars(attention.F))
    other.scaled_dot_product_attention = lambda q, *args, **how: attend(q * 1.5, *args, **how)
    monkeypatch.setattr(attention, "F", other)


def test_a_changed_network_is_not_exported_as_another(tmp_path, monkeypatch):
    ours = build(LLAMA, dtype=torch.float32)
    change_the_network(monkeypatch)
    with pytest.raises(ValueError, match="transformers computes something else from the export as llama"):
        write_it(ours, tmp_path / "it", check=True)
    assert not list(tmp_path.iterdir())


def test_without_transformers_nothing_is_compared(begun, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert call(monkeypatch, f"--out_dir={begun}", f"--to={tmp_path / 'x'}") == 0
    assert "(not compared: transformers is not installed)" in capsys.readouterr().out
    assert call(monkeypatch, f"--out_dir={begun}", f"--to={tmp_path / 'y'}", "--compare=False") == 0
    assert "(not compared)" in capsys.readouterr().out


def test_a_full_disk_is_one_line(begun, tmp_path):
    code = "import resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000)); import export; "
    code += f"sys.argv = ['export.py', '--out_dir={begun}', '--to={tmp_path / 'x'}', '--compare=False']; "
    argv = [sys.executable, "-c", code + "sys.exit(export.main())"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 1 and done.stderr.startswith("error: cannot write") and done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_sigterm_leaves_nothing(begun, tmp_path, monkeypatch):
    monkeypatch.setattr(write, "save_tensors", lambda tensors, folder: os.kill(os.getpid(), signal.SIGTERM))
    kept = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as stopped:
            call(monkeypatch, f"--out_dir={begun}", f"--to={tmp_path / 'x'}")
    finally:
        signal.signal(signal.SIGTERM, kept)
    assert stopped.value.code == 143 and not list(tmp_path.iterdir())


def test_transformers_that_cannot_load(begun, tmp_path, monkeypatch, capsys):
    import transformers

    def fail(*args, **how):
        raise OSError("no such model\nat all")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    assert call(monkeypatch, f"--out_dir={begun}", f"--to={tmp_path / 'x'}") == 1
    err = capsys.readouterr().err
    assert "transformers cannot load the export as nanodnt (OSError: no such model), nothing was written" in err
    assert "--compare=False" in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["GPT-2", "LLaMA, LNS", "Qwen3", "DNT"])
def test_a_pipeline_writes_what_we_write(name, tmp_path, monkeypatch):
    import transformers

    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    layout, meta = EXPORTS[name][0] if name in EXPORTS else S5, Tokenizer.meta_for("gpt2_4096")
    ours = build(layout | dict(vocab_size=4096, block_size=32), dtype=torch.float32)
    write_pretrained(ours, meta, tmp_path / "it", check=False)
    writer = transformers.pipeline("text-generation", model=str(tmp_path / "it"), trust_remote_code=True)
    tokenizer, prompt = Tokenizer(meta), "The end of"
    idx = torch.tensor([tokenizer.encode(prompt)])
    expected = generate(ours, idx, 12, temperature=0, stop=4095)[0].tolist()
    how = dict(max_new_tokens=12, do_sample=False, clean_up_tokenization_spaces=False)
    assert writer(prompt, **how)[0]["generated_text"] == tokenizer.decode(expected)
    several = writer([prompt, "It"], batch_size=1, **how)
    assert several[0][0]["generated_text"] == tokenizer.decode(expected)


# ------------------------------------------------------------------------------------- there, trained, and back again


@pytest.mark.parametrize("name", ["LLaMA", "Qwen3-MoE"])
def test_a_folder_is_trained_and_exported(name, tmp_path, monkeypatch, capsys):
    peer, idx = make_peer(name), batch()[0]
    peer.save_pretrained(tmp_path / "theirs")
    save_tokenizer(CHARS, tmp_path / "theirs")
    dataset = make_dataset(tmp_path / "data")
    config = dict(dataset=dataset, out_dir=tmp_path / "run", init_from=tmp_path / "theirs", block_size=16)
    still = config | dict(out_dir=tmp_path / "still", max_iters=1, learning_rate=1e-12, min_lr=1e-12)
    assert run(**still) == 0
    same = load_trained(str(tmp_path / "still"), "last.pt").model
    assert error(same(idx)[0], peer(idx).logits) < 1e-5
    assert run(**config) == 0
    out = capsys.readouterr().out
    assert f"weights: {tmp_path / 'theirs'}" in out and "block_size" in out
    end = load_trained(str(tmp_path / "run"), "last.pt")
    assert end.model.config.block_size == 16 and end.step == 20
    assert call(monkeypatch, f"--out_dir={tmp_path / 'run'}", f"--to={tmp_path / 'ours'}") == 0
    theirs = load(tmp_path / "ours")
    assert (theirs(idx).logits - end.model(idx)[0]).abs().max() < 1e-5
    assert error(theirs(idx).logits, peer(idx).logits) > 1e-2  # it has learned something


def test_a_tokenizer_of_theirs(tmp_path, monkeypatch, capsys):
    """A LLaMA with a tokenizer like LLaMA's: data with <s> and </s>, trained on, sampled from, exported with it."""
    meta, text = metas()["like LLaMA's"]
    make_peer("LLaMA", vocab_size=meta["vocab_size"]).save_pretrained(tmp_path / "theirs")
    save_tokenizer(meta, tmp_path / "theirs")
    (tmp_path / "texts").mkdir()
    lines = "abc\nabc fed\n"  # where texts of other tokenizers are cut
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{text} {lines * i}")
    local = load_script("local")
    monkeypatch.setattr("nanodnt.prepare.text.JOB_CHARS", 20)  # documents are not cut all the same
    argv = [f"--input={tmp_path / 'texts'}", f"--tokenizer={tmp_path / 'theirs'}", "--name=x"]
    local.main([*argv, f"--out_dir={tmp_path / 'data'}"])
    theirs = transformers_tokenizer(tmp_path / "theirs")
    documents = [theirs(f"{text} {lines * i}")["input_ids"] + [1] for i in range(40)]
    ids = [*ids_of(tmp_path / "data", "train").tolist(), *ids_of(tmp_path / "data", "val").tolist()]
    cuts = [i + 1 for i, token in enumerate(ids) if token == 1]
    found = [ids[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    assert sorted(found) == sorted(documents) and all(document[0] == 0 for document in found)

    config = dict(dataset=tmp_path / "data", out_dir=tmp_path / "run", init_from=tmp_path / "theirs", block_size=16)
    assert run(**config) == 0
    prompts, draw = [], sample.generate

    def note(model, idx, *args, **how):
        prompts.append(idx[0].tolist())
        return draw(model, idx, *args, **how)

    monkeypatch.setattr(sample, "generate", note)
    for flag in ("--start=abc", "--start="):
        monkeypatch.setattr(sys, "argv", ["sample.py", f"--out_dir={tmp_path / 'run'}", flag, "--max_new_tokens=3"])
        assert sample.main() == 0
    assert prompts == [theirs("abc")["input_ids"], [0]] and capsys.readouterr().out.count("abc") >= 5
    assert call(monkeypatch, f"--out_dir={tmp_path / 'run'}", f"--to={tmp_path / 'ours'}") == 0
    again = transformers_tokenizer(tmp_path / "ours")
    assert again(text)["input_ids"] == theirs(text)["input_ids"] and again.eos_token_id == 1
    assert load(tmp_path / "ours").config.bos_token_id == 0
    argv[1] = "--tokenizer=theirs"
    with pytest.raises(ValueError, match="--tokenizer=theirs is neither one of bytes, gpt2, gpt2_4096, chars, nor a"):
        local.main(argv)


def test_another_tokenizer_is_refused(tmp_path, capsys):
    make_peer("LLaMA").save_pretrained(tmp_path / "theirs")
    dataset = make_dataset(tmp_path / "data", alphabet=40)
    config = dict(dataset=dataset, out_dir=tmp_path / "run", init_from=tmp_path / "theirs", block_size=16, max_iters=1)
    save_tokenizer(CHARS, tmp_path / "theirs")
    assert run(**config) == 1
    err = capsys.readouterr().err
    assert (
        "does not fit" in err and "data/local/prepare.py --tokenizer=FOLDER" in err and not (tmp_path / "run").exists()
    )
    for file in tokenizer_files(CHARS, 32):
        (tmp_path / "theirs" / file).unlink()
    assert run(**config) == 0
    assert "has no tokenizer.json; its tokens are taken to be those of" in capsys.readouterr().out
