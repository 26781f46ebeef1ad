# Sets itself up: a folder with nothing but a pinned tox, which makes the rest.
# Extra arguments: make demo ARGS="--corpus notes/", make test ARGS="-k ledger", make bench ARGS="tool-pause --repeats 5".

PYTHON ?= python3
TOX := .venv/bin/tox run
ARGS ?=

.PHONY: demo test bench lint type lower latest clean

demo: .venv/ready
	$(TOX) -qq -e test -- pancake demo $(ARGS)

test: .venv/ready
	$(TOX) -e test -- pytest $(ARGS)

bench: .venv/ready
	$(TOX) -qq -e test -- pancake bench $(ARGS)

lint type lower latest: .venv/ready
	$(TOX) -e $@

.venv/ready: requirements/tox.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, got $$($(PYTHON) -V); try: make PYTHON=python3.12 ..." >&2; exit 1; }
	$(PYTHON) -m venv --clear .venv
	.venv/bin/python -m pip install --quiet --no-deps -r requirements/tox.lock
	@touch $@

clean:
	rm -rf .venv .tox dist build
