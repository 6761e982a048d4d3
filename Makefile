# PYTHON makes the virtual environments under .venvs; any Python >= 3.10 will do.
PYTHON ?= python3

.PHONY: help demo test lint peers clean

help:
	@echo "make demo    train, evaluate and reload a recommendation model here (under 2 minutes once installed)"
	@echo "make test    every test, on every MPI and number of ranks (about 15 minutes on two cores)"
	@echo "             a part: make test TEST=\"--only unit\"; the kinds of parts: TEST=\"--help\""
	@echo "make lint    ruff and mypy"
	@echo "make peers   an environment with the projects that benchmarks compare with (600 MB)"
	@echo "make clean   remove caches and build products (.venvs and .data stay)"

demo:
	@$(PYTHON) -m tools.demo

test:
	@$(PYTHON) -m tools.test $(TEST)

lint:
	@$(PYTHON) -m tools.test --only lint

peers:
	@$(PYTHON) -m tools.set_up peers

clean:
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .scratch
	find mpifleet tools tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
