"""Commonsense170K (Hu et al. 2023, "LLM-Adapters", arXiv 2304.01933), which the LNS paper
fine-tunes on (sec. 5.2).

Downloads from github.com/AGI-Edgerunners/LLM-Adapters, at one commit, the training set of 170
thousand questions and answers, and the test sets of its eight tasks, BoolQ, PIQA, SIQA, HellaSwag,
WinoGrande, ARC easy and challenge, and OpenBookQA. They stay in data/commonsense170k/raw, the test
sets as raw/test/NAME.json: a second run needs no network. The training set is checked against its
git blob id. The test sets have no known ids: the commit in their addresses pins them, and each must
be readable.

Records have "instruction", "input", "output"; `python data/sft/prepare.py --help` explains how they
become tokens. About 120 of them, chosen by a hash of their numbers, are held out for validation
(120 is LLM-Adapters' own number in its examples). The default template, alpaca, has the words of
LLM-Adapters' own prompt, but not its indented lines.

The repository's licence, Apache-2.0, is for its code. The eight datasets have licences of their
own: look them up before you use the data.

    python data/commonsense170k/prepare.py --tokenizer=models/llama --max_tokens=256
"""

import hashlib
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from interop import prepare_examples
from interop.conversations.records import conversations
from nanodnt.data.inputs import Notes
from nanodnt.data.tokenizer import DATA
from nanodnt.prepare import hub, script

COMMIT = "fe675038fb60d61b3fc03d98673d6d11d2bef4f9"
URL = f"https://raw.githubusercontent.com/AGI-Edgerunners/LLM-Adapters/{COMMIT}"
TRAIN = "ft-training_set/commonsense_170k.json"
BLOB = "529e426b33d4cdb1d0c4a275a1a7245ad081fd91"
TASKS = (
    "boolq",
    "piqa",
    "social_i_qa",
    "hellaswag",
    "winogrande",
    "ARC-Easy",
    "ARC-Challenge",
    "openbookqa",
)
HELD_OUT = 120  # examples to hold out, about


def git_blob(path: Path) -> str:
    """The id that git gives to a file's content."""
    raw = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(raw) + raw, usedforsecurity=False).hexdigest()


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__, "commonsense170k")
    prepare_examples.add_flags(parser, template="alpaca")
    args = parser.parse_args(argv)
    prepare_examples.check_flags(args)
    raw = DATA / "commonsense170k" / "raw"
    train = hub.download(f"{URL}/{TRAIN}", raw / "commonsense_170k.json", BLOB, git_blob)
    for task in TASKS:
        test = hub.download(f"{URL}/dataset/{task}/test.json", raw / "test" / f"{task}.json", None)
        print(f"{test}: {sum(1 for _ in conversations(test)):,} questions")
    notes = Notes(args.skip_bad)
    examples = list(conversations(train, notes=notes))
    prepare_examples.build_examples(
        args.out_dir,
        f"{URL}/{TRAIN}",
        args,
        notes,
        examples,
        name="commonsense170k",
        val_fraction=HELD_OUT / len(examples),
        command="python train.py config/sft/commonsense170k.py",
    )
