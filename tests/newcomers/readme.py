"""The path of somebody who reads only the README: install, doctor, its examples, the first demo."""

from steps import ROOT, examples, follow


def path(newcomer):
    newcomer.install(("README.rst", "apt-get install g++"), ("README.rst", "python3 -m venv env"))
    for number, (code, output) in enumerate(examples("README.rst")):
        printed, complaints = newcomer.run_script(f"example_{number}.py", code)
        assert printed == output, printed
        assert "Warning" not in complaints, complaints
    printed, _ = newcomer.run(str(ROOT / "demos" / "demo_1.py"))
    assert "rank" in printed or "process" in printed, printed


if __name__ == "__main__":
    follow(path, __doc__)
