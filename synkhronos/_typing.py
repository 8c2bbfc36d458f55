"""The names of types in annotations. Theano has no stubs: what is its own is ``Any`` to a checker."""

import os
from typing import TYPE_CHECKING, Any, Callable, List, Sequence, Tuple, Union

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike as ArrayLike
    from numpy.typing import DTypeLike as DTypeLike
else:  # some milliseconds at import, for names that nothing looks at
    ArrayLike = DTypeLike = Any  # a `Data` is an ArrayLike, too

# The compiler's own
Variable = Any
SharedVariable = Any
Compiled = Any  # a compiled function
Array = Any  # what holds the value of a shared variable: an array of the engine's own type

# Arguments
SharedVariables = Union[SharedVariable, Sequence[SharedVariable]]
Values = Union[ArrayLike, Sequence[Any]]  # an ArrayLike, or one for each shared variable
Batch = Union[int, np.integer, slice, Sequence[Union[int, np.integer]], np.ndarray]
Shape = Union[Tuple[int, ...], List[int]]
PathLike = Union[str, os.PathLike]

# Inside
Rows = Union[range, np.ndarray]
Buffer = Union[bytes, bytearray, memoryview, np.ndarray]

Finish = Callable[..., Any]  # from what each rank returned, a list by rank, to the result

# One where one was asked for, several in a list or tuple; inside `fuse` an object with ``result()``
Result = Any
