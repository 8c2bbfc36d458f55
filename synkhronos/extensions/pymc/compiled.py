"""Functions that Numba compiles for one sum over rows: the part of a rank, and the operation in a graph.

Their arguments differ in number and type. Numba unrolls no loops over them, so their source is written
for each sum.
"""

from __future__ import annotations

import itertools
import math
import warnings
from typing import Any, Callable, NamedTuple, Sequence

import numba
import numpy as np
from pytensor.compile.mode import Mode
from pytensor.graph.basic import Apply
from pytensor.graph.op import Op
from pytensor.graph.rewriting.basic import node_rewriter, out2in
from pytensor.link.numba.dispatch.basic import numba_njit, register_funcify_default_op_cache_key
from pytensor.link.numba.linker import NumbaLinker
from pytensor.tensor.elemwise import DimShuffle

from synkhronos._typing import AnyArray
from synkhronos.arithmetic.partition import share
from synkhronos.extensions.pymc import native

_PART = """
def part(pointer):
    table = carray(pointer, ({n_words},))
    try:
        start, n_rows, n_slices = table[2], table[3] - table[2], table[4]
        outputs = carray(pointer_to(table[1]), ({n_outputs},), np.float64)
{arrays}
        if n_rows == 0:
            add(outputs, np.zeros({n_outputs}), 0)
        for index in range(min(n_slices, n_rows)):
            first = start + index * n_rows // n_slices
            last = start + (index + 1) * n_rows // n_slices
            found = function({arguments})[0]
            add(outputs, found, index)
    except Exception:
        return 1
    return 0
"""

_OPERATION = """
def sum_over_rows({inputs}):
    shapes = 0
{shapes}
    parameters, result = np.empty({n_words}, np.int64), np.empty({n_outputs})
    code = OFF
    if load(record + SHAPES) == shapes:
        place = parameters.ctypes.data
{copies}
        code = call_evaluate(evaluate, record, parameters, result)
    if code != DONE:
        values = ({values})
        with objmode(result="float64[::1]"):
            result = in_python(values)
    return {returned}
"""

_FACTOR = 1000003


def _transposed(array: AnyArray) -> AnyArray:
    return array.T


def _as_column(array: AnyArray) -> AnyArray:
    return np.expand_dims(array, 1)


def _as_vector(array: AnyArray) -> AnyArray:
    return np.ravel(array)


#: By order and number of dimensions: functions whose results Numba knows to be contiguous
_CONTIGUOUS = {((1, 0), 2): _transposed, ((0, "x"), 1): _as_column, ((0,), 2): _as_vector}


class ContiguousDimShuffle(Op):
    """A `DimShuffle` of an array that stays contiguous, for Numba.

    PyTensor's own code (2.38, 3.0) calls ``as_strided``, of whose result Numba does not know that it is
    contiguous: ``np.dot`` copies such a matrix in each evaluation, and loops are not vectorized. A model
    with its data as constants has no transpose of them left, but ranks have their rows as inputs.
    """

    __props__ = ("order", "ndim")
    view_map = {0: [0]}

    def __init__(self, order: tuple[int | str, ...], ndim: int) -> None:
        self.order, self.ndim = order, ndim

    def make_node(self, array: Any) -> Apply:
        """Return the node of an array."""
        return Apply(self, [array], [array.dimshuffle(self.order).type()])

    def perform(self, node: Apply, inputs: Sequence[AnyArray], output_storage: Any) -> None:
        """Compute it without Numba."""
        output_storage[0][0] = _CONTIGUOUS[self.order, self.ndim](inputs[0])


@register_funcify_default_op_cache_key(ContiguousDimShuffle)
def _numba_contiguous(op: ContiguousDimShuffle, **kwargs: Any) -> Any:
    return numba_njit(_CONTIGUOUS[op.order, op.ndim])


def _to_contiguous(fgraph: Any, node: Apply) -> Any:
    order, ndim = tuple(node.op.new_order), node.inputs[0].type.ndim
    if (order, ndim) not in _CONTIGUOUS or not all(
        node.inputs[0].type.shape[axis] == 1 for axis in node.op.drop
    ):
        return None
    return [ContiguousDimShuffle(order, ndim)(*node.inputs)]


_KEEP_CONTIGUOUS = out2in(node_rewriter([DimShuffle])(_to_contiguous), name="keep_contiguous")
_AFTER_FUSION = 49.9  # and before what computes in place


def keeping_contiguous(mode: Mode) -> Mode:
    """Return a mode in which Numba knows transposed rows to be contiguous."""
    if not isinstance(mode.linker, NumbaLinker):
        return mode
    return mode.register((_KEEP_CONTIGUOUS, _AFTER_FUSION))


def is_compiled_by_numba(compiled: Any) -> bool:
    """Whether a function of PyTensor is one of Numba, without shared variables."""
    return isinstance(compiled.maker.linker, NumbaLinker) and not compiled.get_shared()


