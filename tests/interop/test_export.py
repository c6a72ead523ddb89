"""Exports: an architecture of `transformers` that computes the same, where there is one;
tokenizers; the command."""

import json
import sys
from types import SimpleNamespace

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, normalizers, processors

import export
from interop.huggingface import write
from interop.huggingface.plain import NotPlain, plain_model
from interop.huggingface.tokenizer_files import make_json, read_tokenizer, tokenizer_files
from interop.huggingface.write import write_pretrained
from layers.slot import Slot
from nanodnt.data.tokenizer import Tokenizer, json_meta, same_tokenizer
from nanodnt.generate import generate
from nanodnt.run.checkpoints import load_checkpoint
from nanodnt.weights import load_pretrained, load_trained
from support.models import ALL, COMPLETEP, LAYERNORM, LLAMA, S5, SIZE, batch, build, error
from support.pages import ROOT, keys_of
from support.peers import CHARS, make_peer, save_tokenizer
from support.prepared import ids_of, load_script, needs_gpt2
from support.runs import call, make_dataset, run
from support.tolerances import FORWARD

pytestmark = pytest.mark.usefixtures("quick")
MOE = LLAMA | dict(n_expert=4)
# The files of these layouts, with LLaMA's parts, are the architectures of `transformers`.
QWEN3, OLMO2, GEMMA3, PERI_LN = (
    keys_of(ROOT / "config" / "layouts" / f"{name}.py") | LLAMA | dict(norm_eps=SIZE["norm_eps"])
    for name in ("qwen3", "olmo2", "gemma3", "peri_ln")
)
QWEN3 |= dict(head_size=6)
GEMMA3 |= dict(head_size=6, mlp="geglu", tie_weights=True)
MAGDIR = dict(gain="branch", gain_out="scale", gain_param="magdir")
# (architecture, layout). What an architecture has no place for is multiplied into the weights.
EXPORTS = [
    ("gpt2", LAYERNORM),
    ("gpt2", dict(norm="layernorm", mlp="relu", tie_weights=False, embed_scale=True)),  # no biases
    ("gpt2", LAYERNORM | dict(lns="norm", lns_learn=True, branch_scale="layerscale")),
    ("gpt2", LAYERNORM | COMPLETEP),
    ("llama", LLAMA),
    ("llama", LLAMA | dict(lns="branch", bias=True)),
    ("llama", LLAMA | MAGDIR | dict(bias=True)),
    ("llama", LLAMA | dict(branch_scale="skipinit", sigma_reparam=True, embed_scale=True)),
    ("llama", LLAMA | dict(tie_weights=True, embed_scale=True, mlp="geglu")),
    ("qwen3", QWEN3),
    ("olmo2", OLMO2),
    ("olmo2", OLMO2 | dict(head_size=6, tie_weights=True, gain_param="magdir") | COMPLETEP),
    ("gemma3_text", GEMMA3),
    ("gemma3_text", GEMMA3 | dict(tie_weights=False, embed_scale=False, mlp="swiglu", lns="norm")),
    ("mixtral", LLAMA | MAGDIR | dict(n_expert=3, lns="norm")),
    (
        "mixtral",
        LLAMA | dict(n_expert=2, n_expert_active=1, branch_scale="layerscale", balance="none"),
    ),
    ("qwen3_moe", QWEN3 | dict(n_expert=5, n_expert_active=3)),
    ("qwen3_moe", QWEN3 | dict(n_expert=4, gain="branch", router_norm=False)),
]
UNFIT = [  # (target, layout, words of the refusal)
    ("llama", LLAMA | dict(pre_norm="attn"), "pre_norm=attn both"),
    ("llama", LLAMA | dict(lns="residual"), "lns=residual"),
    ("llama", LLAMA | dict(gpas=True), "gpas=True"),
    ("llama", LLAMA | dict(lns="input"), "lns=input"),
    ("llama", LLAMA | dict(gain_out="norm"), "gain_out=norm"),
    ("gpt2", LLAMA, "norm=rmsnorm pos=rope mlp=swiglu (gelu or gelu_erf n_kv_head=2"),
    ("qwen3", QWEN3 | dict(bias=True), "bias=True"),
    ("qwen3", OLMO2, "pre_norm=none (both there), mid_norm=both (none there), qk_norm_over=full"),
    ("olmo2", OLMO2 | dict(qk_norm_over="head", bias=True), "qk_norm_over=head (full bias=True"),
    ("gemma3_text", PERI_LN | dict(v_norm=True), "input_norm=True qk_norm=False v_norm=True"),
    ("llama", MOE, "n_expert=4 (0 there)"),
    ("mixtral", MOE | dict(router="sigmoid"), "router=sigmoid (softmax there)"),
    ("mixtral", MOE | dict(balance="bias"), "balance=bias (loss there)"),
]


