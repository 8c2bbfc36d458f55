"""Tests of the training rules, each against a simulation of its formula in NumPy."""

import copy
import time

import numpy as np
import pytest
from compilers import compiler, default_mode, tt

import synkhronos as synk
from synkhronos.extensions import rules, updates

RANKS, STEPS, RATE = 3, 50, 0.05
TOKEN = 1  # the tag of the messages by which ranks take turns
PARAMS = [compiler.shared(np.zeros(2), "w"), compiler.shared(0.0, "b")]
FEATURES = np.random.RandomState(0).normal(size=(300, 2))
TARGETS = FEATURES @ [2.0, -1.0] + 0.5
START = [np.array([0.3, -0.2]), np.array(0.1)]
# The minibatches of each rank; their lengths differ.
ROWS = [[np.random.RandomState(STEPS * rank + step).choice(100, 4 + rank, False) + 100 * rank
         for step in range(STEPS)] for rank in range(RANKS)]  # fmt: skip


@pytest.fixture(scope="module")
def step(open_world):
    """A step of gradient descent on the squared error of a linear model, in two parts."""
    open_world(RANKS, timeout=60)
    x, y = tt.dmatrix("x"), tt.dvector("y")
    loss = tt.sqr(tt.dot(x, PARAMS[0]) + PARAMS[1] - y).mean()
    with default_mode("FAST_COMPILE"):  # without C code
        made = rules.make_step(loss, PARAMS, [x, y], updates.sgd, learning_rate=RATE)
        synk.distribute()
    return made


@pytest.fixture(autouse=True)
def same_start(step):
    synk.broadcast(PARAMS, START)


def gradient(x, rows):
    """Return the gradient at the parameters `x`, one vector of three numbers."""
    errors = FEATURES[rows] @ x[:2] + x[2] - TARGETS[rows]
    return 2 * np.append(FEATURES[rows].T @ errors, errors.sum()) / len(rows)


def own(params=PARAMS):
    return np.concatenate([one.get_value().ravel() for one in params])


# The ranks take turns in an order that the test determines, so that the simulation can follow it.


def order_of_exchanges(lead):
    """Return a random sequence of ranks, each `STEPS` times; none gets more than `lead` ahead."""
    random, taken, order = np.random.RandomState(7), [0] * RANKS, []
    while len(order) < RANKS * STEPS:
        rank = random.randint(RANKS)
        if taken[rank] < STEPS and taken[rank] + 1 - min(taken) <= lead:
            taken[rank] += 1
            order.append(rank)
    return order


def run_in_order(rank, rule, step, order):
    """Return this rank's parameters after each of its exchanges, and at the end."""
    rule = copy.copy(rule)
    rule.start(rank, PARAMS)
    rank.barrier()  # nobody exchanges before all have started
    seen, mine = [], [place for place, one in enumerate(order) if one == rank.rank]
    for number, place in enumerate(mine, 1):
        rule.take_step(rank, step, [FEATURES, TARGETS], ROWS[rank.rank][number - 1])
        if place and order[place - 1] != rank.rank:
            rank.receive(TOKEN, wait=True)
        rule.after_step(rank, PARAMS, number)
        seen.append(own())
        if place + 1 < len(order) and order[place + 1] != rank.rank:
            assert rank.send(order[place + 1], np.zeros(1), TOKEN)
    rank.barrier()
    rule.finish(rank, PARAMS)
    return seen, own()


class Simulation:
    """The ranks of an asynchronous rule; `exchange` is called after each step of a rank."""

    def __init__(self):
        self.x = [np.append(*START) for _ in range(RANKS)]
        self.center = np.append(*START)

    def run(self, order):
        taken, seen = [0] * RANKS, [[] for _ in range(RANKS)]
        for rank in order:
            self.take_step(rank, ROWS[rank][taken[rank]])
            taken[rank] += 1
            self.exchange(rank, taken[rank])
            seen[rank].append(self.shown(rank).copy())
        return [(each, self.final(rank)) for rank, each in enumerate(seen)]

    def take_step(self, rank, rows):
        self.x[rank] = self.x[rank] - RATE * gradient(self.x[rank], rows)

    def shown(self, rank):
        return self.x[rank]

    def final(self, rank):
        return self.center