class Layout(NamedTuple):
    """What a rank has to know of a sum besides its function and rows.

    Attributes
    ----------
    parameters : tuple of (tuple of int, str)
        The shape and dtype of each parameter.
    n_outputs : int
        The number of outputs.
    n_slices : int
        In how many slices a rank computes its rows.
    """

    parameters: tuple[tuple[tuple[int, ...], str], ...]
    n_outputs: int
    n_slices: int

    @property
    def n_bytes(self) -> int:
        """The size of the parameters."""
        return sum(n_bytes_of(*parameter) for parameter in self.parameters)

    @property
    def start(self) -> int:
        """The offset of the outputs in the memory that has the parameters first."""
        return -(-self.n_bytes // native.LINE) * native.LINE

    @property
    def stride(self) -> int:
        """The bytes between the outputs of two ranks."""
        return -(-8 * self.n_outputs // native.LINE) * native.LINE

    def table(self, rows: Sequence[AnyArray], box: int, rank: int, size: int) -> AnyArray:
        """Return where a rank finds its part of the rows, and parameters and outputs in a box."""
        bounds = share(len(rows[0]), size, rank)
        addresses = [row.ctypes.data for row in rows]
        slices = max(1, self.n_slices // size)
        outputs = box + self.start + rank * self.stride
        return np.array([box, outputs, *bounds, slices, *addresses], np.int64)

    def part(self, compiled: Any, rows: Sequence[AnyArray]) -> int:
        """Return the address of a function that computes what a table says.

        Parameters
        ----------
        compiled : compiled function
            The function of PyTensor, of rows and parameters, which returns a vector. It keeps the code.
        rows : list of array
            All rows.
        """
        kept = vars(compiled.vm.jit_fn).setdefault("_synkhronos_parts", {})
        key = self.parameters, self.n_outputs
        if key not in kept:
            kept[key] = _part(compiled.vm.jit_fn, rows, self.parameters, self.n_outputs)
        address: int = kept[key].address
        return address


def _part(function: Any, rows: Sequence[AnyArray], parameters: Any, n_outputs: int) -> Any:
    arrays, arguments, offset = [], [], 0
    for number, array in enumerate(rows):
        shape = f"(table[3], {', '.join(map(str, array.shape[1:]))})"
        place = f"table[{native.T_ROWS + number}]"
        arrays.append(f"rows_{number} = carray(pointer_to({place}), {shape}, {_dtype(array.dtype)})")
        arguments.append(f"rows_{number}[first:last]")
    for number, (shape, dtype) in enumerate(parameters):
        place = f"table[0] + {offset}"
        arrays.append(f"one_{number} = carray(pointer_to({place}), {shape!r}, {_dtype(dtype)})")
        arguments.append(f"one_{number}")
        offset += n_bytes_of(shape, dtype)
    source = _PART.format(
        n_words=native.T_ROWS + len(rows),
        n_outputs=n_outputs,
        arrays="\n".join(f"        {line}" for line in arrays),
        arguments=", ".join(arguments),
    )
    known = {
        "np": np,
        "carray": numba.carray,
        "pointer_to": native.pointer,
        "add": native.add_to,
        "function": function,
    }
    kind = numba.types.int64(numba.types.CPointer(numba.types.int64))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Numba does not cache functions with arrays of constants
        return numba.cfunc(kind)(_defined(source, "part", known))


def operation(
    record: int,
    types: Sequence[Any],
    value: Any,
    gradients: Sequence[tuple[int, Any]],
    in_python: Callable[..., AnyArray],
) -> Any:
    """Return a function for Numba: a sum over rows, and perhaps its gradient.

    Parameters
    ----------
    record : int
        The address of the record of the sum.
    types : list of type
        The types of its parameters.
    value : type
        The type of the sum.
    gradients : list of (int, type)
        For each other output, the index of its parameter, and its type.
    in_python : callable
        ``in_python(parameters)`` returns the vector of all outputs in any other case.
    """
    names = [f"one_{number}" for number in range(len(types))]
    shapes, sizes = [], ["0"]
    for name, kind in zip(names, types):
        sizes.append(f"({name}.size * {kind.numpy_dtype.itemsize} + 7) // 8")
        shapes += [f"shapes = shapes * {_FACTOR} + {name}.shape[{axis}]" for axis in range(kind.ndim)]
    returned, start = [f"np.asarray({_dtype(value.numpy_dtype)}(result[0]))"], "1"
    for index, _ in gradients:
        returned.append(f"taken(result, {start}, {names[index]})")
        start += f" + {names[index]}.size"
    source = _OPERATION.format(
        inputs=", ".join(names),
        values="".join(f"{name}, " for name in names),
        shapes="\n".join(f"    {line}" for line in shapes),
        n_words=" + ".join(sizes),
        n_outputs=start,
        copies="\n".join(f"        place = put(place, {name})" for name in names),
        returned=", ".join(returned),
    )
    known = {
        "np": np,
        **{name: getattr(native, name) for name in ("load", "put", "taken", "call_evaluate")},
        **{name: getattr(native, name) for name in ("SHAPES", "OFF", "DONE")},
        "evaluate": native.function("evaluate").address,
        "objmode": numba.objmode,
        "record": record,
        "in_python": in_python,
    }
    return numba_njit(_defined(source, "sum_over_rows", known))


def hash_of(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return a number that differs for other shapes, as Numba's integers overflow."""
    found = 0
    for extent in itertools.chain(*shapes):
        found = (found * _FACTOR + extent) % (1 << 64)
    return found - (1 << 64) * (found >> 63)


def n_bytes_of(shape: Sequence[int], dtype: Any) -> int:
    """Return how many bytes a parameter takes: a whole number of words."""
    return -(-math.prod(shape) * np.dtype(dtype).itemsize // 8) * 8


def _dtype(dtype: Any) -> str:
    name = np.dtype(dtype).name
    return "np.bool_" if name == "bool" else f"np.{name}"


def _defined(source: str, name: str, names: dict[str, Any]) -> Callable[..., Any]:
    exec(source, names)  # noqa: S102
    found: Callable[..., Any] = names[name]
    return found
