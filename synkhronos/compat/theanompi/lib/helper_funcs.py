"""``theanompi.lib.helper_funcs``: checking models, and saving their weights in ``.npy`` files."""

from __future__ import annotations

import os
import sys
from typing import Any, Iterator, Sequence

import numpy as np

from synkhronos.extensions.session import model as models

_WEIGHTS = ("W", "W0", "W1", "b", "b0", "b1")


def check_model(model: Any) -> None:
    """Raise a ``TypeError`` that lists what a model lacks."""
    models.check(model, is_compiled=False)


def save_model(model: Any, path: str, verbose: bool) -> None:
    """Save a model: by ``model.save(path)`` if it has this, or else its weights and learning rate.

    Parameters
    ----------
    model : object
        The model, with ``layers`` as of ``layers2``, or else its ``params`` are saved.
    path : str
        A folder, which is made. It ends with a slash.
    verbose : bool
        Whether to write a line.
    """
    os.makedirs(path, exist_ok=True)
    if hasattr(model, "save"):
        model.save(path)
    else:
        if hasattr(model, "layers"):
            save_weights(model.layers, path, model.epoch)
        else:
            arrays = [param.get_value() for param in model.params]
            np.savez(os.path.join(path, f"{model.name}params_{model.epoch}.npz"), *arrays)
        np.save(os.path.join(path, f"lr_{model.epoch}.npy"), model.shared_lr.get_value())
    if verbose:
        sys.stdout.write(f"\nweights saved at epoch {model.epoch}\n")
    if hasattr(model, "current_info"):
        with open(os.path.join(path, "val_info.txt"), "a") as file:
            file.write(f"\nepoch: {model.epoch} val_info {model.current_info}:")


def _weights(layers: Sequence[Any], epoch: int, l_range: Any = None) -> Iterator[tuple[Any, str]]:
    """Yield the weights of layers with the names of their files."""
    for number, layer in enumerate(layers):
        if l_range is None or number in l_range:
            for name in _WEIGHTS:
                if getattr(layer, name, None) is not None:
                    yield getattr(layer, name), f"{name}_{number}_{epoch}"


def save_weights(layers: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Save the weights of layers in a folder, which is made. It ends with a slash."""
    os.makedirs(weights_dir, exist_ok=True)
    for weight, name in _weights(layers, epoch):
        weight.save_weight(weights_dir, name)


def load_weights(layers: Sequence[Any], weights_dir: str, epoch: int, l_range: Any = None) -> None:
    """Load what `save_weights` has saved, for the layers in `l_range`, or for all."""
    for weight, name in _weights(layers, epoch, l_range):
        weight.load_weight(weights_dir, name)


def collect_weight_path(
    layers: Sequence[Any], weights_dir: str, epoch: int, l_range: Any = None
) -> list[str]:
    """Return the files of `save_weights`."""
    return [f"{weights_dir}{name}.npy" for _, name in _weights(layers, epoch, l_range)]


def load_weights_from_memory(
    layers: Sequence[Any], weights_list: Sequence[np.ndarray], l_range: Any = None
) -> None:
    """Set the weights of layers, in the order of `collect_weight_path`."""
    for (weight, _), value in zip(_weights(layers, 0, l_range), weights_list):
        weight.val.set_value(value)


def save_momentums(vels: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Save velocities in a folder, which is made."""
    os.makedirs(weights_dir, exist_ok=True)
    for number, velocity in enumerate(vels):
        np.save(os.path.join(weights_dir, f"mom_{number}_{epoch}.npy"), velocity.get_value())


def load_momentums(vels: Sequence[Any], weights_dir: str, epoch: int) -> None:
    """Load the velocities that `save_momentums` has saved."""
    for number, velocity in enumerate(vels):
        velocity.set_value(np.load(os.path.join(weights_dir, f"mom_{number}_{epoch}.npy")))
