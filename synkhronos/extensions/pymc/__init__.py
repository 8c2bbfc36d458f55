"""Models of PyMC 5 and 6 whose rows of data are divided over all ranks.

`parallelize` does this for a whole model, and `rows_potential` for a log-probability of your own.
`compute_deterministics` computes what a model has for each row, after sampling, and `sample` samples
several chains at once. All need PyTensor. PyMC is imported when one of them is called.

The rows stay on the ranks. An evaluation sends the values of the parameters to every rank, and the sum
of the log-probability and of its gradient to the master. Priors, transformations and the sampler run on
the master, as they do without ranks.

``parallel`` has the public functions for models. ``models`` makes a parallel model: with the sum of
``rows`` over all ranks in place of observed variables. ``potential`` has the operation that is this sum
in a graph, and makes one without a model. ``resident`` evaluates it without Python, by functions that
are ``compiled`` for it and the loop of ``native``. ``terms`` has the observed variables with their
graphs, the sums of those with equal numbers of rows, and the values with which graphs are tried.
``graphs`` rewrites graphs, also with missing values and selections, so that their constants and shared
variables have the rows. ``deterministics`` does what `compute_deterministics` does, and ``chains`` what
`sample` does.

Samplers do not show that a sum is wrong. So ``serial`` tests whether the rows are independent, finds on
which items they depend, and compares the first evaluations with the sum on one process. ``lost_errors``
has errors in the threads of samplers reach the script.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("pytensor") is None:
    raise ImportError(
        f"{__name__} builds graphs of PyTensor, which is not installed. In an environment without "
        f'Theano: SYNKHRONOS_COMPILER=pytensor python -m pip install ".[pymc]"'
    )

from synkhronos.extensions.pymc.parallel import compute_deterministics as compute_deterministics
from synkhronos.extensions.pymc.parallel import parallelize as parallelize
from synkhronos.extensions.pymc.parallel import sample as sample
from synkhronos.extensions.pymc.potential import rows_potential as rows_potential

__all__ = ["compute_deterministics", "parallelize", "rows_potential", "sample"]
