"""Tests of the demo that learns the sentiment of reviews: its data, and its script."""

import re

import numpy as np
import pytest
from demo_modules import modules_of, need
from processes import ROOT

need("sklearn", "tqdm")

DEMO = ROOT / "demos" / "lstm_imdb"
SMALL = ["--processes", "2", "--cells", "16", "--epochs", "2", "--batch-size", "5"]

demo = modules_of("lstm_imdb", "reviews")


@pytest.fixture(scope="module")
def reviews(demo):
    return demo.reviews


# Files


def write_files(folder, texts):
    for place, of_place in texts.items():
        (folder / place).mkdir(parents=True)
        for number, text in enumerate(of_place):
            (folder / place / f"{number}_7.txt").write_text(text, encoding="utf-8")


TEXTS = {
    "train/neg": ["Dull, dull.", "It's bad!<br /><br />Bad"],
    "train/pos": ["Très bon film", "good good good"],
    "test/neg": ["bad unheard-of"],
    "test/pos": ["one two three four five good film", ""],
}


def test_files_are_read_as_rows_of_word_numbers(reviews, tmp_path):
    write_files(tmp_path, TEXTS)
    found = reviews.load(tmp_path, n_words=100, length=4)
    sizes = {part: rows.shape for part, (rows, _) in found.parts.items()}
    assert sizes == {"train": (3, 4), "valid": (1, 4), "test": (3, 4)}
    rows, labels = found.parts["test"]
    assert labels.tolist() == [0, 1, 1] and rows.dtype == labels.dtype == np.int32
    assert rows[0].tolist()[1:] == [1, 1, 0]  # unknown words, and padding
    assert found.text(rows[1]).split()[:2] == ["?", "?"]  # of a long text the last words count
    assert rows[2].tolist() == [1, 0, 0, 0]  # without words
    seen = {found.text(row) for part in ("train", "valid") for row in found.parts[part][0]}
    assert any("good good good" in text for text in seen)
    assert sum(labels.sum() for _, labels in list(found.parts.values())[:2]) == 2


# The script


@pytest.mark.slow
def test_the_script_learns_from_made_reviews(run_demo, tmp_path):
    arguments = ["--reviews", "2000", *SMALL, "--learning-rate", "0.04", "--plot", "loss.png"]
    done = run_demo(DEMO / "train_lstm.py", *arguments, "--period", "2", timeout=300)
    lines = done.stdout.splitlines()
    assert lines[0] == "Data:   2000 reviews made by a grammar, not by people"
    assert "EASGD(alpha=0.5, period=2, momentum=0.0), 2 process(es)" in lines[2]
    assert lines[3].split()[:3] == ["epoch", "validated", "by"] and "process 1" in lines[4]
    accuracy = float(re.search(r"Test:   loss [0-9.]+, accuracy ([0-9.]+)%", done.stdout)[1])
    assert accuracy > 75  # the words alone, without their order, tell 63%
    assert len(re.findall(r"^positive by \d+%, and is (positive|negative): ", done.stdout, re.M)) == 3
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
