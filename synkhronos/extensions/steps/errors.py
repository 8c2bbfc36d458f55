"""The errors that say why a step on all ranks could not equal the serial step, and what to do."""

from __future__ import annotations

from typing import Sequence

from synkhronos.engines.analysis.graphs import Dependence
from synkhronos.engines.analysis.windows import how_to_select, listed
from synkhronos.engines.names import HAS_MRG, Apply, Variable

_OPERATIONS = (
    "(shared, new, 'sum') adds up the changes of all ranks, 'min' and 'max' keep the least and the "
    "greatest value, and None lets each rank keep its own value. Inputs that are not rows, which every "
    "rank needs as a whole, are given in bcast_inputs"
)

_MARKED = (
    "train.gradients(loss, params) computes marked gradients, and train.gradients(expressions, params) "
    "marks those that grad() returned with further arguments, such as consider_constant"
)


def _of(target: Variable) -> str:
    """Return the name of a shared variable, or its type and shape, by which it may be recognized."""
    if target.name:
        return target.name
    return f"{target} of the shape {getattr(target.get_value(borrow=True), 'shape', None)}"


def nothing_divided(index: Sequence[Variable], whole: Sequence[Variable]) -> ValueError:
    """No variable differs from rank to rank; the values that replace `whole` depend on an index."""
    text = (
        "inputs: no input is divided among the ranks, so each of them would compute the whole step; "
        "give the rows of the minibatch as an input, or an index that selects them by a slice in "
        "givens, or name the shared variables that hold them as sliceable_shareds. If every rank should "
        "compute all of it, build it with synk.function()"
    )
    if whole:
        text += (
            f". What replaces {listed(whole)} in givens depends on {listed(index)}, but has no rows "
            f"that it selects. {how_to_select(listed(whole), listed(index))}"
        )
    return ValueError(text)


def mixed(target: Variable, local: Dependence, mask: int) -> ValueError:
    """An update uses gradients, and something else that differs from rank to rank."""
    return ValueError(
        f"updates: the new value of {_of(target)} uses a gradient or the loss, and besides depends on "
        f"{local.labels_in(mask)} in another way, which differs from rank to rank. If that is another "
        f"gradient, give its loss and its parameters as well, or mark it: {_MARKED}. Mark any other "
        f"expression with train.reduced(), to use its value over all ranks"
    )


def mixed_output(where: str, local: Dependence, mask: int) -> ValueError:
    """An output uses gradients, and something else that differs from rank to rank."""
    return ValueError(
        f"{where}: it uses a gradient, and besides depends on "
        f"{local.labels_in(mask)} in another way, which differs from rank to rank. Give it as "
        f"(variable, op) to have the ranks' values combined, or mark the other expression with "
        f"train.reduced()"
    )


def step_without_gradient(target: Variable, local: Dependence, mask: int) -> ValueError:
    """An update depends on the rows and on updated variables other than through known gradients."""
    return ValueError(
        f"updates: the new value of {_of(target)} depends on {local.labels_in(mask)}, but no gradient "
        f"of the loss was found in it, and the average of the ranks' new values is perhaps not the new "
        f"value for all rows. If it is a step along a gradient, give the loss and the parameters of "
        f"this gradient, or mark it: {_MARKED}. If it is a queue of rows, collect those of all ranks by "
        f"synk.ops.all_gather(rows). Otherwise say how to combine the values: (shared, new, 'avg') "
        f"averages them; {_OPERATIONS}"
    )


def sum_over_rows(target: Variable, local: Dependence, mask: int, is_summed: bool) -> ValueError:
    """An update that would have to be averaged is a sum over rows, or has an item for each row."""
    what = "is a sum over the rows" if is_summed else "has an item for each row"
    return ValueError(
        f"updates: the new value of {_of(target)} depends on {local.labels_in(mask)} and {what}, so "
        f"that the average of the ranks' values would not be the value for all rows. Take the mean over "
        f"the rows, or say how to combine the values: {_OPERATIONS}"
    )


def not_a_float(target: Variable, local: Dependence, mask: int) -> TypeError:
    """An update that would have to be averaged is an integer."""
    return TypeError(
        f"updates: the new value of {_of(target)}, {target.dtype}, depends on {local.labels_in(mask)}, "
        f"and the ranks' values cannot be averaged, as they are no floats. Say how to combine them: "
        f"{_OPERATIONS}"
    )


def not_a_tensor(target: Variable, local: Dependence, mask: int) -> TypeError:
    """An update that would have to be combined is not a tensor."""
    return TypeError(
        f"updates: the new value of {_of(target)}, {target.type}, depends on {local.labels_in(mask)}, "
        f"and only tensors can be combined over the ranks. Give (shared, new, None) to let each rank "
        f"keep its own value"
    )


def drawn_twice(target: Variable, local: Dependence, mask: int) -> ValueError:
    """An update is random, and the same numbers are used with the rows, where ranks draw others."""
    return ValueError(
        f"updates: the new value of {_of(target)} depends on random numbers, {local.labels_in(mask)}, "
        f"that the loss or another expression of each rank uses too, so they differ from rank to rank. "
        f"Give (shared, new, None) to let each rank keep its own value"
    )


def not_broadcast(target: Variable, local: Dependence, mask: int) -> TypeError:
    """An update is random, and the state of its stream is not an array."""
    remedy = "RandomStreams cannot do this; use MRG_RandomStreams, or give" if HAS_MRG else "Give"
    return TypeError(
        f"updates: the new value of {_of(target)} depends on random numbers, {local.labels_in(mask)}, "
        f"which every rank has to draw alike. {remedy} (shared, new, None) to let each rank keep its "
        f"own value"
    )


def unknown_penalty() -> ValueError:
    """A sum over ranks would contain a penalty once per rank."""
    return ValueError(
        "loss_op: the loss contains a term that is the same on every rank, which a sum over the ranks "
        "would contain once per rank, and the update rule does not use the gradients that "
        "grad(loss, params) returns, so that this term cannot be found in them. Use a rule that returns "
        "updates, or one that takes gradients"
    )


def changed_after_sum(node: Apply) -> ValueError:
    """A gradient is clipped, or changed in another way, that is a sum over the rows of a rank."""
    return ValueError(
        f"updates: a gradient is changed by {node.op}, such as by grad_clip(), where it is a sum over "
        f"the rows of one rank, and not over all rows as on one process. Change the gradient of a "
        f"parameter after the average over the ranks: leave out grad_clip() on the parameter, and use "
        f"T.clip(T.grad(loss, parameter), low, high) in the updates; give gradients= before this"
    )


def collective_of_other_loss(variable: Variable, built: str, loss_op: str) -> ValueError:
    """A gradient goes through a collective that is made for losses combined in another way."""
    return ValueError(
        f"loss_op: the loss uses the collective {variable.owner.op}, built with loss_op={built!r}, but "
        f"the step has loss_op={loss_op!r}, so that the gradients would not be the gradients of the "
        f"loss of all ranks; give both the same, as in synk.ops.all_reduce(x, loss_op={loss_op!r})"
    )
