"""What `Rows` and the ranks of a chain share: the functions of a sum over rows, and its evaluation."""

from __future__ import annotations

import dataclasses
import os
import pickle
from abc import ABC, abstractmethod
from typing import Any, Sequence

import numpy as np

import synkhronos as synk
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.lost_errors import LostErrors
from synkhronos.extensions.pymc.resident import ResidentSum


@dataclasses.dataclass
class SumOnRanks:
    """A sum over rows as every rank has it: compiled functions, and the rows in shared memory.

    Attributes
    ----------
    name : str
        Its name in error messages.
    dtype : str
        Its dtype.
    parameters : list of variables
        The parameters.
    wrt : list of int
        The positions of the parameters with respect to which there is a gradient.
    data : list of Data
        The rows.
    num_slices : int
        In how many slices a rank computes its share of the rows.
    functions : dict
        The functions of the rows and the parameters, by whether they return the gradient as well.
    """

    name: str
    dtype: str
    parameters: list[Any]
    wrt: list[int]
    data: list[synk.Data]
    num_slices: int
    functions: dict[bool, synk.Function]

    def part(
        self, rank: synk.Rank, values: Sequence[Any], with_gradient: bool, number: int, count: int
    ) -> AnyArray | None:
        """Return the sum, and its gradient, over a part of the rows, in a program; None without rows.

        Parameters
        ----------
        rank : Rank
            The rank that computes it.
        values : list of array
            The parameters.
        with_gradient : bool
            Whether the gradient follows.
        number, count : int
            Which part, of how many.
        """
        length = len(self.data[0])
        rows = slice(number * length // count, (number + 1) * length // count)
        if rows.start == rows.stop:
            return None
        slices = min(max(1, self.num_slices * rank.size // count), rows.stop - rows.start)
        function = self.functions[with_gradient]
        return np.asarray(rank.call(function, *self.data, *values, batch=rows, num_slices=slices))


class EvaluatedSum(ABC):
    """A sum over rows that operations of a graph evaluate, in the process that made this.

    Parameters
    ----------
    on_ranks : SumOnRanks
        What the ranks have of it.
    """

    def __init__(self, on_ranks: SumOnRanks) -> None:
        self.on_ranks = on_ranks
        self.name, self.dtype = on_ranks.name, on_ranks.dtype
        self.parameters, self.wrt = on_ranks.parameters, on_ranks.wrt
        self._lost = LostErrors(self.name)
        self._process = os.getpid()
        slices = on_ranks.num_slices * synk.size()
        #: Evaluations without Python, by whether they return the gradient
        self.resident = {kind: ResidentSum(self.name, slices) for kind in (False, True)}

    def __reduce__(self) -> Any:
        # PyMC then samples in this process, and says so; Numba does not put it into its cache.
        raise pickle.PicklingError(
            f"{self.name}: it cannot be copied or pickled, as it uses the ranks of this process; "
            f"sample with pm.sample(cores=1)"
        )

    def __repr__(self) -> str:
        return self.name

    def sum(self, values: Sequence[Any]) -> AnyArray:
        """Return the sum over all rows."""
        return self.vector(values, False)[0]

    def sum_and_gradient(self, values: Sequence[Any]) -> list[AnyArray]:
        """Return the sum over all rows, and the gradient for each parameter that is differentiable."""
        flat = self.vector(values, True)
        results, start = [flat[0]], 1
        for index in self.wrt:
            shape = values[index].shape
            stop = start + values[index].size
            results.append(flat[start:stop].reshape(shape))
            start = stop
        return results

    def vector(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        """Return a vector of the sum over all rows and, if that is wanted, of all derivatives."""
        if os.getpid() != self._process:
            raise synk.SynkhronosError(
                f"{self.name}: this process was forked from the one that has the ranks, and cannot use "
                f"them; sample the chains one after another, with pm.sample(cores=1)"
            )
        self._lost.note_thread()
        try:
            found = self.resident[with_gradient].evaluate(values)
            if found is None:
                found = np.atleast_1d(self._evaluate_here(values, with_gradient))
            return found
        except Exception as error:
            self._lost.report(error)
            raise

    @abstractmethod
    def _evaluate_here(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        """Return the sum, or the vector that also has its gradient."""
