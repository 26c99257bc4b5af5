"""Many prompts of the kinds that prompts.py holds out, to train a real draft on; none has a held-out word in it.

    pip install wonderwords==3.0.1 randfacts==0.24.4     # both MIT: nouns, adjectives and verbs; short facts
    python tools/many_prompts.py FILE --count 48000

The same for one seed, one Python release (whose docstrings are some of the programming tasks) and these two packages.
Most hold one user turn and some a second one; `vllm-overlay prepare --regenerate` lets the target write the answers.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import random
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from prompts import ARITHMETIC_FORMS, CODE_FORMS, REWRITING_FORMS, TOPIC_FORMS

PACKAGES = "wonderwords==3.0.1 randfacts==0.24.4"

# What prompts.py's HELD_OUT is about, in any form; a test compares the two. 330 to 349 are its numbers.
HELD_OUT_WORDS = re.compile(
    r"penguin|rainbow|chocolate|cocoa|tele ?phon|\bphones?\b|days between|smallest|minimum|\bswap|\bmaria\b"
    r"|france|french|\btea\b|\bbus(es)?\b|\b3[34]\d\b",
    re.IGNORECASE,
)

# As many in a hundred as among the held-out: 24 topics, 6 tasks, 4 sentences, 4 sums and 2 questions of 40.
SHARES = {"topic": 55, "code": 17, "rewriting": 10, "arithmetic": 10, "question": 8}
KNOWN_FORMS = 0.7  # of the prompts have a form that the held-out ones have too; the others have a wider one
FOLLOW_UPS_SHARE = 0.04
MOST_IN_VAIN = 10_000  # prompts one after the other that were there before

WIDER_TOPIC_FORMS = (
    "What is the history of {}?", "Describe {} to a child.", "Write a short poem about {}.",
    "Give me three reasons to like {}.", "Write a paragraph about {}.", "How do {} and people get along?",
    "Write a dialogue between two friends about {}.", "What would the world be like without {}?",
    "Tell me something surprising about {}.", "Write a short news report about {}.",
    "What are the advantages and disadvantages of {}?", "Write a letter to a friend about {}.",
    "Summarise what everybody should know about {}.", "What should I know before I learn about {}?",
    "Write the opening of a novel about {}.", "Suggest five titles for an article about {}.",
    "Give a short talk about {}.", "Write an advertisement for {}.", "How are {} used in daily life?",
    "Write a short quiz about {} with answers.", "Explain {} with an example.", "What are different kinds of {}?",
)  # fmt: skip

WIDER_CODE_FORMS = (
    "Write a short program in Python that {}.", "Write a JavaScript function that {}.",
    "How do I write a function that {}?", "Write pseudocode for a function that {}.",
    "Write a test for a Python function that {}.", "Explain how a function works that {}.",
)  # fmt: skip

WIDER_REWRITING_FORMS = (
    "Rewrite this sentence in a friendly style: {}", "Say this in other words: {}",
    "Correct the grammar of this sentence, if it needs it: {}", "What does this sentence say? {}",
    "Write this sentence in the future tense: {}", "Start a story with this sentence: {}",
    "Which words in this sentence are nouns? {}", "Turn this sentence into a headline: {}",
)  # fmt: skip

WIDER_ARITHMETIC_FORMS = (
    "What is {a} minus {b}?", "What is {b} times {a}?", "What is {a} divided by {b}?",
    "{name} has {a} {things} and gives away {b}. How many {things} are left?",
    "A box holds {b} {things}. How many {things} are in {a} boxes?", "What is {b} percent of {a}?",
    "{name} earns {a} dollars a week. How much is that in {b} weeks?", "Which is larger, {a} or {b} times {c}?",
    "{a} {things} are shared by {b} children. How many does each child get?", "What is {a} plus {b} plus {c}?",
    "One of the {things} costs {b} dollars. How much do {a} of them cost?",
)  # fmt: skip

FOLLOW_UPS = (
    "Can you give me an example?", "Make it shorter.", "Thank you. What else should I know?", "Why is that?",
    "Now say it in simpler words.", "Can you say that as a list?", "Are you sure?", "Write it for a child.",
)  # fmt: skip

NAMES = (
    "Aisha", "Alan", "Amir", "Andrea", "Bella", "Boris", "Bruno", "Chen", "Clara", "Daniel", "Dina", "Edward", "Emma",
    "Erik", "Fatima", "Felix", "Gina", "Hannah", "Hassan", "Helen", "Ivan", "Jack", "Jana", "Kai", "Karim", "Laura",
    "Leo", "Lucy", "Martin", "Mei", "Mona", "Nadia", "Nina", "Noah", "Oliver", "Olga", "Omar", "Paul", "Priya", "Ravi",
    "Rosa", "Sam", "Sara", "Sofia", "Tara", "Thomas", "Uma", "Victor", "Wendy", "Yuki", "Zoe",
)  # fmt: skip

COUNTRIES = (
    "Argentina", "Australia", "Austria", "Belgium", "Brazil", "Canada", "Chile", "China", "Colombia", "Croatia", "Cuba",
    "Denmark", "Ecuador", "Egypt", "Ethiopia", "Finland", "Germany", "Ghana", "Greece", "Hungary", "Iceland", "India",
    "Indonesia", "Iran", "Iraq", "Ireland", "Israel", "Jamaica", "Jordan", "Kenya", "Lebanon", "Malaysia", "Mexico",
    "Mongolia", "Morocco", "Nepal", "the Netherlands", "New Zealand", "Nigeria", "Norway", "Pakistan", "Peru", "Poland",
    "Portugal", "Romania", "Senegal", "Serbia", "South Africa", "South Korea", "Spain", "Sweden", "Switzerland",
    "Thailand", "Tunisia", "Turkey", "Uganda", "Ukraine", "Uruguay", "Vietnam", "Zambia",
)  # fmt: skip

COUNTRY_FORMS = (
    "What is the capital of {}?", "Which language do people speak in {}?", "What is the currency of {}?",
    "On which continent is {}?", "What do people eat in {}?", "What is {} famous for?", "What should I see in {}?",
)  # fmt: skip

WORD_FORMS = (
    "What is the opposite of {adjective}?", "Give me a synonym for {adjective}.", "What does {adjective} mean?",
    "What does the word {noun} mean?", "Use the word {noun} in a sentence.", "Tell me a joke about {topic}.",
    "Write a haiku about {topic}.", "How do I draw {topic}?", "What is the plural of {noun}?",
    "Suggest a gift for someone who likes {topic}.", "What rhymes with {noun}?", "What does it mean to {verb}?",
    "How can I learn to {verb} better?", "What is the past tense of {verb}?", "How do I say {noun} in Spanish?",
)  # fmt: skip

SUBJECTS = (
    "My neighbour", "Our teacher", "The manager", "My little brother", "The old doctor", "A friend of mine",
    "The driver", "My aunt", "The shop assistant", "Our guide", "The waiter", "My cousin", "The new student",
    "The nurse", *NAMES,
)  # fmt: skip
DEEDS = (
    "bought a new {noun}", "forgot the {noun} at home", "could not find the {noun}",
    "wants to sell the {adjective} {noun}", "has never seen a {adjective} {noun}",
    "talked about the {noun} all evening", "is looking for a {adjective} {noun}", "left the {noun} in the kitchen",
    "asked me about the {noun}", "will bring the {noun} tomorrow", "promised to repair the {noun}",
    "does not like the {adjective} {noun}", "wrote a letter about the {noun}",
    "took a picture of the {adjective} {noun}", "paid too much for the {noun}", "dreamt of a {noun} last night",
)  # fmt: skip
REASONS = (
    "because it was {adjective}", "before we left for the station", "although nobody had asked for it",
    "and everybody was {adjective}", "when it started to snow", "after a long day at work", "but I can not say why",
    "since the {noun} was {adjective}", "while we were cooking dinner", "so we stayed at home", "as we had hoped",
    "on the way to the {noun}", "in the middle of the night", "if I remember it right", "and we laughed about it",
)  # fmt: skip

DEEDS_OF_CODE = (
    "counts", "prints", "finds", "removes", "sorts", "collects", "groups", "replaces", "returns", "checks", "copies",
    "reverses", "stores", "skips", "marks", "searches",
)  # fmt: skip
THINGS_OF_CODE = (
    "the empty lines", "the numbers above ten", "the even numbers", "the negative numbers", "the duplicate words",
    "the words that start with a capital letter", "the words longer than five letters", "the digits", "the vowels",
    "the punctuation", "the most common word", "the second largest number", "the values that are missing",
    "the keys without a value", "the dates of last month", "the names that occur twice", "the prices over a limit",
    "the lines that contain a word", "the last ten items", "every third item", "the longest line", "the spaces",
)  # fmt: skip
PLACES_OF_CODE = (
    "in a list", "in a text", "in a file", "in a dictionary", "in a CSV file", "in a table", "in a matrix",
    "in a queue", "in a JSON file", "in a list of lists", "in a sentence", "in a log file", "in a set",
    "in a linked list", "in a column", "in a folder of files",
)  # fmt: skip
TASKS_ABOUT = (
    "keeps a list of {topic} and prints it sorted", "asks the user for {topic} and counts them",
    "draws a picture of a {noun} with letters", "computes the average price of {topic}",
    "picks a random {noun} from a list", "finds the cheapest {noun} in a dictionary of prices",
    "stores the name and the age of a {noun}", "simulates a {adjective} {noun}", "checks whether a text names a {noun}",
    "replaces the word {noun} by {adjective}", "reads {topic} from a file", "sorts {topic} by size",
)  # fmt: skip

# Their functions' docstrings say in a line what each does.
MODULES = (
    "ast", "asyncio", "base64", "bisect", "calendar", "cmath", "collections", "colorsys", "copy", "csv", "datetime",
    "difflib", "email.utils", "fnmatch", "fractions", "functools", "glob", "gzip", "hashlib", "heapq", "html",
    "inspect", "ipaddress", "itertools", "json", "keyword", "locale", "math", "operator", "os", "os.path", "pathlib",
    "pprint", "random", "secrets", "shlex", "shutil", "socket", "statistics", "string", "tempfile", "textwrap", "time",
    "tokenize", "urllib.parse", "zipfile",
)  # fmt: skip
DOCSTRING_VERBS = (
    "Add", "Calculate", "Change", "Check", "Compute", "Convert", "Copy", "Count", "Create", "Decode", "Delete",
    "Determine", "Encode", "Extract", "Find", "Format", "Generate", "Get", "Join", "Load", "Make", "Merge", "Move",
    "Open", "Parse", "Print", "Read", "Remove", "Rename", "Replace", "Return", "Round", "Search", "Sort", "Split",
    "Test", "Wrap", "Write",
)  # fmt: skip

# Nouns of these endings rarely have a plural.
UNCOUNTED = re.compile(r"(ity|ness|ism|ics|ology|ing|age|ance|ence|ment|tion|sion|ship|hood|ware|cy|phy|s)$")


class NoWords(Exception):
    """A package with words is missing, or has too few of them. One line."""


@dataclass(frozen=True)
class Words:
    nouns: Sequence[str]
    adjectives: Sequence[str]
    verbs: Sequence[str]
    facts: Sequence[str]
    tasks: Sequence[str]


def read_words() -> Words:
    """Errors: NoWords."""
    try:
        words, facts = files("wonderwords").joinpath("assets"), files("randfacts")
    except ModuleNotFoundError as error:
        raise NoWords(f"{error.name} is not installed; its words are needed: pip install {PACKAGES}") from error
    coarse = set(words.joinpath("profanitylist.txt").read_text(encoding="utf-8").split())

    def read(name: str) -> list[str]:
        lines = words.joinpath(f"{name}list.txt").read_text(encoding="utf-8").split()
        return [line.replace("-", " ") for line in lines if line not in coarse]

    sentences = facts.joinpath("safe.txt").read_text(encoding="utf-8").splitlines()
    short = [sentence.strip() for sentence in sentences if 30 < len(sentence) < 160]
    return Words(read("noun"), read("adjective"), read("verb"), short, list(read_tasks()))


def read_tasks() -> Iterator[str]:
    """What functions of the standard library do, as "returns the ...", by their docstrings."""
    for name in MODULES:
        for _, function in sorted(inspect.getmembers(importlib.import_module(name), callable)):
            first = (inspect.getdoc(function) or "").partition("\n")[0].rstrip(".")
            verb, _, rest = first.partition(" ")
            if verb in DOCSTRING_VERBS and re.fullmatch(r"[\w ,'-]{12,90}", rest):
                yield f"{add_s(verb.lower())} {rest}"


class Writer:
    """Prompts of every kind, drawn from the words by one generator of random numbers."""

    def __init__(self, words: Words, seed: int) -> None:
        self.words = words
        self.random = random.Random(seed)
        self.kinds: dict[str, Callable[[], str]] = {
            "topic": self.write_topic,
            "code": self.write_code,
            "rewriting": self.write_rewriting,
            "arithmetic": self.write_arithmetic,
            "question": self.write_question,
        }

    def write(self) -> str:
        kind = self.random.choices(list(SHARES), list(SHARES.values()))[0]
        return self.kinds[kind]()

    def write_topic(self) -> str:
        return self._choose_form(TOPIC_FORMS, WIDER_TOPIC_FORMS).format(self._name_topic())

    def write_code(self) -> str:
        return self._choose_form(CODE_FORMS, WIDER_CODE_FORMS).format(self._name_task())

    def write_rewriting(self) -> str:
        return self._choose_form(REWRITING_FORMS, WIDER_REWRITING_FORMS).format(self._write_sentence())

    def write_arithmetic(self) -> str:
        form = self._choose_form(ARITHMETIC_FORMS, WIDER_ARITHMETIC_FORMS)
        a, b, c = self.random.randint(10, 999), self.random.randint(2, 12), self.random.randint(10, 99)
        return form.format(name=self.random.choice(NAMES), things=self._name_things(), a=a, b=b, c=c)

    def write_question(self) -> str:
        if self.random.random() < 0.05:
            return self.random.choice(COUNTRY_FORMS).format(self.random.choice(COUNTRIES))
        return self._fill(self.random.choice(WORD_FORMS))

    def _choose_form(self, known: Sequence[str], wider: Sequence[str]) -> str:
        return self.random.choice(known if self.random.random() < KNOWN_FORMS else wider)

    def _name_topic(self) -> str:
        noun = self.random.choice(self.words.nouns)
        if UNCOUNTED.search(noun):
            return noun
        kind = self.random.random()
        if kind < 0.1:
            return f"{self.random.choice(self.words.adjectives)} {add_s(noun)}"
        return add_s(noun) if kind < 0.55 else f"the {noun}" if kind < 0.85 else noun

    def _name_things(self) -> str:
        noun = self.random.choice(self.words.nouns)
        return self._name_things() if UNCOUNTED.search(noun) else add_s(noun)

    def _name_task(self) -> str:
        kind = self.random.random()
        if kind < 0.2:
            return self.random.choice(self.words.tasks)
        if kind < 0.65:
            return " ".join(map(self.random.choice, (DEEDS_OF_CODE, THINGS_OF_CODE, PLACES_OF_CODE)))
        return self._fill(self.random.choice(TASKS_ABOUT))

    def _write_sentence(self) -> str:
        if self.random.random() < 0.3:
            return f"{self.random.choice(self.words.facts).rstrip('.')}."
        deed, reason = (self._fill(self.random.choice(parts)) for parts in (DEEDS, REASONS))
        return f"{self.random.choice(SUBJECTS)} {deed} {reason}."

    def _fill(self, form: str) -> str:
        text = form.format(
            topic=self._name_topic(),
            noun=self.random.choice(self.words.nouns),
            adjective=self.random.choice(self.words.adjectives),
            verb=self.random.choice(self.words.verbs),
        )
        return re.sub(r"\b([Aa]) (?=[aeio])", r"\1n ", text)


def add_s(word: str) -> str:
    """A noun's plural, or a verb after "it"."""
    if re.search(r"[^aeiou]y$", word):
        return f"{word[:-1]}ies"
    return f"{word}es" if word.endswith(("ch", "sh", "x", "z", "s")) else f"{word}s"


