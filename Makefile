PYTHON := .venv/bin/python

.PHONY: setup train test lint

setup:
	@bash .ci/bootstrap

train: setup
	$(PYTHON) -m mlm_jax.train --config=configs/austen.py --workdir=runs/austen

test: lint
	$(PYTHON) -m pytest -q -n 2 --dist loadfile

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
