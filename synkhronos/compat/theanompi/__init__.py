"""Theano-MPI's names, for scripts and models that were written for it.

`install` makes them importable as ``theanompi``; ``python -m synkhronos run SCRIPT`` does so by itself.

``rules``
    `BSP`, `EASGD` and `GOSGD`, with ``init`` and ``wait``.
``launcher``
    The command ``tmlauncher``, its options and its config file.
``__main__``
    What ``tmlauncher`` starts.
``lib``
    ``theanompi.lib``: the recorder, updates and functions for models.
``models``
    ``theanompi.models``: layers, and functions for data.

The names and what they do are those of Theano-MPI's documentation and of the uses in its examples [1]_.

References
----------
.. [1] Ma, H., Mao, F., & Taylor, G. W. (2016): Theano-MPI: a Theano-based distributed training
       framework. arXiv:1605.08325; https://github.com/uoguelph-mlrg/Theano-MPI.
"""

import importlib as _importlib
import typing as _typing

from synkhronos.host import imports as _imports

__all__ = ["BSP", "EASGD", "GOSGD", "install"]

if _typing.TYPE_CHECKING:
    from synkhronos.compat.theanompi.rules import BSP as BSP
    from synkhronos.compat.theanompi.rules import EASGD as EASGD
    from synkhronos.compat.theanompi.rules import GOSGD as GOSGD
else:
    # Imported when first used: `tmlauncher` needs neither Theano nor the rules.
    def __getattr__(name: str) -> _typing.Any:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(_importlib.import_module(f"{__name__}.rules"), name)


def install() -> None:
    """Make the names importable as ``theanompi``, unless Theano-MPI is installed.

    Calling it again changes nothing.

    Examples
    --------
    >>> from synkhronos.compat import theanompi
    >>> theanompi.install()
    >>> from theanompi import EASGD
    >>> from theanompi.models.layers2 import Softmax
    """
    _imports.provide_aliases()
