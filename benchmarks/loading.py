"""loading: training steps on JPEG files that other processes load, against loading in the step.

The files have 256 x 256 pixels; each image is decoded, cropped to 224 x 224 at a random place, mirrored
at random and normalized. A step of ResNet-50 or AlexNet on two ranks gets its minibatches by a
``Loader`` with one process, by PyTorch's ``DataLoader`` with one worker, by loading them in the script
before each step, or always the same one from memory, which is the ideal. All take turns in one process.

On a machine without cores to spare, the loaders take their time from the ranks. So the step is longer
than the ideal by about the time of loading; but it does not wait.

Loading alone is measured without steps, with as many processes as there are cores.
"""

import importlib.util
import itertools
import os
import tempfile
import time
from pathlib import Path

import common
import torch_steps
from common import COLOURS, ONE_THREAD, Contestant, Line

import numpy as np

RANKS = 2
PIXELS, CROP = 256, 224
FILES, CLASSES = 512, 8
BATCH = 64  # images, of loading alone
AHEAD = 2  # batches; of a DataLoader, for each worker
MEAN, STD = (123.7, 116.3, 103.5), (58.4, 57.1, 57.4)
LEARNING_RATE, MOMENTUM = 0.001, 0.9
#: The ways in which a step gets its minibatch
IDEAL, IN_STEP, LOADER, TORCH = "from memory", "in the step", "Loader", "DataLoader"
COLOURS_OF_WAYS = {IDEAL: "other light", IN_STEP: "other", LOADER: "synk", TORCH: "torch"}


def main():
    common.main(__doc__, measure, draw)


# The files, and the ways of loading them


def write_files(folder):
    """Write JPEG files of smooth pictures with some noise, of about the size of photographs."""
    from PIL import Image

    random = np.random.RandomState(0)
    for number in range(FILES):
        small = Image.fromarray(random.randint(0, 256, (12, 12, 3)).astype("uint8"))
        picture = np.asarray(small.resize((PIXELS, PIXELS), Image.Resampling.BICUBIC), float)
        picture = np.clip(picture + random.normal(0, 12, picture.shape), 0, 255).astype("uint8")
        place = Path(folder) / f"class {number % CLASSES}"
        place.mkdir(exist_ok=True)
        Image.fromarray(picture).save(place / f"{number:04d}.jpg", quality=90)


def transforms():
    from synkhronos.extensions import loading

    return [loading.RandomCrop(CROP), loading.Mirror(), loading.Normalize(MEAN, STD)]


def serially(source, batch):
    """Yield minibatches that are loaded in this process, by the same code."""
    from synkhronos.extensions import loading

    changes = transforms()
    for epoch in itertools.count():
        order = source.order(np.random.default_rng([0, epoch]))
        for start in range(0, len(order) - batch + 1, batch):
            rows = order[start : start + batch]
            images, labels = source.read(rows)
            draws = loading.Draws(0, epoch, rows, int(rows[0]))
            for change in changes:
                images = change(images, draws)
            yield images, labels


def by_loader(loader):
    for epoch in itertools.count():
        yield from loader.epoch(epoch)


def by_torch(source, batch, workers):
    """Yield minibatches of a ``DataLoader``, as a user of PyTorch without torchvision loads them."""
    import torch
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset

    torch.set_num_threads(1)
    mean, std = (torch.tensor(one)[:, None, None] for one in (MEAN, STD))

    class Files(Dataset):
        def __len__(self):
            return len(source)

        def __getitem__(self, row):
            with Image.open(source.files[row]) as file:
                image = file.convert("RGB")
            top, left = torch.randint(PIXELS - CROP + 1, (2,)).tolist()
            image = image.crop((left, top, left + CROP, top + CROP))
            if torch.rand(()) < 0.5:
                image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
            pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).float()
            return (pixels - mean) / std, source.labels[row]

    loader = DataLoader(
        Files(),
        batch,
        shuffle=True,
        num_workers=workers,
        drop_last=True,
        persistent_workers=True,
        prefetch_factor=AHEAD,
        multiprocessing_context="fork",  # as on Linux by default, unless the process was spawned
    )
    while True:
        for images, labels in loader:
            yield images.numpy(), labels.numpy()


# Contestants


