"""The selection of tests that ``--quick`` runs."""

import collections

FOLDERS = ("unit", "contract")  # of these all tests are quick, if they have few cases
CASES = 3  # of each of their tests, or of each check of a contract


def quick(items):
    """Return a set: some cases of each test in `FOLDERS`, and one of each with the mark ``quick``."""
    groups = collections.defaultdict(list)
    for item in items:
        if is_quick(item):
            groups[group_of(item)].append(item)
    return {one for group in groups.values() for one in spread(group, cases(group[0]))}


def is_quick(item):
    if item.get_closest_marker("slow"):
        return False
    return item.path.parent.name in FOLDERS or item.get_closest_marker("quick") is not None


def group_of(item):
    """Return what the cases of one test have in common, or those of one check of an interface."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return item.path, item.originalname, parameters.get("check")


def cases(item):
    return CASES if item.path.parent.name in FOLDERS else 1


def spread(sequence, number):
    """Return a number of elements at equal distances, with the first and, of several, the last."""
    if number >= len(sequence):
        return list(sequence)
    return [sequence[k * (len(sequence) - 1) // max(number - 1, 1)] for k in range(number)]