def write_it(model, folder, **how) -> str:
    """Export a model of 50 characters, without the comparison that an export makes itself; the
    architecture."""
    return write_pretrained(model, CHARS, folder, **dict(check=False) | how)[0]


def load(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.mark.parametrize("kind, layout", EXPORTS)
def test_transformers_computes_the_same(kind, layout, tmp_path):
    ours, idx = build(layout, dtype=torch.float32), batch()[0]
    assert write_it(ours, tmp_path / "it") == kind
    theirs = load(tmp_path / "it")
    assert error(theirs(idx).logits, ours(idx)[0]) < FORWARD
    new = ours.config.block_size - 4
    expected = generate(ours, idx[:, :4], new, temperature=0)
    assert torch.equal(theirs.generate(idx[:, :4], max_new_tokens=new, do_sample=False), expected)
    assert theirs.config.pad_token_id is None  # a token of theirs would not be trained

    back = load_pretrained(str(tmp_path / "it"))
    assert error(back.model(idx)[0], ours(idx)[0]) < FORWARD and back.meta == CHARS
    assert write_it(back.model, tmp_path / "again") == kind
    assert (tmp_path / "again" / "config.json").read_text() == (
        tmp_path / "it" / "config.json"
    ).read_text()


@pytest.mark.parametrize("target, layout, words", UNFIT)
def test_what_a_target_lacks_is_named(target, layout, words, tmp_path):
    with pytest.raises(ValueError) as caught:
        write_it(build(layout, dtype=torch.float32), tmp_path / "it", target=target)
    message = str(caught.value)
    assert (
        message.startswith(f"--target={target} cannot hold this layout: ") and "\n" not in message
    )
    assert [word for word in words.split() if word not in message] == [], message
    assert not list(tmp_path.iterdir())


def test_auto_never_changes_the_function(tmp_path):
    """Of every scheme of the tests: what auto writes as an architecture of `transformers` is the
    same function."""
    kinds = {}
    for name, (layout, _) in ALL.items():
        model, idx = build(layout, dtype=torch.float32), batch()[0]
        kind = write.convert(model, "auto")[0]
        kinds.setdefault(kind, []).append(name)
        if kind != "nanodnt":
            write_it(model, folder := tmp_path / str(len(kinds[kind])) / kind)
            assert error(load(folder)(idx).logits, model(idx)[0]) < FORWARD, name
    assert kinds["gpt2"] == ["LN", "LN without bias", "LN + LNS", "LN + no gains + LNS"]
    assert (
        kinds["llama"] == ["llama", "llama + LNS + 1/l + ffn alone"] and len(kinds["nanodnt"]) > 50
    )


@torch.no_grad()
def test_peri_ln_is_gemma_3_without_qk_norm(tmp_path):
    """And with a norm on the embedding in place of a scale, which their class lets us feed in."""
    ours, idx = build(PERI_LN | dict(mlp="geglu"), dtype=torch.float32), batch()[0]
    gemma = build(GEMMA3 | dict(head_size=0, tie_weights=False), dtype=torch.float32)
    gemma.load_state_dict(gemma.state_dict() | ours.state_dict(), strict=False)
    assert write_it(gemma, tmp_path / "it") == "gemma3_text"
    theirs = load(tmp_path / "it")
    for layer in theirs.model.layers:
        layer.self_attn.q_norm = layer.self_attn.k_norm = torch.nn.Identity()
    embedding = ours.input_norm(ours.wte(idx))
    assert error(theirs(inputs_embeds=embedding).logits, ours(idx)[0]) < FORWARD


def test_half_precision(tmp_path):
    ours, idx = build(LLAMA, dtype=torch.float32), batch()[0]
    write_it(ours, tmp_path / "it", dtype=torch.bfloat16, check=True)
    theirs = load(tmp_path / "it")
    assert theirs.dtype == torch.bfloat16
    assert json.loads((tmp_path / "it" / "config.json").read_text())["dtype"] == "bfloat16"
    assert 1e-4 < error(theirs.float()(idx).logits, ours(idx)[0]) < 0.1  # rounded, and not more


# --------------------------------------------------------------------------------------- tokenizers

TEXT = "def f(x):\n    return  'naïve ☃'  # 日本\n\n\tThe end, isn't it?"


def like_llama() -> dict:
    """The meta of a tokenizer that puts <s> before a text, and a space that is not its own."""
    bpe = tokenizers.Tokenizer(
        models.BPE({c: i for i, c in enumerate(["<s>", "</s>", "▁", *"abcdef"])}, [])
    )
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.add_special_tokens(["<s>", "</s>"])
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    of = tokenizers.decoders
    bpe.decoder = of.Sequence([of.Replace("▁", " "), of.Fuse(), of.Strip(" ", 1, 0)])
    config = {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "x": [1],
        "tokenizer_class": "LlamaTokenizer",
    }
    return json_meta(bpe.to_str(), "</s>", "<s>") | {"json_config": config}


LIKE_LLAMA, BPE = like_llama(), Tokenizer.meta_for("gpt2_4096")
METAS = {
    "bytes": Tokenizer.meta_for("bytes"),
    "chars": Tokenizer.meta_for("chars", sorted(set(TEXT))),
}
METAS |= {"gpt2_4096": BPE, "gpt2": Tokenizer.meta_for("gpt2"), "like LLaMA's": LIKE_LLAMA}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_gpt2 if name == "gpt2" else ()) for name in METAS]
)
def test_auto_tokenizer_gives_the_same_ids(name, tmp_path):
    meta, text = METAS[name], "abc fed  a" if name == "like LLaMA's" else TEXT
    save_tokenizer(meta, tmp_path, block_size=99)
    ours, theirs = Tokenizer(meta), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = theirs(text)["input_ids"]
    assert ids == [*ours.start, *ours.encode(text)] and (name == "like LLaMA's") == (
        ours.start == [0]
    )
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
    """By what it does: transformers saves padding and truncation with it, and writes merges in two
    ways. A meta of earlier versions has no id."""
    meta = json_meta(make_json(BPE), None)
    used = tokenizers.Tokenizer.from_str(meta["json"])
    used.enable_padding(pad_id=1)
    used.enable_truncation(9)
    found = json.loads(used.to_str())
    found["model"]["merges"] = [" ".join(pair) for pair in found["model"]["merges"]]
    assert same_tokenizer(meta, json_meta(json.dumps(found), None))
    assert not same_tokenizer(
        meta, json_meta(json.dumps(found | dict(normalizer={"type": "Lowercase"})), None)
    )
    bare = json.dumps(json.loads(LIKE_LLAMA["json"]) | {"post_processor": None})
    assert not same_tokenizer(LIKE_LLAMA, json_meta(bare, "</s>", "<s>"))  # no <s> before a text
    for meta in METAS.values():
        old = {name: value for name, value in meta.items() if name != "tokenizer_id"}
        assert (
            same_tokenizer(old, meta)
            and same_tokenizer(meta, old)
            and not same_tokenizer(old, CHARS)
        )