def alone(way, folder, workers):
    """Load minibatches without using them."""
    from synkhronos.extensions import loading

    source = loading.ImageFolder(folder)
    if way == TORCH:
        batches = by_torch(source, BATCH, workers)
    elif way == LOADER:
        loader = loading.Loader(
            source, transforms(), AHEAD, batch_size=BATCH, processes=workers, drop_last=True
        )
        batches = by_loader(loader)
    else:
        batches = serially(source, BATCH)

    def turn(count):
        for _ in range(AHEAD * max(1, workers) + 1):  # what was loaded between the turns
            next(batches)
        begin = time.perf_counter()
        for _ in range(count):
            next(batches)
        return count * BATCH / (time.perf_counter() - begin)

    yield turn


def steps(network, folder, is_quick):
    """Train on two ranks with minibatches that come in each of the ways."""
    import synkhronos as synk
    from synkhronos.extensions import loading, train

    source = loading.ImageFolder(folder)
    arguments, batch = NETWORKS[network](is_quick)
    loader = loading.Loader(source, transforms(), AHEAD, batch_size=batch, drop_last=True)
    common.fork(RANKS)
    step = train.make_train_function(*arguments)
    synk.distribute()
    kept = tuple(map(synk.data, next(serially(source, batch))))
    ways = {
        IDEAL: itertools.repeat(kept),
        IN_STEP: serially(source, batch),
        LOADER: by_loader(loader),
    }
    if torch_steps.is_there():
        ways[TORCH] = by_torch(source, batch, 1)

    def turn(way, count):
        batches, waited = ways[way], 0.0
        for _ in range(AHEAD + 1):  # the first ones were loaded between the turns
            step(*next(batches))
        begin = time.perf_counter()
        for _ in range(count):
            asked = time.perf_counter()
            data = next(batches)
            waited += time.perf_counter() - asked
            step(*data)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds / count, "waited": waited / seconds, "batch": batch}

    yield turn
    loader.close()
    synk.close()


def resnet(is_quick):
    """Return the arguments of ``make_train_function`` for the demo's ResNet-50, and the batch size."""
    import argparse

    from synkhronos.extensions import updates

    demo = common.load_demo("resnet", "network")
    size = {"blocks": [1, 1, 1, 1], "width": 16} if is_quick else {"blocks": [3, 4, 6, 3], "width": 64}
    options = argparse.Namespace(seed=1, size=CROP, classes=1000, sync_batch_norm=False, **size)
    model = demo.build_model(options)

    def rule(loss, params, *arguments):
        gradient, *rest = updates.nesterov_momentum(loss, params, *arguments)
        return [*gradient, *model.average_updates], *rest

    return (model.loss, model.params, model.x, model.y, rule, LEARNING_RATE, MOMENTUM), 8


