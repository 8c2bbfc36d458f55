"""A world that logs its commands. It takes the place of `World` if the log is on when `fork` is called.

So logging costs nothing when it is off. Level ``info`` logs the start and the end of the workers,
``debug`` also each command on each rank.
"""

from __future__ import annotations

import logging
import os
import time

from synkhronos.engines.base import Engine
from synkhronos.host import log
from synkhronos.host.doctor import blas_kernels
from synkhronos.host.log import logger
from synkhronos.transports.base import Transport
from synkhronos.world.rank_state import Command, RankState
from synkhronos.world.world import World


class LoggedWorld(World):
    """Logs each command with the time that it took, including the wait for the workers."""

    n_commands = 0

    def _make_rank_state(self, transport: Transport, engine: Engine) -> LoggedRankState:
        return LoggedRankState(transport, engine)

    def _connect(self, transport: Transport, engine: Engine) -> None:
        super()._connect(transport, engine)
        log.set_rank(self.rank_state.rank)
        logger.info("%d process(es); this is the master, process %d", self.size, os.getpid())

    def work(self, transport: Transport) -> None:
        log.set_rank(transport.rank)
        logger.info("started as process %d", os.getpid())
        super().work(transport)

    def start(self) -> None:
        if self.started:
            return
        start = time.perf_counter()
        super().start()
        logger.info("%d worker(s) started in %s", self.size - 1, _since(start))
        if logger.isEnabledFor(logging.INFO):  # asking the libraries takes milliseconds
            logger.info("BLAS: %s", blas_kernels.describe_all(blas_kernels.loaded()))

    def run(self, command: Command) -> list:
        start = time.perf_counter()
        try:
            results = super().run(command)
        except BaseException as error:
            logger.debug(
                "%s: %s after %s", command.describe(self.rank_state), type(error).__name__, _since(start)
            )
            raise
        self.n_commands += 1
        logger.debug("%s: %s with all ranks", command.describe(self.rank_state), _since(start))
        return results

    def close(self) -> None:
        was_closed = self.closed
        super().close()
        if not was_closed:
            logger.info("closed after %d command(s)", self.n_commands)
            log.set_rank(None)


class LoggedRankState(RankState):
    """Logs each command that a worker executes, with the time that it took on this rank."""

    def execute(self, payload: bytes) -> bytes:
        start = time.perf_counter()
        reply = super().execute(payload)
        if self._last is not None:
            logger.debug("%s: %s", self.describe_last(), _since(start))
        return reply

    def failure(self, error: Exception) -> bytes:
        logger.debug("raised %s, which the master reports", type(error).__name__)
        return super().failure(error)


def _since(start: float) -> str:
    return f"{1e3 * (time.perf_counter() - start):.3f} ms"