class Elastic(Simulation):
    """Algorithm 2 of the paper, in its own order; algorithm 1 if the momentum is 0."""

    def __init__(self, alpha, period, momentum):
        super().__init__()
        self.alpha, self.period, self.momentum = alpha, period, momentum
        self.v = [np.zeros(3) for _ in range(RANKS)]

    def take_step(self, rank, rows):
        ahead = self.x[rank] + self.momentum * self.v[rank]
        self.v[rank] = self.momentum * self.v[rank] - RATE * gradient(ahead, rows)
        self.x[rank] = self.x[rank] + self.v[rank]

    def exchange(self, rank, number):
        if number % self.period == 0:
            difference = self.alpha * (self.x[rank] - self.center)
            self.x[rank] = self.x[rank] - difference
            self.center = self.center + difference

    def shown(self, rank):
        return self.x[rank] + self.momentum * self.v[rank]


class Pushes(Simulation):
    def __init__(self, push, pull):
        super().__init__()
        self.push, self.pull = push, pull
        self.changes = [np.zeros(3) for _ in range(RANKS)]

    def take_step(self, rank, rows):
        change = -RATE * gradient(self.x[rank], rows)
        self.x[rank], self.changes[rank] = self.x[rank] + change, self.changes[rank] + change

    def exchange(self, rank, number):
        if number % self.push == 0:
            self.center = self.center + self.changes[rank]
            self.changes[rank] = np.zeros(3)
        if number % self.pull == 0:
            self.x[rank] = self.center

    def final(self, rank):
        return self.center + sum(self.changes)


class Gossip(Simulation):
    def __init__(self, probability, seed):
        super().__init__()
        self.probability, self.seed = probability, seed
        self.weights, self.boxes = [1 / RANKS] * RANKS, [[] for _ in range(RANKS)]
        self.sent = 0

    def exchange(self, rank, number):
        draw = np.random.default_rng([self.seed, rank, number])
        if draw.random() < self.probability:
            others = [one for one in range(RANKS) if one != rank]
            self.weights[rank] /= 2
            self.boxes[others[draw.integers(RANKS - 1)]].append((self.x[rank], self.weights[rank]))
            self.sent += 1
        self.merge(rank)

    def merge(self, rank):
        for x, weight in self.boxes[rank]:
            total = self.weights[rank] + weight
            self.x[rank] = (self.weights[rank] * self.x[rank] + weight * x) / total
            self.weights[rank] = total
        self.boxes[rank] = []

    def final(self, rank):
        for one in range(RANKS):
            self.merge(one)
        return np.average(self.x, axis=0, weights=self.weights)


@pytest.mark.parametrize(
    "rule, simulation, lead",
    [
        (rules.EASGD(alpha=0.3, period=1), Elastic(0.3, 1, 0), STEPS),
        (rules.EASGD(alpha=0.4, period=3), Elastic(0.4, 3, 0), STEPS),
        (rules.EASGD(alpha=0.3, period=2, momentum=0.6), Elastic(0.3, 2, 0.6), STEPS),
        (rules.ASGD(), Pushes(1, 1), STEPS),
        (rules.Downpour(push_period=2, pull_period=4), Pushes(2, 4), STEPS),
        (rules.Downpour(push_period=4, pull_period=3), Pushes(4, 3), STEPS),
        (rules.SSP(staleness=3), Pushes(1, 1), 3),
        (rules.GoSGD(probability=0.2, seed=3), Gossip(0.2, 3), STEPS),
    ],
)
def test_a_rule_without_collectives_equals_its_simulation(step, rule, simulation, lead):
    order = order_of_exchanges(lead)
    real, simulated = synk.spmd(run_in_order, rule, step, order), simulation.run(order)
    for (seen, end), (seen_simulated, end_simulated) in zip(real, simulated):
        assert np.allclose(seen, seen_simulated, rtol=1e-9, atol=1e-12)
        assert np.allclose(end, end_simulated, rtol=1e-9, atol=1e-12)
    if isinstance(simulation, Gossip):
        assert simulation.sent > 15


# Rules with collectives need no order.


def run(rank, rule, step):
    rule = copy.copy(rule)
    rule.start(rank, PARAMS)
    seen, values = [], []
    for number in range(1, STEPS + 1):
        rule.take_step(rank, step, [FEATURES, TARGETS], ROWS[rank.rank][number - 1])
        rule.after_step(rank, PARAMS, number)
        seen.append(own())
        value = rule.value(rank, PARAMS)
        values.append(own() if value is None else np.concatenate([one.ravel() for one in value]))
        assert np.array_equal(seen[-1], own())
    rule.finish(rank, PARAMS)
    return seen, values, own()


