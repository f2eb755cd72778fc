PYTHON := .venv/bin/python

.PHONY: setup train test lint

setup:
	@bash .ci/bootstrap

# glibc then asks for huge pages, which XLA's temporaries gain from; others ignore it.
train: setup
	GLIBC_TUNABLES=glibc.malloc.hugetlb=1 $(PYTHON) -m mlm_jax.train --config=configs/austen.py --workdir=runs/austen

test: lint
	$(PYTHON) -m pytest -q

lint: setup
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy
