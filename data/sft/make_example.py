"""Write example.jsonl, 6,000 made conversations about words: small tasks that a small model learns
in minutes.

The words are syllables drawn at random, so most of the held-out ones have not been seen in
training: what is learned is the task. A third are conversations of two turns, whose second answer
is in the first prompt.

    python data/sft/make_example.py
    python data/sft/prepare.py --input=data/sft/example.jsonl --tokenizer=bytes --name=sft_example
"""

import json
import random
import sys
from pathlib import Path

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
    return "".join(
        draw.choice("bcdfghjklmnpqrstvwxyz") + draw.choice("aeiou")
        for _ in range(draw.randint(2, 3))
    )


def make_record(draw: random.Random) -> dict:
    word, task = make_word(draw), draw.choice(list(TASKS))
    if draw.random() < 2 / 3:
        return {"prompt": task.format(word), "response": TASKS[task](word)}
    turns = [f"My name is {word}.", f"Hello {word}.", task.format("my name"), TASKS[task](word)]
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(turns)
        ]
    }


@script.command
def main() -> None:
    draw, path = random.Random(0), Path(__file__).with_name("example.jsonl")
    path.write_text(
        "".join(json.dumps(make_record(draw)) + "\n" for _ in range(RECORDS)), encoding="utf-8"
    )
    print(f"{RECORDS:,} conversations in {path}")
