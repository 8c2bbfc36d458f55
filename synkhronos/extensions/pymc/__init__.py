"""Models of PyMC 5 and 6 whose rows of data are divided over all ranks.

`parallelize` does this for a whole model, and `rows_potential` for a log-probability of your own. Both
need PyTensor. PyMC is imported when `parallelize` is called.

The rows stay on the ranks. An evaluation sends the values of the parameters to every rank, and the sum
of the log-probability and of its gradient to the master, in one command. Priors, transformations and the
sampler run on the master, as they do without ranks.

``models`` finds the rows in a model. ``parallel`` replaces their sum by the sum of ``rows`` over all
ranks, which ``operation`` is in a graph; ``divided`` is the resulting model. ``potential`` makes such a
sum without a model.

Samplers do not show that a sum is wrong. So ``independence`` tests at ``points`` of the model whether
the rows are independent, ``first_evaluations`` compares with ``serial`` sums, and ``lost_errors`` has
errors in the threads of samplers reach the script.
"""

from importlib.util import find_spec as _find_spec

if _find_spec("pytensor") is None:
    raise ImportError(
        f"{__name__} builds graphs of PyTensor, which is not installed. In an environment without "
        f'Theano: SYNKHRONOS_COMPILER=pytensor python -m pip install ".[pymc]"'
    )

from synkhronos.extensions.pymc.parallel import parallelize as parallelize
from synkhronos.extensions.pymc.potential import rows_potential as rows_potential

__all__ = ["parallelize", "rows_potential"]
