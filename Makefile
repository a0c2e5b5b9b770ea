# Two commands do everything on a fresh machine: `make reproduce` and `make test`. Plain `make` explains.
SHELL := /bin/sh
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
# Sees everything in VENV, and keeps what it adds to itself.
PEERS := $(VENV)/peers
PAGE := _build/html/index.html
SCORES := _build/html/nbs/810_scoreboard.html
LOGS := _build/logs
PIP := -m pip install -qq --progress-bar off --disable-pip-version-check --root-user-action ignore -c constraints.txt
# BOOK=0 leaves the book out of `make reproduce`.
BOOK ?= 1

.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup reproduce test lint unit book pages pdf chapter export changelog data serve bench peers clean

help:
	@echo "make reproduce  set up, train two runs, print one screen of verdicts, build the book (BOOK=0 skips it)"
	@echo "make test       set up, then every check: lint, types, book with its notebooks, unit and browser tests"
	@echo "make book       build the book: every chapter runs, every warning is an error"
	@echo "make pages      build the book, running only chapters whose code, library or ledger changed"
	@echo "make pdf        print the built book into one PDF, through Chromium"
	@echo "make chapter N=260  export, then run and render that one chapter"
	@echo "make export     format and clean the chapters, and write pcl/ from them"
	@echo "make changelog  move the fragments in changes/ into CHANGELOG.md, at a release"
	@echo "make data       get CIFAR-10 and the human labels of CIFAR-10H, for the chapters and tests on images"
	@echo "make serve      serve the built book on http://127.0.0.1:8000"
	@echo "make bench      time the library against its peers in one run, and record the ratios"
	@echo "make peers      compare with lightly, transformers and MAPIE, installed apart, and record it"
	@echo "make clean      remove everything that was built, the virtual environment included"

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "Missing: $(PYTHON). Install Python 3.11 or newer, or name one: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Missing: Python 3.11 or newer; $(PYTHON) is `$(PYTHON) --version 2>&1`. Name another: make PYTHON=/path/to/python3"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "Missing: Python's venv module with pip. On Debian or Ubuntu: apt install python3-venv"; exit 1; }
	$(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV), two minutes"
	@$(BIN)/python $(PIP) torch
	@$(BIN)/python $(PIP) -e '.[train,images,heads,onnx,book,dev]'
	@touch $(READY)

# The book is built whatever the live runs say; their word is the exit code.
reproduce: $(READY)
	@mkdir -p $(LOGS)
	@$(BIN)/python -m pcl.cli data cifar10h >$(LOGS)/data.log 2>&1 || echo "no CIFAR-10H here ($(LOGS)/data.log): chapters on images show generated ones, and say so"
	@code=0; $(BIN)/python -m pcl.cli reproduce || code=$$?; \
	if [ "$(BOOK)" != 0 ]; then \
	  $(BIN)/python book/pcl_quiet.py $(LOGS)/book.log $(BIN)/jupyter-book build -W --keep-going --all . || exit 1; \
	  echo "Open $(CURDIR)/$(SCORES)"; \
	fi; exit $$code

book: $(READY)
	$(BIN)/jupyter-book build -W --keep-going --all .
	@echo "The book is at $(CURDIR)/$(PAGE)"

pages: $(READY)
	PCL_REUSE=1 $(BIN)/jupyter-book build -W --keep-going .
	@echo "The book is at $(CURDIR)/$(PAGE)"

pdf: $(READY) $(PAGE)
	$(BIN)/python book/pcl_pdf.py

export: $(READY)
	$(BIN)/ruff format -q nbs
	$(BIN)/nbdev_clean
	$(BIN)/nbdev_export
	$(BIN)/python book/pcl_docstrings.py
	$(BIN)/python book/pcl_front.py

chapter: $(READY)
	@$(BIN)/python book/pcl_chapter.py --find $(N)
	@$(MAKE) --no-print-directory export
	@$(BIN)/python book/pcl_chapter.py $(N)

changelog: $(READY)
	$(BIN)/python book/pcl_changelog.py

lint: $(READY)
	$(BIN)/python -m ruff check pcl tests benchmarks book examples
	$(BIN)/python -m mypy

# Two processes, a file of tests at a time, and one thread in each: more threads than
# cores fight over them.
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile

test: lint book unit

data: $(READY)
	$(BIN)/python -m pcl.cli data cifar10h

serve: $(PAGE)
	$(BIN)/python -m http.server --bind 127.0.0.1 --directory _build/html 8000

$(PAGE):
	@$(MAKE) --no-print-directory book

bench: $(READY)
	$(BIN)/python -m benchmarks

peers: $(READY)
	@$(PYTHON) -m venv $(PEERS)
	@site='import sysconfig; print(sysconfig.get_path("purelib"))'; \
	$(BIN)/python -c "$$site" > "`$(PEERS)/bin/python -c "$$site"`/base.pth"
	@$(PEERS)/bin/python $(PIP) -e '.[peers]'
	$(PEERS)/bin/python -W ignore -m benchmarks.peers

clean:
	rm -rf $(VENV) _build build reference .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
