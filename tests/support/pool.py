"""The functions of the stateful tests, each as NumPy code and as a graph."""

import numpy as np
from compilers import compiler, tt
from model import Formula

import synkhronos as synk

# Shared variables: FIXED ones keep their shape, RAGGED ones may have any number of rows.

FIXED = {
    "w": np.array([0.5, -0.25, 1], "float32"),
    "largest": np.zeros(3, "float32"),
    "last": np.zeros(3, "float32"),
    "count": np.array(1, "int64"),
    "hits": np.zeros(2),
    "table": np.arange(8.0),
    "large": np.zeros((130, 130), "float32"),  # as wire formats are for
}
RAGGED = {
    "a": np.zeros((3, 2)), "matrix": np.zeros((2, 3), "float32"), "vector": np.zeros(4),
    "long": np.zeros(3, "int64"), "byte": np.zeros(2, "uint8"),
}  # fmt: skip
STARTS = {**FIXED, **RAGGED, "late": np.array(2, "float32")}


def variables():
    """Return a dictionary of the inputs of all functions."""
    return {"x": tt.fmatrix("x"), "y": tt.ivector("y"), "scale": tt.fscalar("scale")}


def formulas():
    """Return a dictionary of the functions' computations in NumPy."""

    def reductions(i, s):
        x, y, scale = i["x"], i["y"], i["scale"]
        return [
            (x * scale).mean(0), x.sum(0), y.sum(), np.prod(1 + abs(x) / 1024, 0), x.min(0), y.max(),
            x * y[:, None] + scale, len(x), np.square(x).sum(),
        ], {}  # fmt: skip

    def training(i, s):
        x, scale = i["x"], i["scale"]
        return [(x * s["w"]).mean()], {
            "w": s["w"] / 2 + scale * x.mean(0),
            "count": s["count"] + len(x),
            "largest": np.maximum(s["largest"] / 2, x.max(0)),
            "last": x[-1],
        }

    def look_up(i, s):
        return [s["table"][i["y"]].sum()], {"hits": s["hits"] + 1}

    def sliceable(i, s):
        return [s["a"], (s["a"] + s["w"][0]).mean(0), s["a"].sum(0), s["a"].max()], {
            "count": s["count"] + len(s["a"])
        }

    def both(i, s):
        return [(i["x"][:, :2] * s["a"]).mean(), i["x"][:, :2] - s["a"]], {}

    def whole(i, s):
        outputs = [s["w"] * i["scale"], *(s[name].sum() for name in RAGGED)]
        return outputs, {"hits": s["hits"] / 2, "large": s["large"] / 2}

    def late(i, s):
        return [i["x"].sum() * s["late"] + s["w"].sum()], {"late": s["late"] / 2 + 1}

    f4, f8, i8 = "float32", "float64", "int64"
    x, y, scale = ("x",), ("y",), ("scale",)
    return {
        one.name: one
        for one in (
            Formula(
                "reductions", x + y, scale, (),
                ["avg", "sum", "sum", "prod", "min", "c_max", "gather", None, "c_sum"],
                [f4, f4, i8, f4, f4, "int32", "float64", i8, f4], {}, reductions,
            ),
            Formula(
                "training", x, scale, (), ["avg"], [f4],
                {"w": "avg", "count": "sum", "largest": "max", "last": None}, training,
            ),
            Formula("look_up", y, (), (), ["sum"], [f8], {"hits": "avg"}, look_up, True),
            Formula(
                "sliceable", (), (), ("a",), ["gather", "avg", "sum", "max"], [f8] * 4, {"count": "max"},
                sliceable,
            ),
            Formula("both", x, (), ("a",), ["avg", "gather"], [f8] * 2, {}, both),
            Formula(
                "whole", (), scale, (), ["avg", "sum", "avg", "sum", "sum", "sum"],
                [f4, f8, f4, f8, i8, "uint64"], {"hits": "avg", "large": "max"}, whole,
            ),
            Formula("late", x, (), (), ["sum"], [f4], {"late": "avg"}, late, True),
        )
    }  # fmt: skip


FORMULAS = formulas()


class Graphs:
    """The same functions as Theano graphs. The graphs are built once, the functions in every world."""

    def __init__(self):
        self.inputs = variables()
        self.shared = {name: compiler.shared(value, name) for name, value in STARTS.items()}
        x, y, scale = self.inputs.values()
        s = self.shared
        w, a = s["w"], s["a"]
        self.outputs = {
            "reductions": [
                (x * scale).mean(axis=0), x.sum(axis=0), y.sum(), tt.prod(1 + abs(x) / 1024, axis=0),
                x.min(axis=0), y.max(), x * y.dimshuffle(0, "x") + scale, x.shape[0], tt.sqr(x).sum(),
            ],
            "training": [(x * w).mean()],
            "look_up": [s["table"][y].sum()],
            "sliceable": [a, (a + w[0]).mean(axis=0), a.sum(axis=0), a.max()],
            "both": [(x[:, :2] * a).mean(), x[:, :2] - a],
            "whole": [w * scale, *(s[name].sum() for name in RAGGED)],
            "late": [x.sum() * s["late"] + w.sum()],
        }  # fmt: skip
        self.updates = {
            "training": {
                "w": w / 2 + scale * x.mean(axis=0),
                "count": s["count"] + x.shape[0],
                "largest": tt.maximum(s["largest"] / 2, x.max(axis=0)),
                "last": x[-1],
            },
            "look_up": {"hits": s["hits"] + 1},
            "sliceable": {"count": s["count"] + a.shape[0]},
            "whole": {"hits": s["hits"] / 2, "large": s["large"] / 2},
            "late": {"late": s["late"] / 2 + 1},
        }

    def function(self, name):
        formula = FORMULAS[name]
        outputs = list(zip(self.outputs[name], formula.ops))
        return synk.function(
            [self.inputs[one] for one in formula.inputs],
            outputs[0] if formula.single else outputs,
            bcast_inputs=[self.inputs[one] for one in formula.bcast],
            updates=[
                (self.shared[one], new, formula.updates[one])
                for one, new in self.updates.get(name, {}).items()
            ],
            sliceable_shareds=[self.shared[one] for one in formula.sliceable],
            name=name,
        )
