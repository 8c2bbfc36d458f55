"""Windows of rows: slices of axis 0 in givens, whose bounds depend on inputs."""

from synkhronos.engines.names import (
    DimShuffle,
    Elemwise,
    Subtensor,
    Variable,
    ancestors,
    get_idx_list,
    tensor,
)


def cut_windows(givens, inputs):
    """See `synkhronos.engines.base.Engine.cut_windows`."""
    start, stop = tensor.lscalar("first_row"), tensor.lscalar("last_row")
    cut, lengths = [], []
    for old, new in givens:
        if any(one in inputs for one in _ancestors_of_slices(new)):
            lengths.append(new.shape[0])
            new = new[start:stop]
        cut.append((old, new))
    return (cut, [start, stop], lengths) if lengths else (givens, [], [])


def _ancestors_of_slices(variable):
    """Return the inputs of the slices of axis 0 from which a variable is computed row by row."""
    bounds, seen, stack = [], set(), [variable]
    while stack:
        node = getattr(stack.pop(), "owner", None)
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node.op, Elemwise):
            stack.extend(node.inputs)
        elif isinstance(node.op, DimShuffle) and node.op.new_order[:1] == (0,):
            stack.append(node.inputs[0])
        elif isinstance(node.op, Subtensor):
            rows = get_idx_list(node.inputs, node.op.idx_list)[0]
            if rows == slice(None):
                stack.append(node.inputs[0])
            elif isinstance(rows, slice):
                bounds += [one for one in (rows.start, rows.stop) if one is not None]
    return list(ancestors([one for one in bounds if isinstance(one, Variable)]))
