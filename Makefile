# Names that a person would guess; the work is done by the scripts named here.
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

bench:
	sh benchmarks/run

docs:
	sh docs/run

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis
