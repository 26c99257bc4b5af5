"""Short prompts for the demonstration: 400 to train a draft on, and 40 held out that share no topic with them.

    python tools/prompts.py FOLDER      # writes FOLDER/train.jsonl and FOLDER/held_out.jsonl

They hold user turns only, the same every time; `vllm-overlay prepare --regenerate` lets the target write the answers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOPIC_FORMS = (
    "Explain {} in simple words.",
    "List five facts about {}.",
    "Write a short story about {}.",
    "Why do people care about {}?",
    "What are common mistakes people make about {}?",
    "Write three questions a teacher could ask about {}.",
)

CODE_FORMS = (
    "Write a Python function that {}.",
    "Describe, step by step, how a program {}.",
)

REWRITING_FORMS = (
    "Rewrite this sentence in a formal style: {}",
    "Make this sentence shorter: {}",
    "Say this as a question: {}",
    "Continue this text with two more sentences: {}",
)

ARITHMETIC_FORMS = (
    "{name} has {a} apples and buys {b} more. How many apples does {name} have now?",
    "A train travels {a} kilometres an hour. How far does it go in {b} hours?",
    "What is {a} plus {b}?",
    "{name} reads {b} pages a day. How many days does {name} need for a book of {a} pages?",
)


@dataclass(frozen=True)
class Words:
    topics: Sequence[str]
    tasks: Sequence[str]
    sentences: Sequence[str]
    names: Sequence[str]
    first_number: int
    questions: Sequence[str]


TRAIN = Words(
    topics=(
        "the water cycle", "photosynthesis", "the moon", "volcanoes", "gravity", "electricity", "magnets",
        "the human heart", "sleep", "bread", "coffee", "honey bees", "whales", "elephants", "forests", "deserts",
        "rivers", "earthquakes", "bicycles", "trains", "bridges", "libraries", "schools", "money", "taxes", "music",
        "painting", "chess", "football", "the Roman Empire", "the printing press", "computers", "the internet",
        "robots", "recycling", "friendship",
    ),
    tasks=(
        "adds two numbers", "reverses a string", "counts the vowels in a word", "finds the largest number in a list",
        "checks whether a number is prime", "sorts a list of names", "removes duplicates from a list",
        "computes a factorial", "converts Celsius to Fahrenheit", "reads a file line by line", "counts words in a text",
        "checks whether a word is a palindrome", "prints the even numbers up to 100", "computes an average",
        "merges two dictionaries", "finds the longest word in a sentence", "draws a triangle of stars",
        "splits a list into two halves", "computes Fibonacci numbers", "checks a password's length",
        "turns a list of words into one sentence", "finds the common items of two lists", "rounds prices to two digits",
        "counts down from ten to zero",
    ),
    sentences=(
        "I can't come to the meeting because my car broke down.", "The food was good but it took ages to arrive.",
        "We are going to the beach if the weather stays nice.", "She said that she would call me back later today.",
        "He lost his keys somewhere between the office and the station.",
        "This phone is great, and it is cheap as well.",
        "The children were playing outside when it started to rain.", "My neighbour has a dog that barks all night.",
        "You should bring a jacket since it gets cold in the evening.", "The film was too long and a bit boring.",
        "They moved to a small town near the mountains last year.",
        "I forgot to tell you that the shop is closed on Monday.",
        "The teacher asked us to read two chapters before Friday.",
        "Nobody knew where the strange noise was coming from.",
        "We have to finish the report by the end of the week.", "The garden looks lovely in the spring.",
    ),
    names=("Anna", "Ben", "Carla", "David", "Elif", "Farid", "Grace", "Hiro", "Ines", "Jonas", "Kofi", "Lena"),
    first_number=40,
    questions=(
        "What is the capital of Italy?", "What is the capital of Japan?", "Who wrote Romeo and Juliet?",
        "How many days are in a year?", "What colour do you get from blue and yellow?", "What is the largest ocean?",
        "What should I cook for dinner tonight?", "How do I write a good email?", "How can I learn a new language?",
        "What is a good name for a cat?", "How do I boil an egg?", "How can I sleep better?",
        "What should I pack for a weekend trip?", "How do I say thank you in Spanish?", "How do I start a diary?",
        "What is the opposite of hot?", "Give me a synonym for happy.", "Tell me a joke about a cat.",
        "Write a haiku about autumn.", "Write a birthday wish for my sister.", "Suggest three hobbies for the winter.",
        "How do I change a flat tyre?", "What does a doctor do?", "How often should I water a plant?",
    ),
)  # fmt: skip

HELD_OUT = Words(
    topics=("rainbows", "penguins", "chocolate", "the telephone"),
    tasks=("counts the days between two dates", "finds the smallest number in a list", "swaps two variables"),
    sentences=("The bus was so full that we had to wait for the next one.",),
    names=("Maria",),
    first_number=330,
    questions=("What is the capital of France?", "How do I make a cup of tea?"),
)


def prompts(words: Words) -> Iterator[str]:
    """Every form with every word, in a fixed order."""
    for forms, fillings in (
        (TOPIC_FORMS, words.topics),
        (CODE_FORMS, words.tasks),
        (REWRITING_FORMS, words.sentences),
    ):
        for filling in fillings:
            yield from (form.format(filling) for form in forms)
    for i, name in enumerate(words.names):
        for j, form in enumerate(ARITHMETIC_FORMS):
            yield form.format(name=name, a=words.first_number + 7 * i + 5 * j, b=2 + (3 * i + j) % 9)
    yield from words.questions


def write_conversations(file: Path, texts: Iterator[str]) -> int:
    """One conversation of one user turn a line; the id is the file's stem and a number. Returns how many."""
    lines = [
        json.dumps({"id": f"{file.stem}-{number:03}", "messages": [{"role": "user", "content": text}]})
        for number, text in enumerate(texts)
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return len(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demonstration's prompts: 400 for training, 40 held out.")
    parser.add_argument("folder", type=Path, help="where train.jsonl and held_out.jsonl go")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, words in (("train", TRAIN), ("held_out", HELD_OUT)):
        file = folder / f"{name}.jsonl"
        print(f"{file}: {write_conversations(file, prompts(words))} conversations")


if __name__ == "__main__":
    main()
