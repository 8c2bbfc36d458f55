"""Reviews with their sentiment: files in the folders of the Large Movie Review Dataset, or made ones.

A review is a row of word numbers: 0 pads it at the end, 1 is any word that is not in the vocabulary.
"""

import collections
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

PADDING, UNKNOWN = 0, 1
SPLIT_SEED = 2017  # not --seed: every run validates and tests with the same reviews


class Reviews(NamedTuple):
    """Three parts, ``"train"``, ``"valid"`` and ``"test"``, each ``(rows, labels)``; 1 is positive."""

    source: str
    words: list  # by number
    parts: dict

    def text(self, row):
        """Return the words of a row."""
        return " ".join(self.words[number] for number in row if number != PADDING)


# Files


def load(folder, n_words, length):
    """Load a folder with ``train/pos``, ``train/neg``, ``test/pos`` and ``test/neg``, of text files.

    The Large Movie Review Dataset (A. Maas et al., 2011) has this form. The vocabulary are the `n_words`
    most frequent words of its training part. A tenth of this part is for validation. Of a longer review
    the last `length` words are used.
    """
    texts = {part: read_part(Path(folder) / part) for part in ("train", "test")}
    trained, labels = texts["train"]
    order = np.random.RandomState(SPLIT_SEED).permutation(len(trained))
    valid, train = np.split(order, [max(1, len(order) // 10)])
    if not len(train):
        raise ValueError(f"expected at least two reviews in {Path(folder) / 'train'}")
    words = vocabulary([trained[row] for row in train], n_words)
    split = {
        "train": ([trained[row] for row in train], labels[train]),
        "valid": ([trained[row] for row in valid], labels[valid]),
        "test": texts["test"],
    }
    return encoded(f"the text files of {folder}", words, split, length)


def read_part(folder):
    """Return the words of each review, and the labels."""
    texts, labels = [], []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise FileNotFoundError(f"expected text files in {folder / name}, NAME.txt")
        texts += [tokens(path.read_text(encoding="utf-8", errors="replace")) for path in paths]
        labels += [label] * len(paths)
    return texts, np.array(labels, "int32")


def tokens(text):
    """Return the words and punctuation marks of a text, in small letters, without HTML's tags."""
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*|[.,;:!?]", re.sub(r"<[^<>]*>", " ", text).lower())


def vocabulary(texts, n_words):
    """Return the most frequent words after those for padding and for unknown words."""
    counts = collections.Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return ["", "?", *ranked[:n_words]]


def encoded(source, words, texts, length):
    """Return `Reviews` of texts, which are lists of words."""
    numbers = {word: number for number, word in enumerate(words) if number > UNKNOWN}
    longest = max(len(text) for part, _ in texts.values() for text in part)
    parts = {}
    for part, (of_part, labels) in texts.items():
        rows = np.full((len(of_part), max(1, min(length, longest))), PADDING, "int32")
        for row, text in zip(rows, of_part):
            found = [numbers.get(word, UNKNOWN) for word in text[-length:]] or [UNKNOWN]
            row[: len(found)] = found
        parts[part] = rows, np.asarray(labels, "int32")
    return Reviews(source, words, parts)


# Made reviews

GOOD = "good great fine funny moving clever charming brilliant gripping fresh".split()
BAD = "bad poor weak dull silly clumsy boring awful tedious stale".split()
THINGS = "plot acting music camera ending dialogue cast pace story script scenery humour".split()
FILLERS = (
    "i saw it on a plane", "we watched it with my brother", "it lasts two hours", "i had read the book",
    "the cinema was half empty", "it was made in spring", "i do not know the director",
)  # fmt: skip
DENIALS = ("not", "never", "anything but", "hardly")


def make(number, length):
    """Make reviews by a grammar, in the same way each time; they are not from people.

    A clause such as "the plot was not very good" counts for or against, twice with "very". "although"
    makes a clause count nothing, and "my neighbour says that", which is always wrong, turns it around.
    So words alone do not tell the sentiment, but their order does.
    """
    random = np.random.RandomState(SPLIT_SEED)
    made = [make_review(random) for _ in range(number)]
    texts, labels = [text for text, _ in made], np.array([label for _, label in made], "int32")
    bounds = np.split(np.arange(number), [number * 8 // 10, number * 9 // 10])
    words = vocabulary([texts[row] for row in bounds[0]], 10_000)
    split = {
        part: ([texts[row] for row in rows], labels[rows])
        for part, rows in zip(("train", "valid", "test"), bounds)
    }
    return encoded(f"{number} reviews made by a grammar, not by people", words, split, length)


def make_review(random):
    """Return the words of a review, and 1 if it is positive, else 0."""
    total, sentences = 0, []
    while len(sentences) < 2 or (len(sentences) < 4 and random.rand() < 0.5) or total == 0:
        text, value = make_sentence(random)
        total += value
        sentences.append(f"{text} .")
    if random.rand() < 0.7:
        sentences.insert(random.randint(len(sentences) + 1), f"{random.choice(FILLERS)} .")
    return tokens(" ".join(sentences)), int(total > 0)


def make_sentence(random):
    text, value = make_clause(random)
    kind = random.rand()
    if kind < 0.3:
        other, further = make_clause(random)
        return f"{text} and {other}", value + further
    if kind < 0.45:
        conceded, _ = make_clause(random)
        return f"although {conceded} , {text}", value
    if kind < 0.55:
        return f"my neighbour says that {text}", -value
    return text, value


def make_clause(random):
    positive = random.rand() < 0.5
    adjective, value = random.choice(GOOD if positive else BAD), 1 if positive else -1
    if random.rand() < 0.3:
        adjective, value = f"very {adjective}", 2 * value
    if random.rand() < 0.2:
        adjective, value = f"{random.choice(DENIALS)} {adjective}", -value
    return f"the {random.choice(THINGS)} was {adjective}", value
