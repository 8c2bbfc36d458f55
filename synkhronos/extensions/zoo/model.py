"""What all models of the zoo have in common, whatever their network: data, loss, updates, iterations.

A model trains one network on one rank, on this rank's share of the data. Its interface is that of the
models of Theano-MPI (H. Ma, F. Mao and G. Taylor, "Theano-MPI: A Theano-Based Distributed Training
Framework", 2016, arXiv:1605.08325), so that any rule can exchange its parameters between iterations.
"""

from __future__ import annotations

import contextlib
import difflib
import logging
from typing import TYPE_CHECKING, Any, Callable, Iterator, Mapping, NamedTuple, Sequence

import lasagne
import numpy as np
import theano
import theano.tensor as tt

from synkhronos.extensions.zoo.data import DataSet, Minibatches
from synkhronos.extensions.zoo.layers import Layer, average_updates

if TYPE_CHECKING:
    from synkhronos.extensions.session import RankRecorder

_log = logging.getLogger("synkhronos.zoo")

#: The update rules, all of Lasagne, and the argument that the option `momentum` is for.
_RULES = {
    "sgd": (lasagne.updates.sgd, None),
    "momentum": (lasagne.updates.momentum, "momentum"),
    "nesterov": (lasagne.updates.nesterov_momentum, "momentum"),
    "adam": (lasagne.updates.adam, "beta1"),
    "rmsprop": (lasagne.updates.rmsprop, None),
}
#: What a session may give besides options.
_OF_SESSION = ("rank", "size", "verbose")


class Head(NamedTuple):
    """An output for training, and how much its loss counts.

    Attributes
    ----------
    output : Layer or expression
        Probabilities of the classes.
    weight : float
    """

    output: Any
    weight: float


class Graph(NamedTuple):
    """A network, and the expressions and variables that a model trains it by.

    Attributes
    ----------
    network : Layer or keras.models.Model
    input : variable
    heads : list of Head
        The outputs for training, as expressions; the first is that of the network.
    evaluated : variable
        The output for evaluation.
    params : list of shared variables
        What is trained.
    averages : list of shared variables
        The running averages of batch normalizations.
    average_updates : list of (shared variable, expression)
        How a training step updates these.
    decayed : list of shared variables
        The parameters that weight decay applies to.
    """

    network: Any
    input: Any
    heads: Sequence[Head]
    evaluated: Any
    params: list[Any]
    averages: list[Any]
    average_updates: list[tuple[Any, Any]]
    decayed: list[Any]


