"""A deep Q-network that learns to walk to the goal of a small grid.

After V. Mnih et al., "Human-level control through deep reinforcement learning", 2015: an
epsilon-greedy policy, a replay memory, a target network that is a copy of some steps ago, clipped
errors, and RMSprop as in A. Graves, 2013 (arXiv:1308.0850). Every move is a call for a single state.
"""

import numpy as np
import synkhronos as synk
import theano
import theano.tensor as T
from synkhronos.extensions import train

SIDE, GOAL, MOVES = 4, (3, 3), [(0, 1), (1, 0), (0, -1), (-1, 0)]
DISCOUNT, COPY_EVERY, MOVES_A_STEP = 0.8, 10, 4
random = np.random.RandomState(4)


def shared(value):
    return theano.shared(np.asarray(value, theano.config.floatX))


class Network:
    def __init__(self, n_hidden=32):
        self.W, self.b = shared(random.normal(0, 0.3, (SIDE**2, n_hidden))), shared(np.zeros(n_hidden))
        self.V, self.c = shared(random.normal(0, 0.1, (n_hidden, 4))), shared(np.zeros(4))
        self.params = [self.W, self.b, self.V, self.c]

    def __call__(self, states):
        return T.dot(T.nnet.relu(T.dot(states, self.W) + self.b), self.V) + self.c


class Grid:
    """Each move costs 1, until the goal is reached."""

    def __init__(self):
        self.position = (0, 0)

    def state(self):
        return np.eye(SIDE**2, dtype=theano.config.floatX)[self.position[0] * SIDE + self.position[1]]

    def move(self, action):
        """Return the reward, and whether the episode has ended; then begin another one."""
        moved = np.add(self.position, MOVES[action])
        self.position = tuple(np.clip(moved, 0, SIDE - 1))
        return -1, self.position == GOAL


def rmsprop(loss, params, rate=0.01, decay=0.9):
    updates = []
    for param, gradient in zip(params, T.grad(loss, params)):
        mean, square = shared(param.get_value() * 0), shared(param.get_value() * 0)
        new_mean = decay * mean + (1 - decay) * gradient
        new_square = decay * square + (1 - decay) * gradient**2
        scaled = gradient / T.sqrt(new_square - new_mean**2 + 0.01)
        updates += [(mean, new_mean), (square, new_square), (param, param - rate * scaled)]
    return updates


def main(steps=40, batch_size=33):
    synk.fork()
    states, next_states, rewards = T.matrix("states"), T.matrix("next_states"), T.vector("rewards")
    actions, ends = T.ivector("actions"), T.vector("ends")
    network, target = Network(), Network()
    values = network(states)
    best_next = target(next_states).max(axis=1)
    wanted = rewards + DISCOUNT * (1 - ends) * best_next
    error = abs(wanted - values[T.arange(actions.shape[0]), actions])
    loss = T.switch(error < 1, 0.5 * error**2, error - 0.5).mean()

    inputs, updates = [states, actions, rewards, next_states, ends], rmsprop(loss, network.params)
    train_step = train.parallel_function(inputs, loss, updates=updates)
    copies = list(zip(target.params, network.params))
    copy_to_target = synk.function([], updates=copies)
    best_action = theano.function([states], values.argmax(axis=1))

    grid, memory, losses = Grid(), [], []
    copy_to_target()
    while len(losses) < steps:
        state = grid.state()
        is_random = random.uniform() < max(0.1, 1 - len(memory) / 200)
        action = random.randint(4) if is_random else best_action(state[None])[0]
        reward, is_end = grid.move(action)
        memory.append((state, action, reward, grid.state(), is_end))
        if is_end:
            grid = Grid()
        if len(memory) >= 50 and len(memory) % MOVES_A_STEP == 0:
            chosen = [memory[i] for i in random.randint(len(memory), size=batch_size)]
            columns = zip(inputs, zip(*chosen))
            losses.append(float(train_step(*(np.array(each, one.dtype) for one, each in columns))))
            if len(losses) % COPY_EVERY == 0:
                copy_to_target()
    return losses


if __name__ == "__main__":
    from show import show

    show(main, "loss")
