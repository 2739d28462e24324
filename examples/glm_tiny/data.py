"""Small text tasks with one right answer each: the data that the tiny GLM learns and is tested on.

Every task is a function `rng -> (prompt, answer)`. Answers are about 8 to 50 tokens long and follow
from the prompt alone. A prompt belongs to the held-out set by its own content (`is_heldout`), so no
order of drawing can ever leak one into training. Standard library only: servers and evaluators
may import it.
"""

import random
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

# fmt: off
WORDS = [
    "sun", "fox", "red", "map", "cup", "tree", "lamp", "bird", "fish", "gold", "milk", "rain",
    "snow", "ship", "ring", "door", "book", "rope", "salt", "wolf", "bell", "corn", "leaf",
    "nest", "pond", "sand", "tent", "vase", "wind", "yarn", "moon", "star", "hill", "lake",
    "road", "bear", "frog",
]
FOREIGN = ["café", "naïve", "über", "señor", "Ærø", "日本", "東", "да", "π", "🙂", "🚀", "½"]
NAMES = [
    "Ann", "Bob", "Eva", "Ian", "Kim", "Leo", "Mia", "Ned", "Pam", "Ray", "Sue", "Tom", "Uma",
    "Vic", "Zoe",
]
CITIES = ["Oslo", "Rome", "Lima", "Bern", "Cairo", "Delhi", "Paris", "Quito", "Seoul", "Tokyo"]
# fmt: on
LETTERS = "abcdefghijklmnopqrstuvwxyz"

Task = Callable[[random.Random], tuple[str, str]]


@dataclass(frozen=True)
class Example:
    """One question, its only right answer, and the stop token that the answer ends with."""

    task: str
    prompt: str
    answer: str
    stop: str


def some_words(rng: random.Random, low: int, high: int) -> list[str]:
    """`low` to `high` different words; one list in three holds one or two multi-byte words."""
    words = rng.sample(WORDS, rng.randint(low, high))
    if rng.random() < 0.35:
        foreign = rng.sample(FOREIGN, rng.randint(1, 2))
        words[: len(foreign)] = foreign
        rng.shuffle(words)
    return words


def count(rng: random.Random) -> tuple[str, str]:
    """Every number from a start to an end in equal steps, up or down."""
    start, step, length = rng.randint(0, 199), rng.randint(1, 5), rng.randint(5, 8)
    numbers, way = [start + step * i for i in range(length)], "up"
    if rng.random() < 0.4:
        numbers, way = numbers[::-1], "down"
    prompt = f"Count {way} from {numbers[0]} to {numbers[-1]} by {step}."
    return prompt, ", ".join(map(str, numbers)) + "."


def letters(rng: random.Random) -> tuple[str, str]:
    """A run of the alphabet between two letters, in either case, forwards or backwards."""
    length, alphabet, way = rng.randint(7, 18), LETTERS, "up"
    if rng.random() < 0.4:
        alphabet, way = alphabet[::-1], "down"
    alphabet = alphabet.upper() if rng.random() < 0.5 else alphabet
    start = rng.randint(0, len(alphabet) - length)
    run = alphabet[start : start + length]
    return f"Letters {way} from {run[0]} to {run[-1]}.", " ".join(run)


def repeat(rng: random.Random) -> tuple[str, str]:
    """The same list again."""
    items = some_words(rng, 5, 9)
    return f"Repeat: {', '.join(items)}", f"Again: {', '.join(items)}."


def reverse(rng: random.Random) -> tuple[str, str]:
    """The list from its end."""
    items = some_words(rng, 4, 7)
    return f"Reverse: {', '.join(items)}", f"Reversed: {', '.join(reversed(items))}."


def add(rng: random.Random) -> tuple[str, str]:
    """A sum of two two-digit numbers, worked in columns."""
    a, b = rng.randint(10, 99), rng.randint(10, 99)
    ones, tens = a % 10 + b % 10, a // 10 * 10 + b // 10 * 10
    work = f"{a % 10} + {b % 10} = {ones}, {a // 10 * 10} + {b // 10 * 10} = {tens}"
    return f"What is {a} + {b}?", f"{work}, {tens} + {ones} = {a + b}."


def to_json(rng: random.Random) -> tuple[str, str]:
    """A person's fields as one JSON object, in the order given."""
    fields = {
        "name": f'"{rng.choice(NAMES)}"',
        "age": str(rng.randint(10, 99)),
        "city": f'"{rng.choice(CITIES)}"',
        "likes": f'"{rng.choice(WORDS)}"',
    }
    keys = rng.sample(sorted(fields), rng.randint(3, 4))
    listed = ", ".join(f"{key} {fields[key].strip(chr(34))}" for key in keys)
    return f"JSON: {listed}", "{" + ", ".join(f'"{key}": {fields[key]}' for key in keys) + "}"


def table(rng: random.Random) -> tuple[str, str]:
    """Table rows of three cells from plain lines."""
    height = rng.randint(2, 3)
    rows = [[rng.choice(WORDS), str(rng.randint(1, 99)), rng.choice(WORDS)] for _ in range(height)]
    prompt = "Table: " + "; ".join(" ".join(row) for row in rows)
    return prompt, "\n".join("| " + " | ".join(row) + " |" for row in rows)


def sort(rng: random.Random) -> tuple[str, str]:
    """Different digits in rising order."""
    digits = rng.sample(range(10), rng.randint(5, 8))
    ordered = " < ".join(map(str, sorted(digits)))
    return f"Sort {' '.join(map(str, digits))}", f"Sorted: {ordered}"


# Structured answers end the text, sentences hand over to the user: both stop ids are in use.
TASKS: dict[str, tuple[Task, str]] = {
    "count": (count, "<|user|>"),
    "letters": (letters, "<|endoftext|>"),
    "repeat": (repeat, "<|user|>"),
    "reverse": (reverse, "<|user|>"),
    "add": (add, "<|user|>"),
    "json": (to_json, "<|endoftext|>"),
    "table": (table, "<|endoftext|>"),
    "sort": (sort, "<|endoftext|>"),
}


def is_heldout(prompt: str) -> bool:
    """Whether this prompt is never trained on: one in eight, decided by its content alone."""
    return zlib.crc32(prompt.encode()) % 8 == 0


def draw(task: str, rng: random.Random, heldout: bool) -> Example:
    """One example of a task from the chosen side of the split."""
    make, stop = TASKS[task]
    while True:
        prompt, answer = make(rng)
        if is_heldout(prompt) == heldout:
            return Example(task, prompt, answer, stop)


def training_examples(count: int, seed: int) -> Iterator[Example]:
    """`count` examples, the tasks in turn; the same seed gives the same examples."""
    rng, names = random.Random(seed), list(TASKS)
    for i in range(count):
        yield draw(names[i % len(names)], rng, heldout=False)


def heldout_examples(per_task: int, seed: int) -> list[Example]:
    """`per_task` different held-out examples of every task, in a fixed order."""
    rng, found = random.Random(seed), {}
    for task in TASKS:
        wanted = len(found) + per_task
        while len(found) < wanted:
            example = draw(task, rng, heldout=True)
            found.setdefault(example.prompt, example)
    return list(found.values())


def render(prompt: str) -> str:
    """One user turn as the chat template writes it, ready for the answer."""
    return f"[gMASK]<sop><|user|>\n{prompt}<|assistant|>\n"