def alexnet(is_quick):
    """Return the same for AlexNet in one column [1]_.

    .. [1] Krizhevsky: One weird trick for parallelizing convolutional neural networks, 2014.
    """
    import synkhronos  # noqa: F401  # before Lasagne, which otherwise cannot be imported
    import lasagne
    import theano.tensor as T
    from lasagne.layers import Conv2DLayer, DenseLayer, DropoutLayer, MaxPool2DLayer
    from synkhronos.extensions import updates

    x, y = T.tensor4("x", dtype="float32"), T.ivector("y")
    lasagne.random.set_rng(np.random.RandomState(1))
    layer = lasagne.layers.InputLayer((None, 3, CROP, CROP), x)
    share = 8 if is_quick else 1
    for filters, size, stride, pad, has_pool in (
        (64, 11, 4, 2, True), (192, 5, 1, 2, True), (384, 3, 1, 1, False), (256, 3, 1, 1, False),
        (256, 3, 1, 1, True),
    ):  # fmt: skip
        layer = Conv2DLayer(layer, filters // share, size, stride, pad)
        layer = MaxPool2DLayer(layer, 3, 2) if has_pool else layer
    for _ in range(2):
        layer = DenseLayer(DropoutLayer(layer), 4096 // share)
    layer = DenseLayer(layer, 1000, nonlinearity=lasagne.nonlinearities.softmax)
    prediction = lasagne.layers.get_output(layer)
    loss = lasagne.objectives.categorical_crossentropy(prediction, y).mean()
    params = lasagne.layers.get_all_params(layer, trainable=True)
    return (loss, params, x, y, updates.nesterov_momentum, LEARNING_RATE, MOMENTUM), 32


NETWORKS = {"ResNet-50": resnet, "AlexNet": alexnet}


# Measuring


def measure(options):
    rounds = 2 if options.quick else 5
    lines = []
    with tempfile.TemporaryDirectory(prefix="benchmark-loading-") as folder:
        write_files(folder)
        nbytes = sum(path.stat().st_size for path in Path(folder).rglob("*.jpg")) / FILES
        measure_alone(folder, rounds, 4 if options.quick else 8, lines)
        for network in NETWORKS:
            measure_steps(network, folder, rounds, 2 if options.quick else 4, options.quick, lines)
    notes = [
        f"{FILES} files of {nbytes / 1000:.0f} kB, which are in the system's cache of files",
        f"the steps: {RANKS} ranks; ResNet-50 with 8 images and AlexNet with 32 images, Nesterov "
        f"momentum, the loss collected in each step",
        "waiting is the time between asking for a minibatch and having it, as a share of all time",
    ]
    if importlib.util.find_spec("torch") is None:
        notes.append(torch_steps.note())
    return common.Result("JPEG files of 256 x 256 pixels, cropped to 224 x 224", lines, notes)


def measure_alone(folder, rounds, count, lines):
    workers = len(os.sched_getaffinity(0))
    made = {
        "one process": Contestant(alone, IN_STEP, folder, 0, environment=ONE_THREAD),
        LOADER: Contestant(alone, LOADER, folder, workers, environment=ONE_THREAD),
    }
    if torch_steps.is_there():
        made[TORCH] = Contestant(alone, TORCH, folder, workers, environment=ONE_THREAD)
    with common.contestants(**made) as players:
        turns = {name: (lambda player=player: player(count)) for name, player in players.items()}
        rates = common.take_turns(turns, rounds, "loading alone")
    base = np.array(rates["one process"])
    lines.append(Line("loading alone, in the script", "images/s", list(base)))
    ours = np.array(rates[LOADER])
    lines.append(
        Line(
            f"loading alone, Loader, {workers} processes",
            "images/s",
            list(ours),
            list(ours / base),
            "one",
        )
    )
    theirs = np.array(rates.get(TORCH, []))
    name = f"loading alone, DataLoader, {workers} workers"
    lines.append(Line(name, "images/s", list(theirs)))
    if len(theirs):
        ratios = ours / theirs
        lines.append(_with_goal(Line("Loader / DataLoader", "", list(ratios)), "≥", 1))


def measure_steps(network, folder, rounds, count, is_quick, lines):
    # Batch normalization by rank differs from that of the whole minibatch, which is known.
    environment = {**ONE_THREAD, "SYNKHRONOS_VERIFY": "off"}
    one = Contestant(steps, network, folder, is_quick, environment=environment)
    with common.contestants(one=one) as players:
        ways = [way for way in COLOURS_OF_WAYS if way != TORCH or torch_steps.is_there()]
        turns = {way: (lambda way=way: players["one"](way, count)) for way in ways}
        times = common.take_turns(turns, rounds, network)
    found = {
        way: {key: np.array([turn[key] for turn in of_way]) for key in of_way[0]}
        for way, of_way in times.items()
    }
    ideal = found[IDEAL]["seconds"]
    for way, values in found.items():
        rates = values["batch"] / values["seconds"]
        against = (None, "") if way == IDEAL else (list(ideal / values["seconds"]), "from memory")
        lines.append(Line(f"{network}, {way}", "images/s", list(rates), *against))
        if way != IDEAL:
            share = Line(f"{network}, {way}: waiting", "%", list(100 * values["waited"]))
            lines.append(_with_goal(share, "≤", 3) if way == LOADER else share)


def _with_goal(line, sign, goal):
    line.goal = f"{sign} {goal:g}"
    line.reached = line.median >= goal if sign == "≥" else line.median <= goal
    return line


def draw(figure, record):
    figure.set_size_inches(13, 4.2)
    places = figure.subplots(1, 1 + len(NETWORKS))
    alone = [
        one for one in record["lines"] if one["what"].startswith("loading alone") and one["samples"]
    ]
    labels = [one["what"].replace("loading alone, ", "") for one in alone]
    colours = [COLOURS[name] for name in ("other", "synk", "torch")][: len(alone)]
    common.bars(places[0], alone, labels, colours, "images/s")
    places[0].set_title("loading alone")
    for axes, network in zip(places[1:], NETWORKS):
        names = [f"{network}, {way}" for way in COLOURS_OF_WAYS]
        lines = [one for name in names for one in record["lines"] if one["what"] == name]
        ways = [one["what"].partition(", ")[2] for one in lines]
        colours = [COLOURS[COLOURS_OF_WAYS[way]] for way in ways]
        common.bars(axes, lines, ways, colours, "images/s")
        axes.set_title(f"training {network}, {RANKS} ranks")


if __name__ == "__main__":
    main()