def simulate_local(period, rate=1, momentum=0):
    """Return the parameters after each step, by rank, of LocalSGD, or of DiLoCo."""
    x, outer, velocity = [np.append(*START)] * RANKS, np.append(*START), np.zeros(3)
    seen, rows = [[] for _ in range(RANKS)], np.zeros(RANKS)
    for number in range(1, STEPS + 1):
        for rank in range(RANKS):
            batch = ROWS[rank][number - 1]
            x[rank] = x[rank] - RATE * gradient(x[rank], batch)
            rows[rank] += len(batch)
        if number % period == 0 or number == STEPS:
            change = outer - np.average(x, axis=0, weights=rows)
            velocity = momentum * velocity + change
            outer = outer - rate * (change + momentum * velocity)
            if number == STEPS and number % period:
                return seen_with(seen, x), outer
            x, rows = [outer] * RANKS, np.zeros(RANKS)
        seen = seen_with(seen, x)
    return seen, outer


def seen_with(seen, x):
    return [[*each, one] for each, one in zip(seen, x)]


def simulate_gradients(period):
    """Return the parameters after each step of gradient descent on the rows of all ranks."""
    x, seen, batch = np.append(*START), [], []
    for number in range(STEPS):
        batch += [ROWS[rank][number] for rank in range(RANKS)]
        if (number + 1) % period == 0:
            x, batch = x - RATE * gradient(x, np.concatenate(batch)), []
        seen.append(x)
    if batch:
        x = x - RATE * gradient(x, np.concatenate(batch))
    return [seen] * RANKS, x


@pytest.mark.parametrize(
    "rule, simulated",
    [
        (rules.BSP(), simulate_gradients(1)),
        (rules.BSP(period=3), simulate_gradients(3)),
        (rules.BSP(period=4, average="params"), simulate_local(4)),
        (rules.LocalSGD(period=1), simulate_local(1)),
        (rules.LocalSGD(period=7), simulate_local(7)),
        (rules.DiLoCo(period=7), simulate_local(7, 0.7, 0.9)),
        (rules.DiLoCo(period=5, outer_learning_rate=1, outer_momentum=0), simulate_local(5)),
    ],
)
def test_a_rule_with_collectives_equals_its_simulation(step, rule, simulated):
    results = synk.spmd(run, rule, step)
    seen, end = simulated
    for rank, (own_seen, values, own_end) in enumerate(results):
        assert np.allclose(own_seen, seen[rank], rtol=1e-9, atol=1e-12)
        assert np.allclose(own_end, end, rtol=1e-9, atol=1e-12)
        assert np.array_equal(own_end, results[0][2])  # the same bits on all ranks
        assert np.array_equal(values, results[0][1])
    if rule.is_synchronous and not isinstance(rule, rules.DiLoCo):
        weights = np.cumsum([[len(rows) for rows in each] for each in ROWS], axis=1)
        if type(rule) is rules.LocalSGD and rule.period == 7:
            average = np.average(np.array(seen)[:, 3], axis=0, weights=weights[:, 3])
            assert np.allclose(results[0][1][3], average)


def test_gossip_that_never_sends_is_local_training(step):
    results = synk.spmd(run_in_order, rules.GoSGD(probability=0), step, order_of_exchanges(STEPS))
    local, end = simulate_local(STEPS + 1)
    assert all(np.allclose(seen, each) for (seen, _), each in zip(results, local))
    assert np.allclose(results[0][1], np.mean([each[-1] for each in local], axis=0))


def test_the_sum_of_the_gossips_weights_is_conserved(step):
    def program(rank):
        rule = rules.GoSGD(probability=0.9, seed=5)
        rule.start(rank, PARAMS)
        for number in range(1, 400):
            rule.after_step(rank, PARAMS, number)
        rule.finish(rank, PARAMS)
        return rule.weight

    weights = synk.spmd(program)
    assert sum(weights) == pytest.approx(1, abs=1e-12)
    assert len(set(weights)) > 1


def test_a_full_box_keeps_the_weight(step):
    def program(rank):
        rule = rules.GoSGD(probability=1, seed=5)
        rule.start(rank, PARAMS)
        halved = []
        if rank.rank == 0:
            for number in range(1, 2000):
                rule.after_step(rank, PARAMS, number)
                halved.append(rule.weight)
        rank.clock = 1
        rank.wait_for_clocks(1)  # until then the others do not receive
        rule.finish(rank, PARAMS)
        return halved, rule.weight

    (halved, last), *others = synk.spmd(program)
    assert halved[0] == 1 / 6
    assert halved[-1] == halved[-100] > 0
    assert last == halved[-1]
    assert last + sum(weight for _, weight in others) == pytest.approx(1, abs=1e-12)


