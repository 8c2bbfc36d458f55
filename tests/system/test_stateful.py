"""Stateful tests: long random sequences of public calls on 1 to 4 ranks against ``model.py``."""

import contextlib
import os
from collections import namedtuple

import model as plain
import numpy as np
import pytest
from compilers import NAME, compiler
from hypothesis import HealthCheck, Phase, settings, strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine, initialize, invariant, precondition, rule, run_state_machine_as_test,
)  # fmt: skip
from model import Argument
from oracle import (
    WORLD_IDS, WORLDS, as_given, assert_same, batches, draw_names, exact, parts, selected, slice_batches,
)  # fmt: skip
from pool import FIXED, FORMULAS, RAGGED, STARTS, Graphs

import synkhronos as synk

# The script of the model lets replicas differ, and averages sums.
pytestmark = pytest.mark.filterwarnings("ignore::synkhronos.SynkhronosWarning")
WIRES = ["float16", "bfloat16", "int8", synk.TopK(0.25), synk.PowerSGD(2)]
LARGE = 8  # larger values are reset, to avoid overflow and the accumulation of rounding errors


class Session:
    """The library's current world and its functions, and the counts of steps and errors."""

    def __init__(self):
        self.graphs = Graphs()
        self.place = None
        self.steps = 0
        self.raised = 0

    def reopen(self, size, master_rank):
        self.close()
        synk.fork(size, use_gpu=False, master_rank=master_rank)
        self.place = size, master_rank
        self.functions = {}
        for name in FORMULAS:
            if name != "late":
                self.make(name)

    def make(self, name):
        self.functions[name] = self.graphs.function(name)

    def close(self):
        if self.place is not None:
            synk.close()
            self.place = None


Slot = namedtuple("Slot", "data array views")  # a `Data`, its model, and views taken earlier
Action = namedtuple("Action", "call command")  # the library's call, and the model's command


