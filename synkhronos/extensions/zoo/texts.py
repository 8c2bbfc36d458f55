"""Reviews with their sentiment, from text files in the folders of the Large Movie Review Dataset.

A review is a row of word numbers: 0 pads it at the end, 1 is any word that is not in the vocabulary.
"""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

import numpy as np

PADDING, UNKNOWN = 0, 1
SPLIT_SEED = 2017  # every run validates and tests with the same reviews

Words = Sequence[str]  # of one review


class Reviews(NamedTuple):
    """Parts such as ``"train"`` and ``"test"``, each ``(rows, labels)``; 1 is positive.

    Attributes
    ----------
    source : str
        Where they come from.
    words : list of str
        The words by their numbers.
    parts : dict
        int32 rows of equal length, padded, and int32 labels, by the part's name.
    """

    source: str
    words: list[str]
    parts: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def text(self, row: np.ndarray) -> str:
        """Return the words of a row."""
        return " ".join(self.words[number] for number in row if number != PADDING)


def load(folder: str | Path, n_words: int, length: int, held_out: float = 0.1) -> Reviews:
    """Load a folder with ``train/pos``, ``train/neg``, ``test/pos`` and ``test/neg``, of text files.

    The Large Movie Review Dataset (A. Maas et al., 2011) has this form.

    Parameters
    ----------
    folder : path
    n_words : int
        The vocabulary are the most frequent words of the reviews to train on.
    length : int
        Of a longer review the last words are used.
    held_out : float
        The share of the training part that becomes the part ``"valid"``; with 0 there is no such part.

    Returns
    -------
    Reviews

    Raises
    ------
    FileNotFoundError
        If a folder has no text files.
    ValueError
        If no reviews are left to train on.
    """
    texts = {part: read_part(Path(folder) / part) for part in ("train", "test")}
    trained, labels = texts["train"]
    order = np.random.RandomState(SPLIT_SEED).permutation(len(trained))
    n_valid = max(1, int(len(order) * held_out)) if held_out else 0
    rows = {"train": order[n_valid:], "valid": order[:n_valid]}
    if not len(rows["train"]):
        raise ValueError(f"expected at least two reviews in {Path(folder) / 'train'}")
    split = {
        part: ([trained[row] for row in chosen], labels[chosen])
        for part, chosen in rows.items()
        if len(chosen)
    }
    words = vocabulary(split["train"][0], n_words)
    return encoded(f"the text files of {folder}", words, {**split, "test": texts["test"]}, length)


def read_part(folder: Path) -> tuple[list[Words], np.ndarray]:
    """Return the words of each review, and the labels."""
    texts: list[Words] = []
    labels: list[int] = []
    for label, name in enumerate(("neg", "pos")):
        paths = sorted((folder / name).glob("*.txt"))
        if not paths:
            raise FileNotFoundError(f"expected text files in {folder / name}, NAME.txt")
        texts += [tokens(path.read_text(encoding="utf-8", errors="replace")) for path in paths]
        labels += [label] * len(paths)
    return texts, np.array(labels, "int32")


def tokens(text: str) -> list[str]:
    """Return the words and punctuation marks of a text, in small letters, without HTML's tags."""
    return re.findall(r"[^\W_]+(?:['’][^\W_]+)*|[.,;:!?]", re.sub(r"<[^<>]*>", " ", text).lower())


def vocabulary(texts: Sequence[Words], n_words: int) -> list[str]:
    """Return the most frequent words after those for padding and for unknown words."""
    counts = collections.Counter(word for text in texts for word in text)
    ranked = sorted(counts, key=lambda word: (-counts[word], word))
    return ["", "?", *ranked[:n_words]]


def encoded(
    source: str, words: list[str], texts: Mapping[str, tuple[Sequence[Words], np.ndarray]], length: int
) -> Reviews:
    """Return `Reviews` of texts, which are lists of words, in the vocabulary `words`."""
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
