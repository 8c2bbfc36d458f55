# Shorter names for the commands of this project.
.PHONY: help env test lint demo bench docs clean

help:
	@echo "make env | test | lint | demo | bench | docs | clean"

env:
	sh tools/environment.sh

test:
	sh tests/run

lint: env
	.venv/bin/python -m ruff check .

demo:
	sh demos/run

bench: env
	.venv/bin/python benchmarks/run.py --plot

docs: env
	.venv/bin/python docs/pictures/draw.py
	.venv/bin/python -m sphinx -W --keep-going docs docs/_build

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