@pytest.mark.parametrize("where", ["tokenizer_config.json", "config.json", "nowhere"])
def test_where_the_end_of_text_is_named(where, tmp_path):
    save_tokenizer(LIKE_LLAMA, tmp_path)
    named = {"eos_token": {"content": "</s>"}, "bos_token": "<s>"}
    named = {"eos_token_id": [1, 5], "bos_token_id": 0} if where == "config.json" else named
    (tmp_path / "tokenizer_config.json").write_text("{}")
    if where != "nowhere":
        (tmp_path / where).write_text(json.dumps(named))
    found = read_tokenizer(tmp_path)
    assert (found["eot"], found["bos"]) == ((None, None) if where == "nowhere" else (1, 0))
    again = json.loads(tokenizer_files(found, 9)["tokenizer_config.json"])
    assert [again.get("eos_token"), again.get("bos_token")] == (
        [None] * 2 if where == "nowhere" else ["</s>", "<s>"]
    )


def test_a_tokenizer_of_ours_with_a_start_is_another(tmp_path):
    """As some make it of GPT-2's: end of text before every text."""
    end, made = "<|endoftext|>", tokenizers.Tokenizer.from_str(make_json(BPE))
    made.post_processor = processors.TemplateProcessing(
        single=f"{end} $A", special_tokens=[(end, 4095)]
    )
    save_tokenizer(BPE, tmp_path)
    (tmp_path / "tokenizer.json").write_text(made.to_str())
    found = read_tokenizer(tmp_path)
    assert (
        found["tokenizer"] == "json"
        and Tokenizer(found).start == [4095] == Tokenizer(found).new_document()
    )


