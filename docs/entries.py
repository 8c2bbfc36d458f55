"""Writes the messages of the page "Troubleshooting" into the package, which names their entries.

    python docs/entries.py

Each entry of the page has an anchor: the first words of its first message.
"""

import re
from pathlib import Path

HERE = Path(__file__).resolve().parent
PAGE = HERE / "troubleshooting.rst"
MODULE = HERE.parent / "synkhronos" / "host" / "messages.py"
WORDS = 6  # in an anchor, unless an entry before has the same
SHORTEST = 12  # characters without what varies, or a message says too little
BEGINNING = '''"""The messages that the page "Troubleshooting" explains.

``docs/entries.py`` writes this file.
"""

#: In each line the anchor of an entry, and a message; ``...`` stands for what varies.
MESSAGES = """\\
'''
END = '"""  # noqa: E501'


def anchors(terms):
    """Return the anchors of entries, from the text of each."""
    found = []
    for text in terms:
        words = re.findall("[a-z0-9]+", text.lower())
        counts = range(min(WORDS, len(words)), len(words) + 1)
        names = ("-".join(words[:count]) for count in counts)
        found.append(next(name for name in names if name not in found))
    return found


def entries(page):
    """Return the messages of each entry of the page's source, by anchor.

    An entry is a line with an indented line below it, and the messages are its literals.
    """
    lines = page.splitlines()
    terms = [
        line
        for line, below in zip(lines, lines[1:])
        if re.match(r"\w|``", line) and re.match(r" {4}\S", below)
    ]
    messages = [re.findall("``(.+?)``", line) for line in terms]
    first = [line if line[:2] != "``" else found[0] for line, found in zip(terms, messages)]
    return {name: tuple(found) for name, found in zip(anchors(first), messages)}


def module(found):
    """Return the source of the module."""
    lines = [
        f"{name} {message}\n"
        for name, messages in found.items()
        for message in messages
        if len(message.replace("...", "").strip()) >= SHORTEST
    ]
    return f"{BEGINNING}{''.join(lines)}{END}\n"


if __name__ == "__main__":
    MODULE.write_text(module(entries(PAGE.read_text())))
    print(f"{MODULE} has the messages of {PAGE}")
