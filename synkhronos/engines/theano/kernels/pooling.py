"""Pooling over the last two axes, and its gradients, in place of Theano's.

Results have the same bits. Arguments with which Theano reads memory that is not an array's, or ends the
process, raise ValueError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from theano import Constant
from theano.tensor.signal.pool import AveragePoolGrad, MaxPoolGrad, Pool

from synkhronos.engines.theano.kernels import cpp
from synkhronos.engines.theano.kernels.cpp import replacing

if TYPE_CHECKING:
    from theano.gof import Apply, Op

_MODES = {
    "max": "MAX",
    "sum": "SUM",
    "average_inc_pad": "AVERAGE_WITH_PADDING",
    "average_exc_pad": "AVERAGE_WITHOUT_PADDING",
}
_VERSION = 2  # of the code in this file
_CALL = """
    read_pair<dtype_{ws}>({ws}, "ws", of.window)
    && read_pair<dtype_{stride}>({stride}, "stride", of.stride)
    && read_pair<dtype_{pad}>({pad}, "pad", of.pad)
    && {function}<{options}>({arguments})
"""
_CODE = """
{{
    using namespace synkhronos_pooling;
    Pairs of;
    {call}
}}
"""


class _InCpp(cpp.Keyed):
    """The common part of the operations: where their C++ code comes from."""

    _files = "pooling", "pooling_arrays", "pooling_gradients"

    def c_support_code(self) -> str:
        return cpp.read(*self._files)

    def c_compile_args(self) -> list[str]:
        return list(cpp.COMPILE_ARGS)

    def c_code_cache_version(self) -> tuple[int, ...]:
        return (_VERSION, *cpp.version(*self._files))

    function: str  # of the last of the files

    def c_code(
        self, node: Apply, name: str, inp: list[str], out: list[str], sub: Mapping[str, str]
    ) -> str:
        """Return the C++ code of one application."""
        (*arrays, ws, stride, pad), (result,) = inp, out
        options, arguments = self._further(sub)
        call = _CALL.format(
            ws=ws,
            stride=stride,
            pad=pad,
            function=self.function,
            options=", ".join([*map(str, _known(node)), *options, f"dtype_{result}"]),
            arguments=", ".join([*arrays, "of", *arguments, f"&{result}"]),
        )
        return _CODE.format(call=cpp.call(call, sub["fail"]))

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


class FastPool(_InCpp, Pool):
    """Pooling: the maximum, sum or average of each window."""

    _files = "pooling", "pooling_arrays", "pooling_windows"
    function = "pool"

    def _further(self, sub: Mapping[str, str]) -> tuple[list[str], list[str]]:
        by = "Maximum" if self.mode == "max" else "Sum"
        return [by], [f"{sub['params']}->ignore_border", _MODES[self.mode]]


class FastMaxPoolGrad(_InCpp, MaxPoolGrad):
    """The gradient of pooling by maximum."""

    function = "max_pool_gradient"


class FastAveragePoolGrad(_InCpp, AveragePoolGrad):
    """The gradient of pooling by sum or average."""

    function = "average_pool_gradient"

    def _further(self, sub: Mapping[str, str]) -> tuple[list[str], list[str]]:
        return [], [_MODES[self.mode]]


def _replacement_of(node: Apply) -> Op | None:
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
    replacing("synkhronos_pool", 48.8, [Pool, MaxPoolGrad, AveragePoolGrad], _replacement_of)
]
