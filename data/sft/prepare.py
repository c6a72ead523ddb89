r"""Your own examples for fine-tuning → data/NAME: prompts and responses, or whole conversations.

--input is a .jsonl or .ndjson file (a record a line), a .json file (one array of records), a
.parquet file (a record a row), or a folder, which is read recursively, also through links, without
hidden and other files; what is left out is named and counted. A record has one of these forms,
known by its keys:

    {"prompt": "…", "response": "…"}                     other names: --prompt_key, --response_key
    {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
    {"conversations": [{"from": "human", "value": "…"}, {"from": "gpt", "value": "…"}, …]}
    {"instruction": "…", "input": "…", "output": "…"}    the prompt is the instruction and, if
                                                         "input" is not empty, a blank line and it

Messages may begin with one of role (or from) "system"; an empty one is left out. A text under the
key "system" of the record is the same. Further keys are not read. Then user and assistant
alternate, and the assistant has the last word. No text may be blank. What does not fit is refused
with its file, line and beginning, and nothing is written; with --skip_bad such records are left
out, named and counted.

An example is what the model reads of a record: begin, turn, end of text, newline, turn, end of
text, … The loss counts the assistant's messages and the end of text after each, nothing else. Begin
is the tokenizer's own start of a text (<s>), else its bos, else end of text; a newline stands only
between turns. A turn is written by --template:

    chat (the default)   User: {prompt}\nAssistant:\n{response}
    alpaca               Below is an instruction that describes a task. Write a response that
                         appropriately completes the request.\n\n
                         ### Instruction:\n{prompt}\n\n### Response:\n{response}
    chatml               <|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n{response}
    plain                {prompt}{response}

For a template of your own add it to TEMPLATES in interop/conversations/template.py. Let answers
begin after a newline: they are tokenised by themselves, and after a space most tokenizers have
other tokens for words. A system message stands in front of the first turn: "System: {system}\n" in
chat, "<|im_start|>system\n{system}<|im_end|>\n" in chatml. Under the other templates a system
message is refused.

Where a tokenizer.json has tokens for names in the template, such as <|im_start|>, they become these
tokens; the same names in a record stay text. (In chatml an answer ends with the tokenizer's end of
text: Qwen's own form where that is <|im_end|>; a system message is not made up where there is
none.)

About --val_fraction of the examples, chosen by a hash of file and line, are held out for
validation; or all examples of --val_input, and none of --input. Training refuses examples of more
than block_size + 1 tokens: --max_tokens=BLOCK_SIZE leaves them out and names the first five.
Tokenizers: bytes, gpt2, gpt2_4096 (needs no download), or that of a model of Hugging Face: a folder
with a tokenizer.json, or OWNER/MODEL. Fine-tuning needs the tokenizer of the run it starts from.

    python data/sft/prepare.py --input=faq.jsonl --tokenizer=gpt2_4096 --name=faq
    python data/sft/prepare.py --input=chats/ --tokenizer=models/qwen --template=chatml \
        --name=chats --max_tokens=1024
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from interop import prepare_examples
from interop.conversations.records import conversations
from nanodnt.data import inputs
from nanodnt.prepare import script


def check_apart(train: Path, val: Path) -> None:
    """ValueError where one of --input and --val_input lies in the other."""
    train_path = train.resolve()
    val_path = val.resolve()
    if val_path.is_relative_to(train_path) or train_path.is_relative_to(val_path):
        raise ValueError(f"--val_input={val} and --input={train} overlap: hold out other files")


@script.command
def main(argv: list[str] | None = None) -> None:
    parser = script.parser(__doc__)
    parser.add_argument("--input", type=Path, required=True, help="a file or a folder")
    prepare_examples.add_flags(parser, template="chat")
    help = "a file or a folder to hold out (default: a part of --input)"
    parser.add_argument("--val_input", type=Path, help=help)
    help = "share of --input to hold out (default: 0.05)"
    parser.add_argument("--val_fraction", type=float, default=0.05, help=help)
    help = "key of a record's prompt (default: prompt)"
    parser.add_argument("--prompt_key", default="prompt", help=help)
    help = "key of a record's response (default: response)"
    parser.add_argument("--response_key", default="response", help=help)
    args = parser.parse_args(argv)
    flags = ["input"] if args.val_input is None else ["input", "val_input"]
    out = inputs.output_folder(args, *flags)
    notes = inputs.Notes(args.skip_bad)
    keys = (args.prompt_key, args.response_key)
    held_out = None
    if args.val_input is not None:
        check_apart(args.input, args.val_input)
        held_out = conversations(args.val_input, *keys, notes)
    # the quickstart's tokens are bytes; else the user has to name a run with the same tokenizer
    source = "out/quickstart" if args.tokenizer == "bytes" else "RUN"
    run = f"--init_from=auto:{source} {script.run_folder(out)}"
    prepare_examples.build_examples(
        out,
        args.input.resolve().name,
        args,
        notes,
        conversations(args.input, *keys, notes),
        held_out,
        name=args.name,
        val_fraction=args.val_fraction,
        command=f"python train.py config/sft/example.py {run}",
    )