def write_prompts(words: Words, count: int, seed: int) -> Iterator[list[str]]:
    """`count` different conversations, as their user turns. None has a held-out word in it."""
    writer, seen, in_vain = Writer(words, seed), set[str](), 0
    while len(seen) < count:
        text = writer.write()
        if text in seen or HELD_OUT_WORDS.search(text):
            in_vain += 1
            if in_vain == MOST_IN_VAIN:
                raise NoWords(f"the words make {len(seen)} different prompts, not {count}")
            continue
        seen.add(text)
        in_vain = 0
        goes_on = writer.random.random() < FOLLOW_UPS_SHARE
        yield [text, writer.random.choice(FOLLOW_UPS)] if goes_on else [text]


def main() -> int:
    parser = argparse.ArgumentParser(description="Write many prompts like those of prompts.py, none of them held out.")
    parser.add_argument("file", type=Path, help="the chat file to write")
    parser.add_argument("--count", type=int, default=48_000, help="conversations (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other prompts (default: %(default)s)")
    args = parser.parse_args()
    if args.count < 1:
        parser.error("--count counts from 1")
    try:
        prompts = list(write_prompts(read_words(), args.count, args.seed))
    except NoWords as error:
        print(error, file=sys.stderr)
        return 1
    with args.file.open("w", encoding="utf-8") as file:
        for number, turns in enumerate(prompts):
            messages = [{"role": "user", "content": text} for text in turns]
            file.write(json.dumps({"id": f"many-{number:06}", "messages": messages}) + "\n")
    print(f"{args.file}: {args.count} conversations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
