"""Names for types in annotations.

Theano has no stubs, so its variables are ``Any`` to a type checker, and match these types. Without
stubs, a type checker can only tell values that are not variables, and lists of variables.
"""

import os
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    List,
    Literal,
    Optional,
    Protocol,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

import numpy as np

T = TypeVar("T")


# Objects of the graph compiler


class Variable(Protocol):
    """A variable of the graph."""

    @property
    def type(self) -> Any: ...

    @property
    def owner(self) -> Any: ...

    @property
    def name(self) -> Optional[str]: ...


class SharedVariable(Variable, Protocol):
    """A variable that has a value between calls."""

    def get_value(self, borrow: bool = ..., return_internal_type: bool = ...) -> Any: ...

    def set_value(self, new_value: Any, borrow: bool = ...) -> None: ...


Compiled = Any  # a compiled function
Array = Any  # the storage of a shared variable: an array of the engine's own type

# Results. Inside `fuse`, each is an object with `result`, which returns it after the block.

if TYPE_CHECKING:
    from numpy.typing import ArrayLike as ArrayLike
    from numpy.typing import DTypeLike as DTypeLike
    from numpy.typing import NDArray

    AnyArray = NDArray[Any]
    _Integer = np.integer[Any]

    PathLike = Union[str, os.PathLike[str]]

    class ComputedArray(AnyArray):
        def result(self) -> AnyArray: ...

    class ComputedList(List[T]):
        def result(self) -> List[T]: ...

else:  # importing these takes milliseconds, and nothing uses them at run time
    ArrayLike = DTypeLike = Any  # a `Data` is an ArrayLike, too
    AnyArray = ComputedArray = np.ndarray
    _Integer = np.integer
    ComputedList = List
    PathLike = Union[str, os.PathLike]  # Python 3.8 has no `os.PathLike[str]`

#: Of a function's call: an array, a list or a dictionary of arrays, as its outputs were given
Result = Any

# Operations

ReduceOp = Literal["avg", "max", "min", "prod", "sum"]
OutputOp = Literal[
    "avg", "gather", "max", "min", "prod", "sum",
    "c_avg", "c_gather", "c_max", "c_min", "c_prod", "c_sum",
]  # fmt: skip

# Arguments
SharedVariables = Union[SharedVariable, Sequence[SharedVariable]]
Values = Union[ArrayLike, Sequence[Any]]  # an ArrayLike, or a list with a value for each shared variable
Batch = Union[int, _Integer, slice, Sequence[Union[int, _Integer]], AnyArray]
Shape = Union[Tuple[int, ...], List[int]]

# Internal
Rows = Union[range, AnyArray]
Buffer = Union[bytes, bytearray, memoryview, AnyArray]

Finish = Callable[..., Any]  # from the list of the ranks' return values to the result