def owner(array):
    """Return the object that owns an array's memory."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.base


class Calls(RuleBasedStateMachine):
    """The library and its model, to which the same calls are made."""

    session = None
    place = None

    # Initialization and invariants

    @initialize(seed=st.integers(0, 10**6))
    def begin(self, seed):
        self.session.graphs.shared["late"].set_value(STARTS["late"])
        self.session.reopen(*self.place)
        self.rng = np.random.default_rng(seed)
        self.since = 0
        self.kept = []  # results of earlier calls, which must not change
        self._enter()
        self.session.steps -= 1  # the first check of invariants is not after a step
        for name in [*FIXED, *RAGGED]:
            self.reset(name)
        x = exact(self.rng, (self.model.size, 3), "float32")
        arguments = {"x": Argument(x), "scale": Argument(np.float32(1))}
        self.do([self.call_action("training", [x, 1], {}, arguments, {})])

    def _enter(self):
        self.model = plain.World(*self.session.place)
        self.size, self.ranks = self.model.size, self.model.ranks
        self.functions, self.shared = self.session.functions, self.session.graphs.shared
        self.slots, self.bound = [], {}
        for name in [*FIXED, *RAGGED]:
            self.model.set_everywhere(name, self.shared[name].get_value())

    def reset(self, name):
        value = self.random(name, STARTS[name].shape)
        synk.broadcast(self.shared[name], value)
        self.model.set_everywhere(name, value)

    def random(self, name, shape):
        dtype = STARTS[name].dtype
        if dtype.kind in "iu":
            return np.asarray(self.rng.integers(0, 4, shape)).astype(dtype)
        return np.asarray(exact(self.rng, shape, dtype) / 2).astype(dtype)

    @invariant()
    def every_rank_has_the_models_values(self):
        self.session.steps += 1
        self.since += 1
        names = list(self.model.values)
        for rank in self.ranks:
            for name, got in zip(names, synk.get_value(rank, [self.shared[n] for n in names])):
                assert_same(got, self.model.values[name][rank], STARTS[name].dtype)
                self.model.values[name][rank] = got  # so that rounding errors do not add up
        np.testing.assert_array_equal(
            self.shared["w"].get_value(), self.model.values["w"][self.model.master_rank]
        )
        for name in names:
            values = self.model.values[name]
            is_long = name in RAGGED and any(value.size > 99 for value in values)
            if is_long or any(np.abs(value).max(initial=0) > LARGE for value in values):
                self.reset(name)

    @invariant()
    def data_holds_what_the_model_holds(self):
        for data, array, views in self.slots:
            if array.array is None:
                with pytest.raises(ValueError, match="freed"):
                    data.data  # noqa: B018
            else:
                np.testing.assert_array_equal(data.data, array.array)
                assert data.data.dtype == array.array.dtype and data.shape == array.array.shape
                assert data.alloc_size >= data.size
            for view, seen in views:
                if array.array is not None and owner(view) is owner(data.data):
                    seen[...] = view
                else:  # the data has grown or been freed since, so the view must not change
                    np.testing.assert_array_equal(view, seen)
        for name, slot in self.bound.items():
            assert synk.get_shmems(self.session.graphs.inputs[name]) is slot.data

    @invariant()
    def earlier_results_are_what_they_were(self):
        for result, copy in self.kept:
            np.testing.assert_array_equal(result, copy)

    # Running actions in both

    def do(self, actions, fused=False):
        """Run actions in the model and in the library; compare the results or the exceptions."""
        failure = expected = None
        try:
            expected = self.model.execute([action.command for action in actions])
        except (ValueError, plain.RankError) as error:
            failure = error
        with self.raised_like(failure):
            if fused:
                with synk.fuse():
                    pending = [action.call() for action in actions]
                results = [one.result() for one in pending]
            else:
                results = [action.call() for action in actions]
            for got, wanted in zip(results, expected or []):
                self.compare(got, wanted)

    def raised_like(self, error):
        if error is None:
            return contextlib.nullcontext()
        self.session.raised += 1
        if not isinstance(error, plain.RankError):
            return pytest.raises(type(error))
        if error.rank == self.model.master_rank:
            return pytest.raises({"IndexError": IndexError, "ValueError": ValueError}[error.type_name])
        return pytest.raises(synk.WorkerError, match=f"rank {error.rank}.*{error.type_name}")

    def compare(self, got, wanted):
        if isinstance(wanted, list):
            assert isinstance(got, list) and len(got) == len(wanted)
            for one, other in zip(got, wanted):
                self.compare(one, other)
        elif wanted is None or isinstance(wanted, tuple):
            assert got == wanted
        else:
            assert_same(got, wanted, wanted.dtype)
            self.kept = [*self.kept[-5:], (got, got.copy())]

    # Calls of functions

    def draw_call(self, draw, fused=False):
        name = draw(st.sampled_from(sorted(self.functions)), "function")
        formula = FORMULAS[name]
        if fused and name == "both":
            name, formula = "sliceable", FORMULAS["sliceable"]
        arguments, args, named = self.draw_arguments(draw, formula)
        options = {}
        rows = [one.array for one in arguments.values() if not one.minibatch]
        if formula.inputs:
            rows = rows if rows and rows[0].ndim else [arguments[formula.inputs[0]].array]
            options["batch"] = draw(batches(len(rows[0])), "batch")
        if formula.inputs or formula.sliceable:
            options["num_slices"] = draw(st.integers(1, 4), "num_slices")
        indices = st.integers(0, len(formula.ops) - 1)
        fewest = name == "look_up"  # without outputs, no look-up
        subsets = st.none() | st.lists(indices, max_size=4, min_size=fewest)
        options["subset"] = draw(subsets, "subset")
        if formula.sliceable:
            options["batch_s"] = self.draw_batch_s(draw, formula, arguments, options)
            if options["batch_s"] is None:
                return self.draw_fetch(draw)
        return self.call_action(name, args, named, arguments, options)

    def draw_batch_s(self, draw, formula, arguments, options):
        lengths = [len(value) for value in self.model.values["a"]]
        if not formula.inputs:
            return draw(slice_batches(lengths), "batch_s")
        # Theano requires as many rows of the shared variable as of the input.
        rows = arguments["x"].array
        n_rows = len(selected(options["batch"], rows)) if not arguments["x"].minibatch else len(rows)
        needed = [len(part) for part in parts(range(n_rows), self.size)]
        if (
            options["batch"] is not None
            and arguments["x"].minibatch
            or any(have < need for have, need in zip(lengths, needed))
        ):
            return None
        each = [self.rng.permutation(have)[:need].tolist() for have, need in zip(lengths, needed)]
        return each, each

    def call_action(self, name, args, named, arguments, options):
        formula, function = FORMULAS[name], self.functions[name]
        given, by_rank = options.pop("batch_s", (None, None))
        try:
            command = plain.Call(self.model, formula, arguments, batch_s=by_rank, **options)
        except (ValueError, IndexError) as error:
            return Action(None, (type(error), lambda: self._call(function, args, named, given, options)))
        return Action(lambda: self._call(function, args, named, given, options), command)

    def _call(self, function, args, named, batch_s, options):
        options = dict(options)
        subset = options.pop("subset", None)
        result = function(*args, batch_s=batch_s, output_subset=subset, **options, **named)
        for value in [*args, *named.values()]:
            if isinstance(value, np.ndarray) and value.ndim:
                value[...] = 77  # the caller may reuse the array after the call
        return result

    def draw_arguments(self, draw, formula):
        """Return the model's arguments, and the library's positional and keyword arguments."""
        arguments, args, named, by_position = {}, [], {}, True
        n_rows = None
        for name in (*formula.inputs, *formula.bcast):
            argument, value = self.draw_argument(draw, name, n_rows)
            if name in formula.inputs and n_rows is None and not argument.minibatch:
                n_rows = len(argument.array)
            arguments[name] = argument
            by_position = by_position and value is not None and draw(st.booleans(), "by position")
            if value is not None and by_position:
                args.append(value)
            elif value is not None:
                named[name] = value
        return arguments, args, named

    def draw_argument(self, draw, name, n_rows):
        """Return the model's argument, and the library's, which is None for bound data."""
        if name == "scale":
            value = np.float32(self.rng.integers(1, 9) / 4)
            return Argument(value), draw(st.sampled_from([value, float(value), synk.data(value)]))
        fitting = [slot for slot in self.slots if self.fits(slot, name)]
        forms = ["array", "data", "list", "minibatch"]
        forms += ["kept"] * 3 * bool(fitting)
        if name in self.bound and self.fits(self.bound[name], name):
            forms += ["bound"] * 3
        form = draw(st.sampled_from(forms), name)
        if form in ("kept", "bound"):
            slot = self.bound[name] if form == "bound" else draw(st.sampled_from(fitting))
            argument = Argument(slot.array.array, slot.array.minibatch)
            return argument, None if form == "bound" else slot.data
        length = draw(st.integers(0, 9)) if n_rows is None else n_rows
        if draw(st.integers(0, 30)) == 30:
            length += 1
        array = self.rows(name, length)
        if name == "y" and length and draw(st.integers(0, 5)) == 5:
            array[draw(st.integers(0, length - 1))] = 99  # not in the table
        argument = Argument(array.copy(), form == "minibatch")
        if form == "list":
            return argument, array.tolist() if length else array
        if form != "array":
            array = synk.data(array, minibatch=form == "minibatch", oversize=draw(st.floats(1, 2)))
        return argument, array

    def rows(self, name, length):
        if name == "x":
            return exact(self.rng, (length, 3), "float32")
        return self.rng.integers(-8, 8, length).astype("int32")

    def fits(self, slot, name):
        array = slot.array.array
        if array is None:
            return False
        wanted = ("float32", (3,)) if name == "x" else ("int32", ())
        return array.ndim == 1 + len(wanted[1]) and (array.dtype, array.shape[1:]) == wanted

    @rule(data=st.data())
    def call(self, data):
        self.run(self.draw_call(data.draw))

    def run(self, action):
        if action.call is None:
            error, call = action.command
            self.session.raised += 1
            with pytest.raises(error):
                call()
        else:
            self.do([action])

    @rule(data=st.data())
    def call_the_master_alone(self, data):
        name = data.draw(st.sampled_from(sorted({*self.functions} - {"both"})))
        formula = FORMULAS[name]
        arguments, args, named = self.draw_arguments(data.draw, formula)
        rows = [arguments[one].array for one in formula.inputs]
        if rows and (len({len(one) for one in rows}) > 1 or not len(rows[0])):
            return
        if name == "sliceable" and not len(self.model.values["a"][self.model.master_rank]):
            return
        failure = expected = None
        try:
            expected = plain.call_on_master(self.model, formula, arguments)
        except plain.RankError as error:
            failure = error
        with self.raised_like(failure):
            self.compare(self.functions[name].as_theano(*args, **named), expected)

    @rule(data=st.data(), error=st.booleans())
    def fuse(self, data, error):
        draws = [self.draw_call, self.draw_call, self.draw_assign, self.draw_reduce]
        draws += [self.draw_fetch, self.draw_gather, self.draw_broadcast]
        actions = [
            data.draw(st.sampled_from(draws))(data.draw, True)
            for _ in range(data.draw(st.integers(1, 5), "actions"))
        ]
        actions = [action for action in actions if action.call is not None]
        if error and data.draw(st.booleans()):  # an error in the block, so that nothing runs
            with pytest.raises(ZeroDivisionError), synk.fuse():
                for action in actions:
                    action.call()
                raise ZeroDivisionError
        else:
            self.do(actions, fused=True)

    @rule(data=st.data())
    def build_a_function_late(self, data):
        self.session.make("late")
        shared = self.shared["late"]
        if "late" not in self.model.values:
            if data.draw(st.booleans(), "set before it is replicated"):
                shared.set_value(self.random("late", ()))
            self.model.set_everywhere("late", shared.get_value())
        if data.draw(st.booleans(), "distribute"):
            synk.distribute()

    # Shared variables across ranks

    def of(self, names):
        return [self.shared[name] for name in names]

    def draw_assign(self, draw, fused=False):
        kind = draw(st.sampled_from(["scatter", "set_value", "broadcast"]))
        batch = None
        if kind == "scatter" or draw(st.booleans(), "rows"):
            names, length = draw_names(draw, sorted(RAGGED)), draw(st.integers(0, 9))
            batch = draw(batches(length)) if kind != "broadcast" else None
            arrays = [self.random(name, (length, *STARTS[name].shape[1:])) for name in names]
        else:
            names = draw_names(draw, sorted(self.model.values))
            arrays = [self.random(name, STARTS[name].shape) for name in names]
        given = as_given(draw, self.of(names), arrays)
        by_name = dict(zip(names, arrays))
        if kind == "scatter":
            return Action(
                lambda: synk.scatter(*given, batch=batch),
                plain.Assign(self.model, by_name, batch, split=True),
            )
        if kind == "broadcast":
            return Action(lambda: synk.broadcast(*given), plain.Assign(self.model, by_name))
        rank = draw(st.sampled_from(self.ranks), "rank")
        return Action(
            lambda: synk.set_value(rank, *given, batch=batch),
            plain.Assign(self.model, by_name, batch, rank),
        )

    def draw_fetch(self, draw, fused=False):
        names = draw_names(draw, sorted(self.model.values))
        if draw(st.booleans(), "shapes"):
            return Action(lambda: synk.get_shapes(self.of(names)), plain.Shapes(names))
        rank = draw(st.sampled_from(self.ranks), "rank")
        return Action(lambda: synk.get_value(rank, self.of(names)), plain.Fetch(names, rank))

    def draw_broadcast(self, draw, fused=False):
        names = draw_names(draw, sorted(self.model.values))
        return Action(lambda: synk.broadcast(self.of(names)), plain.Broadcast(names))

    def draw_gather(self, draw, fused=False):
        kind = draw(st.sampled_from(["stack", "join", "to all"]))
        if kind == "stack":
            names = draw_names(draw, sorted(self.model.values))
            return Action(lambda: synk.gather(self.of(names)), plain.Gather(names, 1))
        names = draw_names(draw, sorted(RAGGED))
        if kind == "join":
            return Action(lambda: synk.gather(self.of(names), nd_up=0), plain.Gather(names, 0))
        return Action(lambda: synk.all_gather(self.of(names)), plain.AllGather(names))

    def draw_reduce(self, draw, fused=False, again=None):
        op = draw(st.sampled_from(["avg", "min", "max"] + ["sum", "prod"] * (not fused)))
        floats = [name for name in self.model.values if STARTS[name].dtype.kind == "f"]
        op = op if again is None else again.op
        names = draw_names(draw, sorted(floats if op == "avg" else self.model.values))
        target = draw(st.sampled_from(["all", "master", "new"]))
        given = weights = None
        if op == "avg" and (again or draw(st.booleans(), "weighted")):
            given, weights = self.functions["training"], FORMULAS["training"]
            if again or draw(st.booleans(), "weights listed"):
                weight = st.sampled_from([0, 1, 2, 0.25])
                given = weights = draw(
                    st.lists(weight, min_size=self.size, max_size=self.size).filter(any)
                )
        if again is not None:  # the same arrays again, for which the library is prepared
            names, target = again.names, again.target
        command = plain.Reduce(names, op, target, weights)
        if target == "all":
            wire = draw(st.none() | st.sampled_from(WIRES), "wire")
            if wire is not None and (error := self.refusal(names, op, wire)):
                return Action(None, (error, lambda: synk.all_reduce(self.of(names), op, wire=wire)))
            return Action(lambda: synk.all_reduce(self.of(names), op, weights=given, wire=wire), command)
        in_place = target == "master"
        return Action(lambda: synk.reduce(self.of(names), op, in_place, weights=given), command)

    def refusal(self, names, op, wire):
        """Return the error of a format that cannot be used, or None. On one machine others are exact."""
        if op not in ("avg", "sum"):
            return ValueError
        if any(STARTS[name].dtype != "float32" for name in names):
            return TypeError
        are_vectors = all(STARTS[name].ndim < 2 for name in names)
        return ValueError if are_vectors and isinstance(wire, synk.PowerSGD) else None

    @rule(data=st.data())
    def assign(self, data):
        self.run(self.draw_assign(data.draw))

    @rule(data=st.data())
    def fetch(self, data):
        self.run(self.draw_fetch(data.draw))

    @rule(data=st.data())
    def broadcast(self, data):
        self.run(self.draw_broadcast(data.draw))

    @rule(data=st.data())
    def gather(self, data):
        self.run(self.draw_gather(data.draw))

    @rule(data=st.data())
    def reduce(self, data):
        action = self.draw_reduce(data.draw)
        self.run(action)
        if action.call is None:
            return
        for _ in range(data.draw(st.integers(0, 2), "again")):
            self.run(self.draw_reduce(data.draw, fused=True, again=action.command))

    @rule(name=st.sampled_from([*FIXED, *RAGGED]), in_place=st.booleans())
    def the_script_writes_the_masters_replica(self, name, in_place):
        shared = self.shared[name]
        value = self.random(name, shared.get_value(borrow=True).shape)
        if in_place:
            shared.get_value(borrow=True)[...] = value
        else:
            shared.set_value(value)
        self.model.set_on_master(name, value)

    # Data

    def draw_slot(self, draw):
        return draw(st.sampled_from([slot for slot in self.slots if slot.array.array is not None]))

    def has_data(self):
        return any(slot.array.array is not None for slot in self.slots)

    @rule(data=st.data(), kind=st.sampled_from(["x", "y", "any"]), minibatch=st.booleans())
    def make_data(self, data, kind, minibatch):
        if kind == "any":
            shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
            dtype = data.draw(st.sampled_from(["bool", "int8", "float16", "float64", "complex64"]))
            value = self.rng.integers(0, 9, shape).astype(dtype)
        else:
            value = self.rows(kind, data.draw(st.integers(0, 9)))
        form = data.draw(st.sampled_from(["value", "shape", "refilled"]))
        oversize = data.draw(st.floats(1, 2))
        if form == "shape":
            value = np.zeros_like(value)
            made = synk.data(
                shape=value.shape, dtype=value.dtype, minibatch=minibatch, oversize=oversize
            )
        elif form == "value":
            made = synk.data(value, minibatch=minibatch, oversize=oversize)
        else:
            made = synk.data(dtype=value.dtype, ndim=value.ndim, minibatch=minibatch)
            made.set_value(value, oversize=oversize)
        self.slots = [*self.slots[-5:], Slot(made, plain.Data(value, minibatch), [])]
        value[...] = 1

    @precondition(has_data)
    @rule(data=st.data(), oversize=st.floats(1, 2))
    def refill_data(self, data, oversize):
        made, array, _ = self.draw_slot(data.draw)
        shape = tuple(
            data.draw(st.integers(0, 9)) if not axis or array.array.ndim > 2 else extent
            for axis, extent in enumerate(array.array.shape)
        )
        value = self.rng.integers(-8, 8, shape).astype(array.array.dtype)
        part_of_itself = data.draw(st.booleans()) and array.array.ndim
        if part_of_itself:
            part = data.draw(st.sampled_from([slice(1, None), slice(None, None, -1), slice(0, 2)]))
            made.set_value(made.data[part], oversize=oversize)
            array.set_value(array.array[part])
        else:
            made.set_value(value, oversize=oversize)
            array.set_value(value)

    @precondition(has_data)
    @rule(data=st.data(), oversize=st.floats(1, 2))
    def resize_data(self, data, oversize):
        made, array, _ = self.draw_slot(data.draw)
        shape = list(array.array.shape)
        if not shape:
            with pytest.raises(ValueError):
                made.set_length(3)
            return
        shape[0] = data.draw(st.integers(0, 12) | st.sampled_from([600, 2000]), "rows")
        if data.draw(st.booleans(), "length alone"):
            made.set_length(shape[0], oversize=oversize)
        else:
            if len(shape) > 2:
                shape[-1] = data.draw(st.integers(0, 5))
            made.set_shape(shape, oversize=oversize)
        array.set_shape(tuple(shape))

    @rule(data=st.data())
    def use_data_while_it_changes(self, data):
        """Change data several times. Earlier views are kept, and workers read it in between."""
        rows = self.rows("x", self.size)
        slot = Slot(synk.data(rows), plain.Data(rows), [])
        self.slots = [*self.slots[-5:], slot]
        name = data.draw(st.sampled_from(sorted({*self.functions} & {"training", "late"})))
        for length in data.draw(st.lists(st.integers(1, 40) | st.just(3000), min_size=1, max_size=4)):
            slot.views.append((slot.data.data, slot.data.data.copy()))
            if data.draw(st.booleans(), "length alone"):
                slot.data.set_length(length)
                slot.array.set_shape((length, 3))
            else:
                rows = self.rows("x", length)
                slot.data.set_value(rows)
                slot.array.set_value(rows)
            scale = [] if name == "late" else [np.float32(0.5)]
            arguments = {"x": Argument(slot.array.array), "scale": Argument(np.float32(0.5))}
            self.run(self.call_action(name, [slot.data, *scale], {}, arguments, {}))
            self.data_holds_what_the_model_holds()

    @precondition(has_data)
    @rule(data=st.data(), number=st.integers(0, 7))
    def write_and_read_data(self, data, number):
        made, array, _ = self.draw_slot(data.draw)
        if not array.array.size:
            return
        indices = [..., array.array != 0]
        if array.array.ndim:
            indices += [slice(None, None, 2), 0, -1, [0, 0], (slice(1), Ellipsis)]
        with pytest.raises(IndexError):
            made[len(made) if array.array.ndim else 0] = number
        index = data.draw(st.sampled_from(indices))
        np.testing.assert_array_equal(made[index], array.array[index])
        made[index] = number
        array.array[index] = number

    @precondition(has_data)
    @rule(data=st.data())
    def take_a_view(self, data):
        made, array, views = self.draw_slot(data.draw)
        views.append((made.data, made.data.copy()))
        del views[:-3]

    @precondition(has_data)
    @rule(data=st.data())
    def free_data(self, data):
        made, array, _ = self.draw_slot(data.draw)
        made.free_memory()
        array.free()

    @precondition(lambda self: any(slot.array.array is None for slot in self.slots))
    @rule()
    def use_freed_data(self):
        made = next(slot.data for slot in self.slots if slot.array.array is None)
        for use in (
            lambda: made[0],
            lambda: self.functions["look_up"](made),
            lambda: synk.scatter(self.shared["vector"], made),
        ):
            with pytest.raises((ValueError, TypeError)):
                use()

    @precondition(lambda self: any(slot.array.array is None for slot in self.slots))
    @rule(data=st.data())
    def allocate_freed_data_again(self, data):
        slot = next(slot for slot in self.slots if slot.array.array is None)
        shape = (data.draw(st.integers(0, 9), "length"), 3, 3)[: slot.data.ndim]
        if data.draw(st.booleans()):
            slot.data.set_shape(shape)
            slot.array.set_shape(shape)
        else:
            slot.data.set_value(np.full(shape, 2, slot.data.dtype))
            slot.array.set_value(np.full(shape, 2))

    # Data bound to variables

    @rule(data=st.data())
    def bind(self, data):
        pairs, new = [], {}
        for name in data.draw(st.permutations(["x", "y"]), "names"):
            fitting = [slot for slot in self.slots if self.fits(slot, name)]
            form = data.draw(st.sampled_from(["array", "array", "none"] + ["data"] * bool(fitting)))
            value = self.rows(name, data.draw(st.integers(0, 9)))
            if form == "data":
                slot = data.draw(st.sampled_from(fitting))
                pairs.append((self.session.graphs.inputs[name], slot.data))
                new[name] = slot, None
            elif form == "array":
                pairs.append((self.session.graphs.inputs[name], value))
                new[name] = self.bound.get(name), value
        made = synk.set_shmems(dict(pairs) if data.draw(st.booleans()) else pairs)
        for name, (slot, value) in new.items():
            variable = self.session.graphs.inputs[name]
            if slot is None:
                slot = Slot(made[variable], plain.Data(value), [])
            elif value is not None:
                slot.array.set_value(value)
            assert made[variable] is slot.data
            self.bound[name] = slot
            if not any(slot is other for other in self.slots):
                self.slots.append(slot)

    @precondition(lambda self: self.bound)
    @rule(data=st.data())
    def unbind(self, data):
        name = data.draw(st.sampled_from(sorted(self.bound)))
        variable = self.session.graphs.inputs[name]
        synk.free_shmems(variable)
        self.bound.pop(name).array.free()
        for call in (synk.get_shmems, synk.free_shmems):
            with pytest.raises(ValueError):
                call(variable)

    # Wrong calls

    @rule(data=st.data())
    def call_wrongly(self, data):
        error, call = data.draw(st.sampled_from(self.wrong_calls()))
        self.session.raised += 1
        with pytest.raises(error):
            if data.draw(st.booleans(), "fused"):
                with synk.fuse():
                    call()
            else:
                call()

    def wrong_calls(self):
        f, s = self.functions, self.shared
        x, y = np.ones((7, 3), "float32"), np.zeros(7, "int32")
        whole, vector, long = f["reductions"], s["vector"], s["long"]
        stranger = compiler.shared(np.zeros(3))
        return [
            (TypeError, lambda: whole(x.astype("float64"), y, 1.0)),
            (TypeError, lambda: whole(x, y, 1.0, other=1)),
            (ValueError, lambda: whole(x, y[1:], 1.0)),
            (ValueError, lambda: whole(x, y, 1.0, batch=0)),
            (IndexError, lambda: whole(x, y, 1.0, batch=[7])),
            (TypeError, lambda: whole(x, y, 1.0, batch=1.5)),
            (ValueError, lambda: whole(x, y, 1.0, num_slices=0)),
            (IndexError, lambda: whole(x, y, 1.0, output_subset=[9])),
            (ValueError, lambda: f["whole"](1.0, num_slices=2)),
            (ValueError, lambda: f["sliceable"](batch_s=[[0]] * (self.size + 1))),
            (ValueError, lambda: synk.gather(stranger)),
            (TypeError, lambda: synk.broadcast("w")),
            (ValueError, lambda: synk.all_reduce([vector, vector])),
            (ValueError, lambda: synk.all_reduce(vector, "mean")),
            (ValueError, lambda: synk.reduce(vector, weights=[1] * (self.size + 1))),
            (ValueError, lambda: synk.gather(s["count"], nd_up=0)),
            (ValueError, lambda: synk.all_gather(s["count"])),
            (IndexError, lambda: synk.get_value(self.size, vector)),
            (TypeError, lambda: synk.set_value(0, long, [0.5])),
            (TypeError, lambda: synk.set_value(0, [vector, long], [[1.0], [[1]]])),
            (IndexError, lambda: synk.scatter(vector, np.zeros(3), batch=[-4])),
            (ValueError, lambda: synk.data()),
            (ValueError, lambda: synk.data([1], oversize=3)),
            (TypeError, lambda: synk.set_shmems({self.session.graphs.inputs["x"]: [[0.5j]]})),
            (synk.AlreadyForkedError, lambda: synk.fork(2)),
        ]

    # Another world

    @precondition(lambda self: self.since > 12)
    @rule(data=st.data(), place=st.sampled_from(WORLDS))
    def close_and_fork(self, data, place):
        old, functions, bound = self.slots, self.functions, self.bound
        views = [view for slot in old for view in slot.views]
        values = {name: self.model.values[name][self.model.master_rank] for name in self.model.values}
        self.session.close()
        with pytest.warns(RuntimeWarning):
            synk.close()
        with pytest.raises(synk.ClosedError):
            synk.distribute()
        self.session.reopen(*place)
        for name in functions:
            with pytest.raises(synk.ClosedError):
                functions[name]()
        for slot in old:
            with pytest.raises(synk.ClosedError):
                slot.data[...] = 1
        for name in bound:
            with pytest.raises(ValueError):
                synk.get_shmems(self.session.graphs.inputs[name])
        for view, seen in views:
            np.testing.assert_array_equal(view, seen)
        for name, value in values.items():
            assert_same(self.shared[name].get_value(), value, STARTS[name].dtype)
        if data.draw(st.booleans(), "write before the workers start"):
            self.shared["w"].set_value(self.random("w", (3,)))
        self._enter()
        self.since = 0
        x = np.ones((self.size, 3), "float32")
        self.functions["training"](x, 0.0, output_subset=[])
        arguments = {"x": Argument(x), "scale": Argument(np.float32(0))}
        self.model.execute([plain.Call(self.model, FORMULAS["training"], arguments)])


@pytest.fixture(scope="module")
def session():
    one = Session()
    yield one
    one.close()


def run(session, place, number, steps):
    """Run a number of examples, each with up to a number of steps."""
    factor = float(os.environ.get("EXAMPLES", 1))
    Calls.session, Calls.place = session, place
    run_state_machine_as_test(
        Calls,
        settings=settings(
            max_examples=max(1, int(number * factor)),
            stateful_step_count=steps,
            derandomize=factor == 1,
            # Shrinking takes minutes, as each attempt forks a world. SHRINK=1 enables it.
            phases=[Phase.generate] + [Phase.shrink] * ("SHRINK" in os.environ),
            report_multiple_bugs=False,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("place", WORLDS, ids=WORLD_IDS)
def test_a_sequence_of_calls_does_what_the_model_does(session, place):
    before, raised = session.steps, session.raised
    number = 4 if NAME == "theano" else 2  # what differs between compilers is tested elsewhere
    run(session, place, number, 40)
    assert session.steps - before > 12 * number and session.raised > raised
