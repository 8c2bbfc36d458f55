"""Names for types in annotations. Theano has no stubs, so its types are ``Any`` to a type checker."""

import os
from typing import TYPE_CHECKING, Any, Callable, List, Sequence, Tuple, Union

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike as ArrayLike
    from numpy.typing import DTypeLike as DTypeLike
else:  # importing these takes milliseconds, and nothing uses them at run time
    ArrayLike = DTypeLike = Any  # a `Data` is an ArrayLike, too

# Objects of the graph compiler
Variable = Any
SharedVariable = Any
Compiled = Any  # a compiled function
Array = Any  # the storage of a shared variable: an array of the engine's own type

# Arguments
SharedVariables = Union[SharedVariable, Sequence[SharedVariable]]
Values = Union[ArrayLike, Sequence[Any]]  # an ArrayLike, or one for each shared variable
Batch = Union[int, np.integer, slice, Sequence[Union[int, np.integer]], np.ndarray]
Shape = Union[Tuple[int, ...], List[int]]
PathLike = Union[str, os.PathLike]

# Internal
Rows = Union[range, np.ndarray]
Buffer = Union[bytes, bytearray, memoryview, np.ndarray]

Finish = Callable[..., Any]  # from the list of the ranks' return values to the result

# One value, or a list if several were asked for; inside `fuse` an object with ``result()``
Result = Any
