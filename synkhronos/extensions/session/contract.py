"""What a model must have so that a session can train it: Theano-MPI's contract, checked at once.

The list is what Theano-MPI's workers use [1]_. Its README names fewer things.

References
----------
.. [1] Ma, H., Mao, F., & Taylor, G. W. (2016): Theano-MPI: a Theano-based distributed training
       framework. arXiv:1605.08325; ``theanompi/worker.py`` and ``lib/helper_funcs.py`` of
       https://github.com/uoguelph-mlrg/Theano-MPI.
"""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Callable

from synkhronos.engines.names import SharedVariable

#: How the methods are called, with the words that describe the call.
_METHODS: dict[str, tuple[tuple[Any, ...], str]] = {
    "train_iter": ((0, None), "(count, recorder)"),
    "val_iter": ((0, None), "(count, recorder)"),
    "reset_iter": (("train",), "(mode)"),
    "adjust_hyperp": ((0,), "(epoch)"),
    "cleanup": ((), "()"),
}
#: Methods of the data that models call themselves; they are checked if they exist.
_OF_DATA = {
    "shuffle_data": ({"mode": "train", "common_seed": 0}, "(mode, common_seed)"),
    "shard_data": ({"mode": "train", "rank": 0, "size": 1}, "(mode, rank, size)"),
}
_COUNTS = {"n_epochs": 0, "n_subb": 1}
_COUNTS_OF_DATA = {"n_batch_train": 1, "n_batch_val": 0}


def find_class(model: Callable[..., Any] | str) -> Callable[..., Any]:
    """Return the class of a model.

    Parameters
    ----------
    model : class, or str
        The class itself, or ``"package.module:ClassName"``.

    Raises
    ------
    TypeError, ValueError
        If it is neither, or there is no such class.
    """
    if not isinstance(model, str):
        if not callable(model):
            raise TypeError(
                f"Session: model: expected a class, or its place as 'models.modelfile:ModelClass', got "
                f"{model!r}"
            )
        return model
    module, colon, name = model.partition(":")
    if not (module and colon and name):
        raise ValueError(
            f"Session: model: expected a module and a class as 'models.modelfile:ModelClass', got "
            f"{model!r}"
        )
    found: Callable[..., Any] | None = getattr(importlib.import_module(module), name, None)
    if not callable(found):
        raise ValueError(
            f"Session: model: expected a class {name!r} in the module {module!r}, got {found!r}"
        )
    return found


def check(model: Any, is_compiled: bool) -> None:
    """Raise one error that lists everything that is missing or wrong.

    Before the functions are compiled, attributes that ``compile_iter_fns`` may create are listed only if
    something else is wrong.

    Parameters
    ----------
    model : object
        The model of this rank.
    is_compiled : bool
        Whether the model has compiled its functions.

    Raises
    ------
    TypeError
        If the model does not fulfil the contract.
    """
    complaints = [] if is_compiled else _of_methods(model)
    late = _of_data(getattr(model, "data", None)) if hasattr(model, "data") else ["data is missing"]
    if not isinstance(getattr(model, "shared_lr", None), SharedVariable):
        late.append(_missing(model, "shared_lr", "a shared variable"))
    complaints += _of_attributes(model)
    if is_compiled or complaints:
        complaints += late
    if complaints:
        when = "after compile_iter_fns()" if is_compiled else "before anything is compiled"
        raise TypeError(
            f"Session: model: expected what docs/sessions.rst lists, but in {type(model).__name__}, "
            f"{when}: {'; '.join(complaints)}"
        )


def _of_methods(model: Any) -> list[str]:
    complaints = []
    if not callable(getattr(model, "compile_iter_fns", None)):
        complaints.append("compile_iter_fns() is missing")
    elif not accepts(model.compile_iter_fns) and not accepts(model.compile_iter_fns, sync_type="avg"):
        complaints.append(_of_signature(model, "compile_iter_fns", "() or (sync_type=...)"))
    for name, (arguments, shown) in _METHODS.items():
        if not callable(getattr(model, name, None)):
            complaints.append(f"{name}{shown} is missing")
        elif not accepts(getattr(model, name), *arguments):
            complaints.append(_of_signature(model, name, shown))
    return complaints


def _of_attributes(model: Any) -> list[str]:
    complaints = []
    params = getattr(model, "params", None)
    is_list = isinstance(params, (list, tuple)) and bool(params)
    if not is_list or not all(isinstance(one, SharedVariable) for one in params or ()):
        complaints.append(_missing(model, "params", "a list of shared variables"))
    complaints += _of_counts(model, _COUNTS)
    if not hasattr(model, "epoch"):
        complaints.append("epoch is missing")
    return complaints


def _of_data(data: Any) -> list[str]:
    complaints = [f"data.{one}" for one in _of_counts(data, _COUNTS_OF_DATA)]
    for name, (arguments, shown) in _OF_DATA.items():
        if hasattr(data, name) and not accepts(getattr(data, name), **arguments):
            complaints.append(f"data.{_of_signature(data, name, shown)}")
    return complaints


def _of_counts(owner: Any, counts: dict[str, int]) -> list[str]:
    complaints = []
    for name, least in counts.items():
        value = getattr(owner, name, None)
        try:
            is_right = not isinstance(value, bool) and value == int(value) >= least  # type: ignore[arg-type]
        except (TypeError, ValueError):
            is_right = False
        if not is_right:
            complaints.append(_missing(owner, name, f"a whole number of at least {least}"))
    return complaints


def _missing(owner: Any, name: str, expected: str) -> str:
    if not hasattr(owner, name):
        return f"{name} is missing"
    text = repr(getattr(owner, name))
    return f"{name} is {text if len(text) < 60 else text[:57] + '...'} instead of {expected}"


def _of_signature(owner: Any, name: str, shown: str) -> str:
    return f"{name}{inspect.signature(getattr(owner, name))} cannot be called as {name}{shown}"


def accepts(function: Callable[..., Any], *args: Any, **kwargs: Any) -> bool:
    """Whether a function can be called with these arguments, as far as its signature says."""
    try:
        inspect.signature(function).bind(*args, **kwargs)
    except TypeError:
        return False
    except ValueError:  # a function in C, without a signature
        return True
    return True
