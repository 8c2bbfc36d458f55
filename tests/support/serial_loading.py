"""What a loader has to give: a serial implementation, one row after the other, in plain Python."""

import numpy as np

GAMMA, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


def mix(state, number):
    """Return the number of SplitMix64 at a place of the sequence of a state."""
    z = (state + (number + 1) * GAMMA) & MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


class Numbers:
    """The random numbers of one row of a batch."""

    def __init__(self, seed, epoch, row, first):
        start = mix(mix(0, seed), epoch)
        self.states = {"image": mix(start, row), "batch": mix(mix(start, first), 2**64 - 2)}
        self.count = 0

    def uniform(self, per):
        self.count += 1
        return (mix(self.states[per], self.count - 1) >> 11) / 2**53

    def integer(self, below, per):
        return int(self.uniform(per) * below)


def crop(height, width, per="image", padding=0):
    def change(image, numbers):
        sides = [(0, 0)] * (image.ndim - 2) + [(padding, padding)] * 2
        image = np.pad(image, sides)
        top = numbers.integer(image.shape[-2] - height + 1, per)
        left = numbers.integer(image.shape[-1] - width + 1, per)
        return image[..., top : top + height, left : left + width]

    return change


def center(size):
    def change(image, numbers):
        top, left = ((extent - size) // 2 for extent in image.shape[-2:])
        return image[..., top : top + size, left : left + size]

    return change


def mirror(per="image", probability=0.5):
    def change(image, numbers):
        return image[..., ::-1] if numbers.uniform(per) < probability else image

    return change


def normalize(mean, std):
    mean, scale = (np.float32(np.asarray(one)) for one in (mean, std))
    scale = np.float32(1) / scale
    if mean.ndim == 1:
        mean = mean[:, None, None]
    if scale.ndim == 1:
        scale = scale[:, None, None]

    def change(image, numbers):
        return (image.astype(np.float32) - mean) * scale

    return change


def normalize_itself():
    def change(image, numbers):
        image = image.astype(np.float32)
        image = image - image.mean()
        return image / (image.std() + np.float32(1e-8))

    return change


def batches(rows, order, batch_size, changes=(), seed=0, epoch=0, left_out=()):
    """Yield the batches of an epoch, with the rows in an order, but without those left out.

    ``rows(number)`` returns a row of the source: a tuple of arrays or numbers. ``change(image,
    numbers)`` returns the image after a transform.
    """
    for start in range(0, len(order), batch_size):
        chosen = [int(row) for row in order[start : start + batch_size]]
        first, found = chosen[0], []
        for row in chosen:
            if row in left_out:
                continue
            image, *others = rows(row)
            numbers = Numbers(seed, epoch, row, first)
            for change in changes:
                image = change(image, numbers)
            found.append([image, *others])
        if found:
            yield [np.array(column) for column in zip(*found)]
