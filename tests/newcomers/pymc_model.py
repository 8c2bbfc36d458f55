"""The path of somebody with a PyMC model: as it is, and with its rows divided over two ranks."""

from steps import changed, follow

#: As one would write it with plain PyMC.
PLAIN = """
import numpy as np
import pymc as pm

random = np.random.default_rng(0)
x = random.normal(size=(2000, 3))
y = random.normal(x @ [1.0, -2.0, 0.5])
with pm.Model() as model:
    weights, sigma = pm.Normal("weights", shape=3), pm.HalfNormal("sigma")
    pm.Normal("y", x @ weights, sigma, observed=y)
found = pm.find_MAP(model=model, progressbar=False)
print(found["weights"].round(3), found["sigma"].round(3))
drawn = pm.sample(
    100, tune=200, chains=1, cores=1, model=model, random_seed=1, progressbar=False,
    compute_convergence_checks=False,
)
print(drawn.posterior["weights"].mean(("chain", "draw")).values.round(1))
"""
PARALLEL = changed(
    PLAIN,
    (
        "import pymc as pm\n",
        "import pymc as pm\nimport synkhronos as synk\n"
        "from synkhronos.extensions.pymc import parallelize\n\nsynk.fork(2)\n",
    ),
    ("found = pm.find_MAP", "model = parallelize(model)\nfound = pm.find_MAP"),
)


def path(newcomer):
    newcomer.install(("README.rst", "apt-get install g++"), ("docs/pymc.rst", "python3 -m venv env"))
    plain, _ = newcomer.run_script("plain.py", PLAIN)
    printed, complaints = newcomer.run_script("parallel.py", PARALLEL)
    assert plain.splitlines() == printed.splitlines() and len(plain.splitlines()) == 2, printed
    assert "SynkhronosWarning" not in complaints, complaints


if __name__ == "__main__":
    follow(path, __doc__)
