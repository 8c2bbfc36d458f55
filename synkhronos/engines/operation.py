"""The classes from which the library derives its operations: Theano's, or PyTensor's."""

from synkhronos.host import compiler

if compiler.NAME == "pytensor":
    import pytensor as package
    import pytensor.tensor as tensor
    from pytensor.compile.sharedvalue import SharedVariable
    from pytensor.gradient import DisconnectedType, grad_not_implemented
    from pytensor.graph.basic import Apply
    from pytensor.graph.op import Op
    from pytensor.link.c.type import Generic
    from pytensor.tensor.shape import Shape_i
    from pytensor.tensor.type import TensorType, continuous_dtypes

    #: What `tensor.as_tensor_variable` raises, besides TypeError and ValueError.
    AsTensorError = NotImplementedError

    def of_any_rows(kind):
        """Return the type of a tensor of any extent on axis 0."""
        return kind.clone(shape=(None, *kind.shape[1:]))

    def with_pattern(variable, broadcastable):
        """Return a tensor whose type says which axes are broadcast."""
        axes = [axis for axis, is_one in enumerate(broadcastable) if is_one]
        return tensor.specify_broadcastable(variable, *axes)

else:
    import theano as package
    import theano.tensor as tensor
    from theano.compile.ops import Shape_i
    from theano.compile.sharedvalue import SharedVariable
    from theano.gof import Apply, Op
    from theano.gof.type import Generic
    from theano.gradient import DisconnectedType, grad_not_implemented
    from theano.tensor import AsTensorError, TensorType, continuous_dtypes
    from theano.tensor import patternbroadcast as with_pattern

    def of_any_rows(kind):
        """Return the type of a tensor of any extent on axis 0."""
        return kind.clone(broadcastable=(False, *kind.broadcastable[1:]))


__all__ = [
    "Apply", "AsTensorError", "DisconnectedType", "Generic", "Op", "SharedVariable", "Shape_i",
    "TensorType", "continuous_dtypes", "grad_not_implemented", "of_any_rows", "package", "tensor",
    "with_pattern",
]  # fmt: skip
