"""Convolutions and pooling of images on the CPU, in place of Theano's, and their gradients.

Like Theano's ``CorrMM``, the convolutions multiply the filters by a matrix of columns that are copied
from the image. Here the columns are copied in runs, for as many rows or images at a time as suit the
cache and the BLAS library, and not at all if the image is that matrix itself. With few filters, on
processors with wide vectors, there is no matrix: pixels are read from where they are in the image.

Pooling is over the last two axes, and its results have the same bits as Theano's. Arguments with which
Theano reads memory that is not an array's, or ends the process, raise ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from theano import Constant, config
from theano.tensor.nnet import corr
from theano.tensor.signal.pool import AveragePoolGrad, MaxPoolGrad, Pool

from synkhronos.engines.theano.kernels import cpp
from synkhronos.engines.theano.kernels.cpp import replacing

if TYPE_CHECKING:
    from theano.gof import Apply, Op, Variable

_VERSION = 3  # of the code in this file


class _InCpp(cpp.Keyed):
    """The common part of the operations.

    Attributes
    ----------
    files : tuple of str
        The files of the C++ code.
    function : str
        The function in the last of them.
    """

    files: tuple[str, ...]
    function: str

    def c_compile_args(self) -> list[str]:
        return [*super().c_compile_args(), *cpp.COMPILE_ARGS]

    def c_code_cache_version(self) -> tuple[Any, ...]:
        return (_VERSION, *super().c_code_cache_version(), *cpp.version(*self.files))


# Convolutions


_CALL = """
if (!synkhronos_convolution::%(function)s<%(type)s>(%(arguments)s, &%(output)s)) {
    %(fail)s
}
"""


class _Convolution(_InCpp):
    """The C++ code that replaces the C code of Theano's convolutions.

    Attributes
    ----------
    inputs_in_c : int
        How many arrays it takes. Missing inputs are null pointers.
    """

    files = (
        "geometry", "columns", "blocks", "vectors", "direct", "direct_gradient", "convolution",
        "convolution_arrays",
    )  # fmt: skip
    inputs_in_c = 2

    def c_headers(self) -> list[str]:
        return ["<algorithm>", "<cstdio>", "<cstring>", "<vector>", *super().c_headers()]

    def c_compile_args(self) -> list[str]:
        return [*super().c_compile_args(), "-std=gnu++11"]

    def c_no_compile_args(self) -> list[str]:
        """Return the user's choice of a standard, which would otherwise replace this code's."""
        return [flag for flag in config.gcc.cxxflags.split() if flag.startswith("-std=")]

    def c_support_code(self) -> str:
        return super().c_support_code() + cpp.read(*self.files)

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        return ""

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: Mapping[str, str]
    ) -> str:
        sizes = ["NULL"] * (self.inputs_in_c - len(inputs))
        return _CALL % {
            "function": self.function,
            "type": node.inputs[0].type.dtype_specs()[1],
            "arguments": ", ".join([sub["params"], *inputs, *sizes]),
            "output": outputs[0],
            "fail": sub["fail"],
        }


class _Gradient(_Convolution):
    """A gradient, whose inputs can include the height and width of the array to differentiate by."""

    inputs_in_c = 4

    def make_node(self, first: Variable, second: Variable, *size: Any) -> Apply:
        """Make a node; the size is a pair, as for Theano's operations, or two inputs, as in nodes."""
        return super().make_node(first, second, *([size] if len(size) == 2 else size))


class FastCorrMM(_Convolution, corr.CorrMM):
    """Theano's ``CorrMM`` in less time."""

    function = "apply_forward"


class FastCorrMM_gradWeights(_Gradient, corr.CorrMM_gradWeights):
    """Theano's ``CorrMM_gradWeights`` in less time."""

    function = "apply_gradient_of_filters"


class FastCorrMM_gradInputs(_Gradient, corr.CorrMM_gradInputs):
    """Theano's ``CorrMM_gradInputs`` in less time."""

    function = "apply_gradient_of_input"


_REPLACEMENTS = {
    corr.CorrMM: FastCorrMM,
    corr.CorrMM_gradWeights: FastCorrMM_gradWeights,
    corr.CorrMM_gradInputs: FastCorrMM_gradInputs,
}


