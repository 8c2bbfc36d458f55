"""`sample`: several chains at once, each by some of the ranks, over one copy of the rows.

Every chain has a group of ranks. Its first rank samples, with a copy of the model; the others compute
their rows of each evaluation. All ranks read the same rows in shared memory.
"""

from __future__ import annotations

import contextlib
import io
import logging
import pickle
import signal
import threading
from importlib.util import find_spec
from typing import Any, Iterator, Sequence

import cloudpickle
import numpy as np
import pymc as pm
import xarray
from pymc.stats.convergence import log_warnings, run_convergence_checks

import synkhronos as synk
from synkhronos._checks import check_int
from synkhronos._typing import AnyArray
from synkhronos.extensions.pymc.deterministics import computed
from synkhronos.extensions.pymc.models import DividedModel
from synkhronos.extensions.pymc.potential import sums_over_rows
from synkhronos.extensions.pymc.rows import EvaluatedSum, Rows, SumOnRanks

_logger = logging.getLogger("synkhronos")

_LOOK = 0.1  # seconds between two looks whether the ranks are asked to stop
_REHEARSALS = 3  # evaluations by all ranks before the chains, which are compared with the model


class Team:
    """The ranks that evaluate the sums of a chain.

    Parameters
    ----------
    rank : Rank
        This rank of the program.
    group : RankGroup
        The ranks of the chain; the first of them samples.
    sums : list of SumOnRanks
        The sums over rows in the model.

    Attributes
    ----------
    size : int
        The number of ranks. One alone evaluates without Python.
    """

    def __init__(self, rank: synk.Rank, group: synk.RankGroup, sums: Sequence[SumOnRanks]) -> None:
        self._rank, self._group, self._sums = rank, group, list(sums)
        self.size = group.size

    def evaluate(self, number: int, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        """Return a sum, and its gradient if that is wanted, for these values of the parameters.

        The other ranks of the team `serve` it.
        """
        self._group.exchange((number, list(values), with_gradient))
        return self._add_up(number, values, with_gradient)

    def dismiss(self) -> None:
        """End the work of the other ranks."""
        self._group.exchange(None)

    def serve(self) -> None:
        """Compute this rank's rows in every evaluation of the first rank."""
        while True:
            asked, *_ = self._group.exchange(None)
            if asked is None:
                return
            self._add_up(*asked)

    def _add_up(self, number: int, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        rank, size = self._group.rank, self._group.size
        own = self._sums[number].part(self._rank, values, with_gradient, rank, size)
        first, *others = [part for part in self._group.exchange(own) if part is not None]
        return sum(others, start=first)


class SumOfTeam(EvaluatedSum):
    """A sum over rows that the ranks of a chain evaluate.

    Parameters
    ----------
    team : Team
        The ranks.
    number : int
        Its number among the sums of the team.
    on_ranks : SumOnRanks
        What the ranks have of it.
    """

    def __init__(self, team: Team, number: int, on_ranks: SumOnRanks) -> None:
        super().__init__(on_ranks)
        self._team, self._number = team, number

    def _evaluate_here(self, values: Sequence[Any], with_gradient: bool) -> AnyArray:
        result, resident = self._team.evaluate(self._number, values, with_gradient), None
        if self._team.size == 1:
            resident = self.resident[with_gradient]
        if resident is not None and not resident.is_impossible:
            function = self.on_ranks.functions[with_gradient]
            resident.begin_alone(function, self.on_ranks.data, values, np.size(result))
        return result


@contextlib.contextmanager
def _interrupted(stop: Any) -> Iterator[None]:
    """Raise KeyboardInterrupt in this thread, once, after Ctrl-C, which only asks the ranks to stop.

    nutpie evaluates in other threads, perhaps without Python, and looks for signals in this one.

    Parameters
    ----------
    stop : Stop
        Whether the ranks are asked to stop.
    """
    main, has_ended, is_due = threading.main_thread().ident or 0, threading.Event(), threading.Event()
    if threading.get_ident() != main:
        yield
        return

    def watch() -> None:
        while not has_ended.wait(_LOOK):
            if stop.is_asked:
                is_due.set()
                signal.pthread_kill(main, signal.SIGINT)
                return

    def handle(number: int, frame: Any) -> None:
        if is_due.is_set():
            is_due.clear()
            if not has_ended.is_set():
                raise KeyboardInterrupt
        elif callable(before):
            before(number, frame)

    before = signal.signal(signal.SIGINT, handle)
    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield
        has_ended.set()  # so that it is not raised below
    finally:
        has_ended.set()
        watcher.join()
        signal.signal(signal.SIGINT, before)


class _ModelPickler(cloudpickle.Pickler):
    """Pickles a model, with numbers in place of its sums over rows."""

    def __init__(self, file: io.BytesIO, sums: Sequence[Rows]) -> None:
        super().__init__(file)
        self._sums = sums

    def persistent_id(self, item: Any) -> int | None:
        return self._sums.index(item) if isinstance(item, Rows) else None


class _ModelUnpickler(pickle.Unpickler):
    """Puts sums over rows in the places of numbers."""

    def __init__(self, pickled: bytes, sums: Sequence[EvaluatedSum]) -> None:
        super().__init__(io.BytesIO(pickled))
        self._sums = sums

    def persistent_load(self, number: int) -> EvaluatedSum:
        return self._sums[number]


def sample_chains(
    model: Any,
    draws: int,
    tune: int,
    chains: int,
    ranks_per_chain: int | None,
    random_seed: Any,
    deterministics: bool | Sequence[str],
    options: dict[str, Any],
) -> Any:
    """Return the draws of all chains; see `sample`."""
    sums = _sums_of(model)
    names = _left_out(model, deterministics)
    chains, size = check_int(chains, "sample: chains", 1), synk.size()
    if ranks_per_chain is None:
        ranks_per_chain = max(1, size // chains)
    if not 1 <= check_int(ranks_per_chain, "sample: ranks_per_chain") <= size:
        raise ValueError(
            f"sample: ranks_per_chain: expected 1 to {size}, the number of ranks, got {ranks_per_chain}"
        )
    refused = sorted({"cores", "mp_ctx", "model", "trace", "return_inferencedata"} & {*options})
    if refused:
        raise TypeError(
            f"sample: expected no {refused[0]}: each chain has ranks, and its draws are returned"
        )
    seeds = _seeds(random_seed, chains)
    checks = options.pop("compute_convergence_checks", True)
    _warm_caches(model, sums)
    _ModelPickler(pickled := io.BytesIO(), sums).dump(model)
    options = {"draws": draws, "tune": tune, **options}
    on_ranks = [rows.on_ranks for rows in sums]
    by_rank = synk.spmd(_sample, pickled.getvalue(), on_ranks, ranks_per_chain, seeds, options)
    by_chain = {chain: drawn for found in by_rank for chain, drawn in found or ()}
    made = [by_chain[chain] for chain in range(chains) if by_chain.get(chain) is not None]
    if by_rank.stopped:
        made = _cut(made)
        _logger.warning(
            f"sample: interrupted; there are {made[0].posterior.sizes['draw']} draws of {len(made)} of "
            f"{chains} chains"
        )
    joined = _join(made)
    if names:
        found = computed(joined, sums[0].model, names)
        joined.posterior = joined.posterior.assign(found)
    if checks:
        log_warnings(run_convergence_checks(joined, model))
    return joined


def _sums_of(model: Any) -> list[Rows]:
    if not isinstance(model, pm.Model):
        raise TypeError(f"sample: expected a model of parallelize(), got {model!r}")
    sums = sums_over_rows([*model.potentials, *model.deterministics])
    if not sums:
        raise ValueError(
            "sample: expected a model of parallelize(), or with a potential of rows_potential(); for "
            "others, there is pm.sample()"
        )
    return sorted(sums, key=lambda rows: rows.name)


def _left_out(model: Any, deterministics: bool | Sequence[str]) -> list[str]:
    """Return the names of the deterministic variables to compute after sampling."""
    known = model.left_out() if isinstance(model, DividedModel) else []
    wanted = deterministics if isinstance(deterministics, (list, tuple)) else known
    if not deterministics:
        return []
    if isinstance(deterministics, str) or {*wanted} - {*known}:
        raise ValueError(
            f"sample: deterministics: expected True, False, or a list of deterministic variables that "
            f"the parallel model leaves out, which are {known}, got {deterministics!r}"
        )
    return list(wanted)


def _seeds(random_seed: Any, chains: int) -> list[int]:
    """Return a seed for each chain."""
    if random_seed is None or np.ndim(random_seed) == 0:
        generator = np.random.default_rng(random_seed)
        return [int(seed) for seed in generator.integers(2**30, size=chains)]
    seeds = [check_int(seed, "sample: random_seed") for seed in random_seed]
    if len(seeds) != chains:
        raise ValueError(
            f"sample: random_seed: expected a seed for each of {chains} chains, got {len(seeds)}"
        )
    return seeds


def _warm_caches(model: pm.Model, sums: Sequence[Rows]) -> None:
    """Evaluate the model by all ranks, so that errors appear before the chains."""
    for rows in sums:
        rows.build_all()
    function = model.logp_dlogp_function(ravel_inputs=True)
    function.set_extra_values({})
    start = pm.blocking.DictToArrayBijection.map(model.initial_point(random_seed=0))
    random = np.random.default_rng(0)
    for number in range(_REHEARSALS):
        moved = start.data + number * random.uniform(-0.5, 0.5, start.data.shape)
        function(start._replace(data=moved.astype(start.data.dtype)))


def _sample(
    rank: synk.Rank,
    pickled: bytes,
    sums: Sequence[SumOnRanks],
    ranks_per_chain: int,
    seeds: Sequence[int],
    options: dict[str, Any],
) -> list[tuple[int, Any]]:
    """Return the draws of the chains that this rank has sampled, with their numbers."""
    first, n_groups = rank.rank // ranks_per_chain, rank.size // ranks_per_chain
    group = rank.split(first if first < n_groups else None)
    if group is None:
        return []
    team = Team(rank, group, sums)
    rank.should_stop  # noqa: B018 - so that calls go on after Ctrl-C, and the sampler ends by itself
    if group.rank:
        team.serve()
        return []
    if not rank.is_master:
        options = {**options, "progressbar": False}
        logging.getLogger("pymc").setLevel(logging.WARNING)
    own = [SumOfTeam(team, *numbered) for numbered in enumerate(sums)]
    model = _ModelUnpickler(pickled, own).load()
    drawn = [
        (chain, _sample_chain(model, seeds[chain], rank._stop, options))
        for chain in range(first, len(seeds), n_groups)
    ]
    team.dismiss()
    return drawn


def _sample_chain(model: pm.Model, seed: int, stop: Any, options: dict[str, Any]) -> Any:
    """Return the draws of a chain; those until then after Ctrl-C, and None if there are none."""
    if stop.is_asked:
        return None
    interrupted = contextlib.nullcontext() if _is_of_pymc(model, options) else _interrupted(stop)
    if _is_of_pymc(model, options):  # it is ended between two draws
        callback = options.get("callback")

        def called(trace: Any, draw: Any) -> None:
            if callback is not None:
                callback(trace, draw)
            if stop.is_asked:
                raise KeyboardInterrupt

        options = {**options, "callback": called}
    try:
        with interrupted:
            return pm.sample(
                model=model,
                chains=1,
                cores=1,
                random_seed=[seed],
                compute_convergence_checks=False,
                **options,
            )
    except (Exception, KeyboardInterrupt):  # as nutpie raises if it has no draw yet
        if not stop.is_asked:
            raise
        return None


def _is_of_pymc(model: pm.Model, options: dict[str, Any]) -> bool:
    """Whether PyMC's own sampler will be used, which has callbacks."""
    sampler = options.get("nuts_sampler")
    if sampler is not None or pm.__version__.startswith("5."):
        return sampler in (None, "pymc")
    is_discrete = any(item.type.dtype.startswith(("int", "uint", "bool")) for item in model.free_RVs)
    return is_discrete or "step" in options or find_spec("nutpie") is None


def _cut(made: Sequence[Any]) -> list[Any]:
    """Return equal numbers of draws of the chains that have any; raise KeyboardInterrupt if none has."""
    lengths = [_n_draws(item.posterior) for item in made]
    if not any(lengths):
        raise KeyboardInterrupt
    length = min(item for item in lengths if item)
    return [item.isel(draw=slice(length)) for item, found in zip(made, lengths) if found]


def _n_draws(posterior: Any) -> int:
    """Return the number of draws; nutpie fills up the others with NaN."""
    first = next(iter(posterior.data_vars.values()))
    is_missing = np.isnan(np.asarray(first.transpose("draw", ...), float))
    return int((~is_missing.all(axis=tuple(range(1, is_missing.ndim)))).sum())


def _join(by_chain: Sequence[Any]) -> Any:
    """Return the draws of all chains as one, of the kind that PyMC returns."""
    first, groups = by_chain[0], {}
    is_tree = hasattr(first, "children")  # of PyMC 6
    for name in first.children if is_tree else first.groups():
        datasets = [item[name].to_dataset() if is_tree else item[name] for item in by_chain]
        groups[name] = datasets[0]
        if "chain" in datasets[0].dims:
            joined = xarray.concat(datasets, dim="chain")
            groups[name] = joined.assign_coords(chain=np.arange(len(by_chain)))
    return xarray.DataTree.from_dict(groups) if is_tree else type(first)(**groups)
