"""The causes for which a step on all ranks does not equal the serial step, in one table.

The text of a cause says what was found, why it matters, and what to write.
"""

from __future__ import annotations

from typing import Any, Sequence

from synkhronos.engines.analysis.graphs import Dependence
from synkhronos.engines.analysis.windows import how_to_select, listed
from synkhronos.engines.names import HAS_MRG, Variable

_OPERATIONS = (
    "(shared, new, 'sum') adds up the changes of all ranks, 'min' and 'max' keep the least and the "
    "greatest value, and None lets each rank keep its own value. Inputs that are not rows, which every "
    "rank needs as a whole, are given in bcast_inputs"
)
_MARKED = (
    "train.gradients(loss, params) computes marked gradients, and train.gradients(expressions, params) "
    "marks those that grad() returned with further arguments, such as consider_constant"
)
_NEW = "updates: the new value of {target}"
_NOT_AVERAGED = (
    ", so that the average of the ranks' values would not be the value for all rows. Take the mean over "
    "the rows, or say how to combine the values: " + _OPERATIONS
)
_REMEDY_OF_STREAMS = (
    "RandomStreams cannot do this; use MRG_RandomStreams, or give" if HAS_MRG else "Give"
)
_DIFFERS = ", so that the step differs from the serial one: "

#: {target} is an updated variable; {sources} are the inputs and variables that differ from rank to rank.
TEXTS = {
    "nothing divided": "inputs: no input is divided among the ranks, so each of them would compute the "
    "whole step; give the rows of the minibatch as an input, or an index that selects them by a slice "
    "in givens, or name the shared variables that hold them as sliceable_shareds. If every rank should "
    "compute all of it, build it with synk.function(){selected}",
    "nothing selected": ". What replaces {whole} in givens depends on {index}, but has no rows that it "
    "selects. {remedy}",
    "mixed": _NEW + " uses a gradient or the loss, and besides depends on {sources} in another way, "
    "which differs from rank to rank. If that is another gradient, give its loss and its parameters as "
    f"well, or mark it: {_MARKED}. Mark any other expression with train.reduced(), to use its value "
    "over all ranks",
    "mixed output": "{where}: it uses a gradient, and besides depends on {sources} in another way, "
    "which differs from rank to rank. Give it as (variable, op) to have the ranks' values combined, or "
    "mark the other expression with train.reduced()",
    "no gradient": _NEW + " depends on {sources}, but no gradient of the loss was found in it, and the "
    "average of the ranks' new values is perhaps not the new value for all rows. If it is a step along "
    f"a gradient, give the loss and the parameters of this gradient, or mark it: {_MARKED}. If it is a "
    "queue of rows, collect those of all ranks by synk.ops.all_gather(rows). Otherwise say how to "
    f"combine the values: (shared, new, 'avg') averages them; {_OPERATIONS}",
    "sum over rows": _NEW + " depends on {sources} and is a sum over the rows" + _NOT_AVERAGED,
    "item of rows": _NEW + " depends on {sources} and has an item for each row" + _NOT_AVERAGED,
    "not a float": _NEW + ", {dtype}, depends on {sources}, and the ranks' values cannot be "
    f"averaged, as they are no floats. Say how to combine them: {_OPERATIONS}",
    "not a tensor": _NEW + ", {type}, depends on {sources}, and only tensors can be combined over "
    "the ranks. Give (shared, new, None) to let each rank keep its own value",
    "drawn twice": _NEW
    + " depends on random numbers, {sources}, that the loss or another expression of "
    "each rank uses too, so they differ from rank to rank. Give (shared, new, None) to let each rank "
    "keep its own value",
    "not broadcast": _NEW + " depends on random numbers, {sources}, which every rank has to draw alike. "
    f"{_REMEDY_OF_STREAMS} (shared, new, None) to let each rank keep its own value",
    "unknown penalty": "loss_op: the loss contains a term that is the same on every rank, which a sum "
    "over the ranks would contain once per rank, and the update rule does not use the gradients that "
    "grad(loss, params) returns, so that this term cannot be found in them. Use a rule that returns "
    "updates, or one that takes gradients",
    "changed after sum": "updates: a gradient is changed by {op}, such as by grad_clip(), where it is a "
    "sum over the rows of one rank, and not over all rows as on one process. Change the gradient of a "
    "parameter after the average over the ranks: leave out grad_clip() on the parameter, and use "
    "T.clip(T.grad(loss, parameter), low, high) in the updates; give gradients= before this",
    "other loss_op": "loss_op: the loss uses the collective {op}, built with loss_op={built!r}, but the "
    "step has loss_op={loss_op!r}, so that the gradients would not be the gradients of the loss of all "
    "ranks; give both the same, as in synk.ops.all_reduce(x, loss_op={loss_op!r})",
    # Warnings
    "sum and mean": "loss_op: the loss {loss} adds a sum over the rows and a mean over the rows, of "
    f"which one has to be added up over the ranks and the other averaged{_DIFFERS}divide the sum by the "
    "number of rows, as in losses.mean() or losses.sum() / x.shape[0]",
    "sum averaged": "loss_op: the loss {loss} is a sum over the rows, perhaps divided by a fixed "
    f"number, and the gradients of the ranks are averaged{_DIFFERS}give loss_op='sum', or take the mean "
    "over the rows",
    "mean added": "loss_op: the loss {loss} is a mean over the rows, and the gradients of the ranks are "
    f"added up{_DIFFERS}leave out loss_op='sum', or take the sum over the rows",
    "output added": "loss_op: outputs[{position}] is a loss, whose values are added up over the ranks, "
    f"and loss_op='avg' averages its gradients{_DIFFERS}give loss_op='sum'; if the loss is a mean over "
    "the rows, leave out the operation of the output",
}


def refusal(
    cause: str,
    target: Variable | None = None,
    local: Dependence | None = None,
    mask: int = 0,
    **names: Any,
) -> Exception:
    """Return the error of a cause; the sources that differ are those of `local` in a mask."""
    if target is not None:  # without a name, it may be recognized by its shape
        shape = getattr(target.get_value(borrow=True), "shape", None)
        names["target"] = target.name or f"{target} of the shape {shape}"
        names.update(type=target.type, dtype=getattr(target, "dtype", None))
    if local is not None:
        names["sources"] = local.labels_in(mask)
    kind = TypeError if cause in ("not a float", "not a tensor", "not broadcast") else ValueError
    return kind(TEXTS[cause].format(**names))


def nothing_divided(index: Sequence[Variable], whole: Sequence[Variable]) -> Exception:
    """No variable differs from rank to rank; the values that replace `whole` depend on an index."""
    names = {"whole": listed(whole), "index": listed(index)}
    remedy = how_to_select(names["whole"], names["index"])
    selected = TEXTS["nothing selected"].format(remedy=remedy, **names) if whole else ""
    return refusal("nothing divided", selected=selected)