def _convolution_of(node: Apply) -> Op | None:
    op = node.op
    if op.unshared or op.openmp:
        return None
    kind = _REPLACEMENTS[type(op)]
    return kind(op.border_mode, op.subsample, op.filter_dilation, op.num_groups, openmp=False)


# Pooling


_MODES = {
    "max": "MAX",
    "sum": "SUM",
    "average_inc_pad": "AVERAGE_WITH_PADDING",
    "average_exc_pad": "AVERAGE_WITHOUT_PADDING",
}
_CALL_OF_POOLING = """
    read_pair<dtype_{ws}>({ws}, "ws", of.window)
    && read_pair<dtype_{stride}>({stride}, "stride", of.stride)
    && read_pair<dtype_{pad}>({pad}, "pad", of.pad)
    && {function}<{options}>({arguments})
"""
_POOLING = """
{{
    using namespace synkhronos_pooling;
    Pairs of;
    {call}
}}
"""


class _Pooling(_InCpp):
    """The C++ code that replaces the C code of Theano's pooling."""

    files = "pooling", "pooling_arrays", "pooling_gradients"

    def c_support_code(self) -> str:
        return cpp.read(*self.files)

    def c_code(
        self, node: Apply, name: str, inp: list[str], out: list[str], sub: Mapping[str, str]
    ) -> str:
        """Return the C++ code of one application."""
        (*arrays, ws, stride, pad), (result,) = inp, out
        options, arguments = self._further(sub)
        call = _CALL_OF_POOLING.format(
            ws=ws,
            stride=stride,
            pad=pad,
            function=self.function,
            options=", ".join([*map(str, _known(node)), *options, f"dtype_{result}"]),
            arguments=", ".join([*arrays, "of", *arguments, f"&{result}"]),
        )
        return _POOLING.format(call=cpp.call(call, sub["fail"]))

    def _further(self, sub: Mapping[str, str]) -> tuple[list[str], list[str]]:
        """Return further template arguments, and further arguments after the sizes."""
        return [], []


def _known(node: Apply) -> tuple[int, int]:
    """Return the width of windows and their stride along columns if they are known and small, or 0.

    Loops that are compiled for these sizes are faster. For other sizes, the same code computes the same,
    but takes longer.
    """
    sizes: list[Any] = [item.data if isinstance(item, Constant) else () for item in node.inputs[-3:-1]]
    ws, stride = sizes
    if len(ws) != 2 or len(stride) != 2:
        return 0, 0
    return int(ws[1]) if 0 < ws[1] <= 3 else 0, int(min(max(stride[1], 0), 3))


class FastPool(_Pooling, Pool):
    """Pooling: the maximum, sum or average of each window."""

    files = "pooling", "pooling_arrays", "pooling_windows"
    function = "pool"

    def _further(self, sub: Mapping[str, str]) -> tuple[list[str], list[str]]:
        by = "Maximum" if self.mode == "max" else "Sum"
        return [by], [f"{sub['params']}->ignore_border", _MODES[self.mode]]


class FastMaxPoolGrad(_Pooling, MaxPoolGrad):
    """The gradient of pooling by maximum."""

    function = "max_pool_gradient"


class FastAveragePoolGrad(_Pooling, AveragePoolGrad):
    """The gradient of pooling by sum or average."""

    function = "average_pool_gradient"

    def _further(self, sub: Mapping[str, str]) -> tuple[list[str], list[str]]:
        return [], [_MODES[self.mode]]


def _pooling_of(node: Apply) -> Op | None:
    """Return the operation that replaces one of Theano's, or None."""
    op = node.op
    dtypes = {variable.dtype for variable in node.inputs[:-3]}
    if op.ndim != 2 or op.openmp or len(dtypes) != 1 or not dtypes <= {"float32", "float64"}:
        return None
    if isinstance(op, MaxPoolGrad):
        return FastMaxPoolGrad(op.ignore_border, openmp=False)
    if isinstance(op, AveragePoolGrad):
        return FastAveragePoolGrad(op.ignore_border, op.mode)
    return FastPool(op.ignore_border, op.mode, openmp=False)


OPTIMIZATIONS = [
    replacing("synkhronos_convolution", 48.85, list(_REPLACEMENTS), _convolution_of),
    replacing("synkhronos_pool", 48.8, [Pool, MaxPoolGrad, AveragePoolGrad], _pooling_of),
]
