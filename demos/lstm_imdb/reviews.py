"""Reviews with their sentiment: files in the folders of the Large Movie Review Dataset, or made ones.

A review is a row of word numbers: 0 pads it at the end, 1 is any word that is not in the vocabulary.
"""

if __name__ == "__main__":
    raise SystemExit(f"{__doc__}\nScripts use this file; run train_lstm.py.")

import numpy as np
from synkhronos.extensions.zoo.texts import (  # noqa: F401  # load and PADDING are for the script
    PADDING,
    SPLIT_SEED,
    encoded,
    load,
    tokens,
    vocabulary,
)

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
