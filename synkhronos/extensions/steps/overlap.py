"""Gradients that are reduced while the ranks still compute others."""

from __future__ import annotations

from typing import Any

import synkhronos as synk
from synkhronos.engines.names import SharedVariable, Variable
from synkhronos.extensions.steps.plan import Plan


def overlapped(plan: Plan, wire: Any) -> list[tuple[SharedVariable, Variable, Any]]:
    """Return the updates of the first phase, in which the largest gradient vector is in buckets."""
    vectors = [
        shared
        for shared, new, _ in plan.row_updates
        if shared in plan.gradients and hasattr(new.tag, "filled_with")
    ]
    if not vectors:
        return plan.row_updates
    largest = max(vectors, key=lambda shared: shared.get_value(borrow=True).nbytes)
    [op] = [op for op, shareds in plan.reduced.items() if largest in shareds]
    return [
        (
            shared,
            synk.ops.in_buckets(shared, new.tag.filled_with, shared.tag.pieces, op, wire=wire)
            if shared is largest
            else new,
            slice_op,
        )
        for shared, new, slice_op in plan.row_updates
    ]