class Model:
    """A classifier. Subclasses name a network, the reader of its data, and the options of its paper.

    All ranks begin with equal parameters, which depend on the seed alone.

    Parameters
    ----------
    config : dict
        ``rank``, ``size`` and ``verbose`` (by default 0, 1 and False), and options, which replace those
        in `defaults`:

        ``pixels``, ``width``
            As for the network.
        ``classes``
            The number of classes, by default that of the data.
        ``data``
            A `~synkhronos.extensions.zoo.data.DataSet`; by default, what the model's reader reads from
            ``folder``.
        ``batch_size``, ``n_subb``
            Rows of a minibatch, and how many minibatches count as one of ``data.n_batch_train``.
        ``update_rule``
            "sgd", "momentum", "nesterov", "adam" or "rmsprop".
        ``learning_rate``, ``momentum``, ``weight_decay``
            Of the update rule; with "adam" the momentum is beta1. The weight decay w adds ``w / 2``
            times the sum of the squares of the weights to the loss.
        ``n_epochs``, ``lr_epochs``, ``lr_factor``
            The number of epochs; and those, counted from 0, from which on the learning rate is
            multiplied by the factor.
        ``seed``
            Of the weights and of the order of rows.

        Other keys are the session's, and are ignored, unless they look like a misspelled option.

    Attributes
    ----------
    params : list of shared variables
        What is trained, and to be exchanged.
    averages : list of shared variables
        The running averages of batch normalizations, which each rank has of its own rows. A session may
        average them over the ranks before an evaluation.
    data : Minibatches
        This rank's, with ``n_batch_train`` and ``n_batch_val``.
    epoch, n_epochs, n_subb : int
        `epoch`, set by the session, determines the order of the rows.
    shared_lr : shared scalar
        The learning rate.
    options : dict
        What the model was made with.
    network, input
        As the network's function returns them.
    train_iter_fn, val_iter_fn : function or None
        From `compile_iter_fns`.

    Raises
    ------
    ValueError
        If an option is wrong, or there are too few rows.
    """

    #: The options, with their defaults. Subclasses name new options, and other defaults.
    defaults: Mapping[str, Any] = {
        "pixels": None, "classes": None, "width": 1.0, "data": None, "folder": None, "batch_size": 32,
        "n_subb": 1, "update_rule": "momentum", "learning_rate": 0.01, "momentum": 0.9,
        "weight_decay": 0.0, "n_epochs": 1, "lr_epochs": (), "lr_factor": 0.1, "seed": 0,
    }  # fmt: skip
    #: The function that builds the network.
    network: Any = None
    #: The function that reads the data from the folder, or from None.
    read: Callable[[Any], DataSet]
    #: Whether pixels are between -1 and 1.
    symmetric = False

    def __init_subclass__(cls) -> None:
        base: Any = super(cls, cls)
        cls.defaults = {**base.defaults, **cls.defaults}

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config, self.options = dict(config), _options(self.defaults, config)
        self.rank, self.size = int(config.get("rank", 0)), int(config.get("size", 1))
        self.verbose = bool(config.get("verbose", False)) and self.rank == 0
        options = self.options
        self.n_epochs, self.n_subb = int(options["n_epochs"]), int(options["n_subb"])
        self.dataset = self.read_data() if options["data"] is None else options["data"]
        if options["classes"] is None:
            options["classes"] = self.dataset.classes
        share = options["batch_size"], self.n_subb, self.rank, self.size, options["seed"]
        self.data = Minibatches(self.dataset, *share, options["pixels"], self.symmetric)
        rate = np.asarray(options["learning_rate"], theano.config.floatX)
        self.shared_lr = theano.shared(rate, "learning_rate")
        self.epoch, self._done = 0, {"train": 0, "val": 0}
        self.train_iter_fn: Any = None
        self.val_iter_fn: Any = None
        self.params: list[Any] = []
        self.averages: list[Any] = []
        with _weights_of(options["seed"]):
            self.build()
        if self.verbose:
            count = sum(param.get_value(borrow=True).size for param in self.params)
            _log.info("%s: %d parameters; %s", type(self).__name__, count, self.dataset.source)

    # What subclasses may replace

    def read_data(self) -> DataSet:
        """Return the data that the model is trained on, unless they are given."""
        return type(self).read(self.options["folder"])

    def network_options(self) -> dict[str, Any]:
        """Return the arguments of the function that builds the network."""
        found = {name: self.options[name] for name in ("pixels", "classes", "width")}
        return {**found, "channels": self.dataset.channels}

    def heads_of(self, network: Layer) -> list[Head]:
        """Return further outputs that are used for training only."""
        return []

    def build_graph(self) -> Graph:
        """Build the network, and its outputs for training and for evaluation."""
        network, input = type(self).network(**self.network_options())
        heads = [Head(network, 1), *self.heads_of(network)]
        layers = [head.output for head in heads]
        evaluated = lasagne.layers.get_output(network, deterministic=True)
        outputs = lasagne.layers.get_output(layers)
        params = lasagne.layers.get_all_params(layers, trainable=True)
        return Graph(
            network=network,
            input=input,
            heads=[Head(output, head.weight) for output, head in zip(outputs, heads)],
            evaluated=evaluated,
            params=params,
            averages=lasagne.layers.get_all_params(layers, running_average=True),
            average_updates=average_updates(layers),
            decayed=lasagne.layers.get_all_params(layers, trainable=True, regularizable=True),
        )

    def build(self) -> None:
        """Build what is trained, and set `params` and `averages`."""
        self._graph = self.build_graph()
        self.network, self.input = self._graph.network, self._graph.input
        self.params, self.averages = self._graph.params, self._graph.averages

    def compile_iter_fns(self, function: Callable[..., Any] = theano.function) -> None:
        """Compile the functions for iterations.

        What can be exchanged between iterations are the parameters, and not momenta, as with
        Theano-MPI's ``sync_type="cdd"``.

        Parameters
        ----------
        function : callable
            Compiles, with the arguments of `theano.function`.
        """
        graph, labels = self._graph, tt.ivector("labels")
        costs = [head.weight * cross_entropy(head.output, labels) for head in graph.heads]
        decay = self.options["weight_decay"] / 2
        loss = sum(costs)
        if decay:
            loss = loss + decay * sum(tt.sqr(param).sum() for param in graph.decayed)
        updates = [*self.step_updates(loss, graph.params), *graph.average_updates]
        outputs = [cross_entropy(graph.heads[0].output, labels), error(graph.heads[0].output, labels)]
        inputs = [graph.input, labels]
        self.train_iter_fn = function(inputs, outputs, updates=updates, name="train")
        output = graph.evaluated
        measured = [cross_entropy(output, labels), error(output, labels), error(output, labels, 5)]
        self.val_iter_fn = function(inputs, measured, name="validate")

    def train_step(self, rows: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
        """Train on a minibatch; return its loss and its share of errors before the step."""
        cost, wrong = self.train_iter_fn(rows, labels)
        return float(cost), float(wrong)

    def val_step(self, rows: np.ndarray, labels: np.ndarray) -> tuple[float, float, float]:
        """Return the loss of a minibatch, the share of errors, and that among the first five."""
        cost, wrong, wrong_of_5 = self.val_iter_fn(rows, labels)
        return float(cost), float(wrong), float(wrong_of_5)

    # What sessions call

    def train_iter(self, count: int, recorder: RankRecorder | None = None) -> tuple[float, float]:
        """Train on the next minibatch of the epoch; after the last one the epoch begins again.

        Parameters
        ----------
        count : int
            The number of the iteration, for the recorder.
        recorder : RankRecorder, optional
            Records times and results, as a session does.

        Returns
        -------
        cost, error : float
            The mean loss of the minibatch, and the share of wrong classes, before the step.
        """
        if self._done["train"] == 0:
            self.data.shuffle(self.epoch)
        with self._timed(recorder, "load"):
            batch = self.data.train_batch(self._next("train", self.data.n_batch_train))
        with self._timed(recorder, "calc"):
            cost, wrong = self.train_step(*batch)
        if recorder is not None:
            recorder.train_error(count, cost, wrong)
        return cost, wrong

    def val_iter(self, count: int, recorder: RankRecorder | None = None) -> tuple[float, float, float]:
        """Validate on the next minibatch.

        Parameters
        ----------
        count : int
            The number of the iteration, for the recorder.
        recorder : RankRecorder, optional
            As for `train_iter`.

        Returns
        -------
        cost, error, error_top5 : float
            The mean loss, and the shares of rows whose class is not the most probable, or not among the
            five most probable.
        """
        with self._timed(recorder, "load"):
            batch = self.data.val_batch(self._next("val", self.data.n_batch_val))
        with self._timed(recorder, "calc"):
            measured = self.val_step(*batch)
        if recorder is not None:
            recorder.val_error(count, *measured)
        return measured

    def reset_iter(self, mode: str) -> None:
        """Have the next iteration of a mode, "train" or "val", use the first minibatch."""
        if mode not in self._done:
            raise ValueError(f"mode: expected 'train' or 'val', got {mode!r}")
        self._done[mode] = 0

    def adjust_hyperp(self, epoch: int) -> None:
        """Set the learning rate for an epoch, counted from 0."""
        passed = sum(epoch >= option for option in self.options["lr_epochs"])
        rate = self.options["learning_rate"] * self.options["lr_factor"] ** passed
        self.shared_lr.set_value(np.asarray(rate, theano.config.floatX))

    def cleanup(self) -> None:
        """Release the functions; the parameters and the network are kept."""
        self.train_iter_fn = self.val_iter_fn = None

    # Helpers

    def step_updates(
        self, loss: Any, params: list[Any], rule: str | None = None
    ) -> list[tuple[Any, Any]]:
        """Return the updates of parameters, and of the rule's own state, by the option `update_rule`."""
        rule = self.options["update_rule"] if rule is None else rule
        if rule not in _RULES:
            raise ValueError(f"update_rule: expected one of {', '.join(_RULES)}, got {rule!r}")
        update, momentum = _RULES[rule]
        more = {momentum: self.options["momentum"]} if momentum else {}
        return list(update(loss, params, learning_rate=self.shared_lr, **more).items())

    def _next(self, mode: str, batches: int) -> int:
        """Return the number of the next minibatch of a mode."""
        if self.train_iter_fn is None:
            raise RuntimeError("expected compiled functions: call compile_iter_fns() before iterations")
        number = self._done[mode]
        self._done[mode] = (number + 1) % (batches * self.n_subb)
        return number

    @contextlib.contextmanager
    def _timed(self, recorder: RankRecorder | None, what: str) -> Iterator[None]:
        if recorder is not None:
            recorder.start()
        yield
        if recorder is not None:
            recorder.end(what)


def cross_entropy(probabilities: Any, labels: Any) -> Any:
    """Return the mean loss of the rows."""
    return tt.nnet.categorical_crossentropy(probabilities, labels).mean()


def error(probabilities: Any, labels: Any, among: int = 1) -> Any:
    """Return the share of rows with at least `among` classes that are more probable than their own."""
    own = probabilities[tt.arange(labels.shape[0]), labels]
    before = tt.gt(probabilities, own.dimshuffle(0, "x")).sum(axis=1)
    return tt.ge(before, among).mean(dtype=theano.config.floatX)


def _options(defaults: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, without the keys that belong to the session."""
    for key in config:
        if key not in defaults and key not in _OF_SESSION:
            similar = difflib.get_close_matches(key, defaults, n=1, cutoff=0.8)
            if similar:
                raise ValueError(f"config: expected {similar[0]!r}, got {key!r}")
    return {**defaults, **{key: config[key] for key in defaults if key in config}}


@contextlib.contextmanager
def _weights_of(seed: int) -> Iterator[None]:
    """Have Lasagne draw weights by a seed, and go on as before afterwards."""
    before = lasagne.random.get_rng()
    lasagne.random.set_rng(np.random.RandomState(seed))
    try:
        yield
    finally:
        lasagne.random.set_rng(before)