def test_nothing_is_sent_to_a_rank_that_has_taken_its_last_step(step):
    def program(rank):
        rule = rules.GoSGD(probability=1, seed=5)
        rule.start(rank, PARAMS)
        if rank.rank == 2:
            while min(rank.clocks[:2]) == 0:  # in finish()
                time.sleep(0.001)
            for number in range(1, 20):  # would otherwise be averaged with what it has later
                rule.after_step(rank, PARAMS, number)
        rule.finish(rank, PARAMS)
        return rule.weight

    assert synk.spmd(program) == [1 / 3] * RANKS


def test_no_rank_gets_further_ahead_than_the_staleness(step):
    def program(rank, staleness):
        rule, ahead = rules.SSP(staleness), []
        rule.start(rank, PARAMS)
        for number in range(1, 31):
            if rank.rank == 1:
                time.sleep(0.002 if number % 10 else 0.05)
            ahead.append(rank.clock - min(rank.clocks))
            rule.after_step(rank, PARAMS, number)
        rule.finish(rank, PARAMS)
        return max(ahead)

    for staleness in (0, 2):
        assert max(synk.spmd(program, staleness)) == staleness


class Changing(rules.EASGD):
    """Its hyper-parameters change at some steps of the rank."""

    def after_step(self, rank, params, step):
        for name, value in CHANGES.get(step, {}).items():
            setattr(self, name, value)
        super().after_step(rank, params, step)


class ChangingSimulation(Elastic):
    def __init__(self, alpha, period, momentum):
        super().__init__(alpha, period, momentum)
        self.hyper = [{"alpha": alpha, "period": period, "momentum": momentum} for _ in range(RANKS)]

    def take_step(self, rank, rows):
        self.alpha, self.period, self.momentum = self.hyper[rank].values()
        super().take_step(rank, rows)

    def exchange(self, rank, number):
        before = self.hyper[rank]["momentum"]
        self.hyper[rank].update(CHANGES.get(number, {}))
        self.alpha, self.period, self.momentum = self.hyper[rank].values()
        if before == 0 or self.momentum == 0:
            self.v[rank] = np.zeros(3)  # momentum begins with no velocity
        super().exchange(rank, number)


CHANGES = {
    10: {"alpha": 0.9},
    20: {"momentum": 0.3},
    30: {"momentum": 0},
    40: {"momentum": 0.4, "period": 1},
}


def test_hyper_parameters_may_change_while_a_rule_runs(step):
    order = order_of_exchanges(STEPS)
    real = synk.spmd(run_in_order, Changing(0.3, 2, 0.6), step, order)
    for (seen, _), (simulated, _) in zip(real, ChangingSimulation(0.3, 2, 0.6).run(order)):
        assert np.allclose(seen, simulated, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "make, error, message",
    [
        (lambda: rules.BSP(period=0), ValueError, "BSP: period: expected at least 1, got 0"),
        (lambda: rules.BSP(period=1.5), TypeError, "BSP: period: expected an int, got 1.5"),
        (lambda: rules.BSP(average="weights"), ValueError, "BSP: average: expected one of .'gradients'"),
        (lambda: rules.EASGD(alpha=2), ValueError, "EASGD: alpha: expected a number from 0 to 1, got 2"),
        (lambda: rules.EASGD(alpha=0), ValueError, "alpha: expected a number above 0"),
        (lambda: rules.EASGD(momentum=1), ValueError, "momentum: expected a number below 1"),
        (lambda: rules.Downpour(pull_period="1"), TypeError, "Downpour: pull_period: expected an int"),
        (lambda: rules.SSP(-1), ValueError, "SSP: staleness: expected at least 0, got -1"),
        (lambda: rules.GoSGD(1.1), ValueError, "GoSGD: probability: expected a number from 0 to 1"),
        (lambda: rules.DiLoCo(outer_momentum=-1), ValueError, "outer_momentum: expected at least 0"),
        (lambda: rules.DiLoCo(outer_learning_rate=None), TypeError, "expected a number, got None"),
    ],
)
def test_wrong_hyper_parameters_are_refused_in_words(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_gradients_are_averaged_only_if_the_rule_has_computed_them(step):
    def program(rank):
        rule = rules.BSP()
        rule.start(rank, PARAMS)
        step(rank, FEATURES, TARGETS, batch=10)
        rule.after_step(rank, PARAMS, 1)

    with pytest.raises((TypeError, synk.WorkerError), match="call it in place of rank.call"):
        synk.spmd(program)
