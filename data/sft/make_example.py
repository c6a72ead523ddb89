"""Write example.jsonl, 6,000 made conversations about words: small tasks that a small model learns
in minutes.

The words are syllables drawn at random, and most of the held-out ones do not occur in training: so
the model learns the task. A third are conversations of two turns, whose second answer is in the
first prompt.

    python data/sft/make_example.py
    python data/sft/prepare.py --input=data/sft/example.jsonl --tokenizer=bytes --name=sft_example
"""

import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from nanodnt.prepare import script

RECORDS = 6000
TASKS = {
    "Write {} in capitals.": str.upper,
    "Spell {}.": "-".join,
    "What is the first letter of {}?": lambda word: word[0],
    "What is the last letter of {}?": lambda word: word[-1],
    "Say {} twice.": lambda word: f"{word} {word}",
}


def make_word(draw: random.Random) -> str:
    """Two or three syllables, such as "tomaki"."""
    word = ""
    for _ in range(draw.randint(2, 3)):
        word += draw.choice("bcdfghjklmnpqrstvwxyz") + draw.choice("aeiou")
    return word


def make_record(draw: random.Random) -> dict[str, Any]:
    """A prompt and its response, or a conversation of two turns."""
    word = make_word(draw)
    task = draw.choice(list(TASKS))
    answer = TASKS[task](word)
    if draw.random() < 2 / 3:
        return {"prompt": task.format(word), "response": answer}
    return {
        "messages": [
            {"role": "user", "content": f"My name is {word}."},
            {"role": "assistant", "content": f"Hello {word}."},
            {"role": "user", "content": task.format("my name")},
            {"role": "assistant", "content": answer},
        ]
    }


@script.command
def main() -> None:
    draw = random.Random(0)
    path = Path(__file__).with_name("example.jsonl")
    lines = [json.dumps(make_record(draw)) + "\n" for _ in range(RECORDS)]
    path.write_text("".join(lines), encoding="utf-8")
    print(f"{RECORDS:,} conversations in {path}")