# -------------------------------------------------------------------------------------- the command


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run directory of a DNT."""
    folder = tmp_path_factory.mktemp("export")
    assert run(out_dir=folder / "run", dataset=make_dataset(folder / "data"), max_iters=10) == 0
    return folder / "run"


def export_it(out_dir, to, *flags) -> int:
    """The exit code of export.py in this process."""
    return call(export.main, f"--out_dir={out_dir}", f"--to={to}", *flags)


def test_the_command(begun, tmp_path, capsys):
    """What lies beside stays."""
    to = tmp_path / "a" / "b"
    (tmp_path / "a" / "b.partial").mkdir(parents=True)
    assert export_it(begun, to) == 0
    out = capsys.readouterr().out
    assert f"best.pt, step 10, as nanodnt in float32: {to} (transformers computes the same)" in out
    assert "trust_remote_code=True" in out
    assert sorted(p.name for p in to.parent.iterdir()) == ["b", "b.partial"]
    names = {path.name for path in to.iterdir()}
    assert names >= {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "model.py",
    }
    assert len({path.stat().st_mode for path in to.iterdir()}) == 1  # as readable as other files
    found, saved = load_pretrained(str(to)), load_checkpoint(begun / "best.pt")
    assert all(torch.equal(t, saved["model"][name]) for name, t in found.model.state_dict().items())
    assert found.meta["chars"] == saved["meta"]["chars"] and found.model.config.mid_norm == "both"


def test_bad_input_is_one_line_and_nothing_is_written(begun, tmp_path, capsys):
    (tmp_path / "there").mkdir()
    (tmp_path / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    for argv, words in (
        ((begun, ""), "--to=FOLDER is needed"),
        ((begun, tmp_path / "there"), "there exists already"),
        ((begun, tmp_path / "file" / "x"), "file is no folder to write to): choose another --to"),
        ((begun, tmp_path / "x", "--target=llama"), "--target=llama cannot hold this layout"),
        ((tmp_path, tmp_path / "x"), "there is no checkpoint"),
    ):
        assert export_it(*argv) == 1, argv
        err = capsys.readouterr().err
        assert err.startswith("error: ") and err.count("\n") == 1 and words in err, err
        assert sorted(tmp_path.rglob("*")) == before


def test_a_changed_network_is_not_exported_as_another(tmp_path, monkeypatch):
    """Attention of another width of the softmax, as a fork might change it: no export can see that
    in the slots."""
    from layers import attention

    attend, ours = attention.F.scaled_dot_product_attention, build(LLAMA, dtype=torch.float32)
    other = SimpleNamespace(**vars(attention.F))
    other.scaled_dot_product_attention = lambda q, *args, **how: attend(q * 1.5, *args, **how)
    monkeypatch.setattr(attention, "F", other)
    with pytest.raises(
        ValueError, match="transformers computes something else from the export as llama"
    ):
        write_it(ours, tmp_path / "it", check=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "make",
    (
        lambda: Slot(n_gain=1, role="scalar", init_gain=0.5),
        lambda: Slot(const=0.5),
        lambda: torch.nn.Linear(4, 4),
    ),
    ids=("gain", "constant", "other module"),
)
def test_a_new_module_in_a_branch_is_not_left_out(make):
    """Also where nothing is compared: in a model without transformers beside it."""
    ours = build(LLAMA, dtype=torch.float32)
    ours.blocks[1].attn.f.extra = make()
    with pytest.raises(NotPlain, match=r"blocks\.1\.attn\.f\.extra"):
        plain_model(ours, "llama")


def test_without_transformers_nothing_is_compared(begun, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert (
        export_it(begun, tmp_path / "x") == export_it(begun, tmp_path / "y", "--compare=False") == 0
    )
    assert capsys.readouterr().out.count("(not compared)") == 2


def test_a_pipeline_writes_what_we_write(tmp_path):
    ours = build(S5 | dict(vocab_size=4096, block_size=32), dtype=torch.float32)
    write_pretrained(ours, BPE, tmp_path / "it", check=False)
    writer = transformers.pipeline(
        "text-generation", model=str(tmp_path / "it"), trust_remote_code=True
    )
    tokenizer, prompt = Tokenizer(BPE), "The end of"
    ids = generate(ours, torch.tensor([tokenizer.encode(prompt)]), 12, temperature=0, stop=4095)[
        0
    ].tolist()
    how = dict(max_new_tokens=12, do_sample=False, clean_up_tokenization_spaces=False)
    several = writer([prompt, "It"], batch_size=1, **how)
    assert several[0][0]["generated_text"] == tokenizer.decode(ids)


# ------------------------------------------------------------------- there, trained, and back again


def test_a_folder_is_trained_and_exported(tmp_path, capsys):
    peer, idx, theirs = make_peer("LLaMA"), batch()[0], tmp_path / "theirs"
    peer.save_pretrained(theirs)
    save_tokenizer(CHARS, theirs)
    config = dict(dataset=make_dataset(tmp_path / "data"), init_from=theirs, block_size=16)
    assert (
        run(**config, out_dir=tmp_path / "still", max_iters=1, learning_rate=1e-12, min_lr=1e-12)
        == 0
    )
    same = load_trained(str(tmp_path / "still"), "last.pt").model
    assert error(same(idx)[0], peer(idx).logits) < FORWARD
    assert run(**config, out_dir=tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert f"weights: {theirs}" in out and "block_size" in out
    end = load_trained(str(tmp_path / "run"), "last.pt")
    assert end.model.config.block_size == 16 and end.step == 20
    assert export_it(tmp_path / "run", tmp_path / "ours") == 0
    logits = load(tmp_path / "ours")(idx).logits
    assert error(end.model(idx)[0], logits) < FORWARD
    assert error(logits, peer(idx).logits) > 1e-2  # it has learned something


def test_a_tokenizer_of_theirs(tmp_path, monkeypatch):
    """A LLaMA with a tokenizer like LLaMA's: data with <s> and </s>, trained on, exported with
    it."""
    text, lines = "abc fed  a", "abc\nabc fed\n"  # where texts of other tokenizers are cut
    make_peer("LLaMA", vocab_size=LIKE_LLAMA["vocab_size"]).save_pretrained(tmp_path / "theirs")
    save_tokenizer(LIKE_LLAMA, tmp_path / "theirs")
    (tmp_path / "texts").mkdir()
    for i in range(40):
        (tmp_path / "texts" / f"{i}.txt").write_text(f"{text} {lines * i}")
    local = load_script("local")
    monkeypatch.setattr("nanodnt.prepare.text.JOB_CHARS", 20)  # documents are not cut all the same
    argv = [f"--input={tmp_path / 'texts'}", f"--tokenizer={tmp_path / 'theirs'}", "--name=x"]
    local.main([*argv, f"--out_dir={tmp_path / 'data'}"])
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "theirs")
    documents = [theirs(f"{text} {lines * i}")["input_ids"] + [1] for i in range(40)]
    ids = [*ids_of(tmp_path / "data", "train").tolist(), *ids_of(tmp_path / "data", "val").tolist()]
    cuts = [i + 1 for i, token in enumerate(ids) if token == 1]
    found = [ids[a:b] for a, b in zip([0, *cuts], cuts, strict=False)]
    assert sorted(found) == sorted(documents) and all(document[0] == 0 for document in found)

    config = dict(
        dataset=tmp_path / "data",
        out_dir=tmp_path / "run",
        init_from=tmp_path / "theirs",
        block_size=16,
    )
    assert run(**config, max_iters=2) == 0
    assert export_it(tmp_path / "run", tmp_path / "ours", "--compare=False") == 0
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "ours")
    assert again(text)["input_ids"] == theirs(text)["input_ids"] and again.eos_token_id == 1
    assert load(tmp_path / "ours").config.bos_token_id == 0
    argv[1] = "--tokenizer=theirs"
    with pytest.raises(
        ValueError,
        match="--tokenizer=theirs is neither one of bytes, gpt2, gpt2_4096, chars, nor a",
    ):
        local.main(argv)


def test_another_tokenizer_is_refused(tmp_path, capsys):
    theirs = tmp_path / "theirs"
    make_peer("LLaMA").save_pretrained(theirs)
    save_tokenizer(CHARS, theirs)
    dataset = make_dataset(tmp_path / "data", alphabet=40)
    config = dict(
        dataset=dataset, out_dir=tmp_path / "run", init_from=theirs, block_size=16, max_iters=0
    )
    assert run(**config) == 1
    err = capsys.readouterr().err
    assert "does not fit" in err and "data/local/prepare.py --tokenizer=FOLDER" in err
    assert not (tmp_path / "run").exists()
    for file in tokenizer_files(CHARS, 32):
        (theirs / file).unlink()
    assert run(**config) == 0
    assert "has no tokenizer; its tokens are taken to be those of" in capsys.readouterr().out
