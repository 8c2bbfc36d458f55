"""Convolutions of images on the CPU, in place of Theano's ``CorrMM`` and its two gradients.

Like Theano's, they multiply the filters by a matrix of columns that are copied from the image. Here the
columns are copied in runs, for as many rows or images at a time as suit the cache and the BLAS library,
and not at all if the image is that matrix itself. With few filters, on processors with wide vectors,
there is no matrix: pixels are read from where they are in the image.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Mapping

from theano import config
from theano.tensor.nnet import corr

from synkhronos.engines.theano.kernels import cpp
from synkhronos.engines.theano.kernels.cpp import replacing

if TYPE_CHECKING:
    from theano.gof import Apply, Op, Variable

_FILES = (
    "geometry", "columns", "blocks", "vectors", "direct", "direct_gradient", "convolution",
    "convolution_arrays",
)  # fmt: skip

_CODE = """
if (!synkhronos_convolution::%(function)s<%(type)s>(%(arguments)s, &%(output)s)) {
    %(fail)s
}
"""


class _Convolution(cpp.Keyed):
    """The C++ code that replaces the C code of Theano's convolutions.

    Attributes
    ----------
    function : str
        The function in C++.
    inputs_in_c : int
        How many arrays it takes. Missing inputs are null pointers.
    """

    function: str
    inputs_in_c = 2

    def c_headers(self) -> list[str]:
        return ["<algorithm>", "<cstdio>", "<cstring>", "<vector>", *super().c_headers()]

    def c_compile_args(self) -> list[str]:
        return [*super().c_compile_args(), *cpp.COMPILE_ARGS, "-std=gnu++11"]

    def c_no_compile_args(self) -> list[str]:
        """Return the user's choice of a standard, which would otherwise replace this code's."""
        return [flag for flag in config.gcc.cxxflags.split() if flag.startswith("-std=")]

    def c_support_code(self) -> str:
        return super().c_support_code() + cpp.read(*_FILES)

    def c_support_code_apply(self, node: Apply, name: str) -> str:
        return ""

    def c_code(
        self, node: Apply, name: str, inputs: list[str], outputs: list[str], sub: Mapping[str, str]
    ) -> str:
        sizes = ["NULL"] * (self.inputs_in_c - len(inputs))
        return _CODE % {
            "function": self.function,
            "type": node.inputs[0].type.dtype_specs()[1],
            "arguments": ", ".join([sub["params"], *inputs, *sizes]),
            "output": outputs[0],
            "fail": sub["fail"],
        }

    def c_code_cache_version(self) -> tuple[Any, ...]:
        return (1, *super().c_code_cache_version(), *cpp.version(*_FILES))


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


def _replacement_of(node: Apply) -> Op | None:
    op = node.op
    if op.unshared or op.openmp:
        return None
    kind = _REPLACEMENTS[type(op)]
    return kind(op.border_mode, op.subsample, op.filter_dilation, op.num_groups, openmp=False)


OPTIMIZATIONS = [replacing("synkhronos_convolution", 48.85, list(_REPLACEMENTS), _replacement_of)]
