"""A vector that is computed apart: no operation on it is fused with those that compute it.

gcc does not vectorize a loop over more than a few vectors and scalars, so a long fused expression can
take several times as long as its parts. Compilers of whole graphs, Numba and JAX, vectorize any loop,
and fuse these again.
"""

from synkhronos.host import compiler

if compiler.NAME == "pytensor":
    from pytensor.compile.mode import optdb
    from pytensor.graph.rewriting.basic import in2out, node_rewriter
    from pytensor.tensor.extra_ops import CpuContiguous

    class Apart(CpuContiguous):
        """The vector itself: results are contiguous, and only other arrays would be copied."""

    apart = Apart()

    @node_rewriter([Apart])
    def _fusible(fgraph, node):
        return node.inputs

    optdb.register("synkhronos_fusible", in2out(_fusible), "numba", "jax", position=0)
else:
    from theano.tensor.extra_ops import cpu_contiguous as apart

__all__ = ["apart"]
