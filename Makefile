# `make demo` and `make test` are all that is needed on a fresh machine; both set up what they use.

PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/installed
FOR_DEMO := .venv/installed-for-demo
SPEECHBRAIN := .venv/speechbrain
SCOREBOARD := .venv/scoreboard
TRACKERS := .venv/trackers
EXTRAS := demo,dev,docs,integrations,metrics,mirror,report,stacks,torch
PIP := python -m pip install --quiet --disable-pip-version-check
TORCH ?= 2.11.0
OTHER := .venv/torch-$(TORCH)

.PHONY: demo test check docs fast gpu gpu-figures speechbrain trackers scoreboard other-torch benchmarks clean

# All that is installed serves the demo too; it needs less than a tenth of it beside torch.
demo: $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(FOR_DEMO))  ## train the main job through real faults, and check every promise
	$(BIN)/python -m recipes.demo

# The slow ones apart: with the frameworks that they import each fork of the others would take twice as long.
# They kill, stop and starve real processes. A machine that stalls for some seconds can fail one of them, so those that
# failed run once more, alone. A test that fails twice is a failure, and the output shows both runs.
test: check fast speechbrain  ## all gates and all tests, the slow ones too
	$(BIN)/pytest -m slow -n 2 --dist worksteal || $(BIN)/pytest -m slow --last-failed --last-failed-no-failures none

fast: $(INSTALLED)  ## the tests that take seconds
	$(BIN)/pytest -n 2 --dist worksteal

check: $(INSTALLED)  ## lint, format, types, floors
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports

docs: $(INSTALLED)  ## build the site into site/; a broken link or anchor is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

gpu: $(INSTALLED)  ## tests that need a CUDA machine; skipped, by name, elsewhere
	$(BIN)/pytest -m "" tests/gpu

gpu-figures: $(INSTALLED)  ## measure what needs a CUDA machine, synchronisations of a step too
	$(BIN)/python -m benchmarks.run_all --only gpu.

speechbrain: $(SPEECHBRAIN)/installed  ## the tests of the SpeechBrain integration, with its packages beside the others
	PYTHONPATH=$(CURDIR)/$(SPEECHBRAIN) $(BIN)/pytest -m "" tests/integrations/test_speechbrain.py
	PYTHONPATH=$(CURDIR)/$(SPEECHBRAIN) $(BIN)/pytest -m "" tests/integrations/test_kill_matrix.py -k speechbrain

# The real packages. torchaudio's compiled part fits one build of torch, and it imports without it.
$(SPEECHBRAIN)/installed: $(INSTALLED)
	rm -rf $(SPEECHBRAIN)
	$(BIN)/$(PIP) -c constraints.txt --no-deps --target $(SPEECHBRAIN) \
		speechbrain torchaudio hyperpyyaml ruamel.yaml sentencepiece
	rm $(SPEECHBRAIN)/torchaudio/lib/*.so
	@touch $@

trackers: $(TRACKERS)/installed  ## the tests of W&B, MLflow and trackio, with these packages beside the others
	PYTHONPATH=$(CURDIR)/src $(TRACKERS)/bin/python -m pytest -m "" -n 2 --dist worksteal tests/faults/test_trackers.py

# An environment of its own that also sees the packages of the other one. With W&B installed there, frameworks would log to it.
$(TRACKERS)/installed: $(INSTALLED)
	$(BIN)/python -m venv --clear --without-pip $(TRACKERS)
	$(BIN)/python -c 'import site; print(site.getsitepackages()[0])' \
		> "$$($(TRACKERS)/bin/python -c 'import site; print(site.getsitepackages()[0])')/others.pth"
	$(BIN)/python -m pip --python $(TRACKERS)/bin/python install --quiet --disable-pip-version-check \
		wandb==0.31.0 mlflow-skinny==3.17.2 trackio==0.43.0
	@touch $@

other-torch:  ## all tests with another torch, beside the others; gigabytes: make other-torch TORCH=2.15.0
	$(PYTHON) -m venv $(OTHER)
	grep -v '^torch==' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/$(PIP) -c $(OTHER)/constraints.txt torch==$(TORCH) -e '.[$(EXTRAS)]'
	$(OTHER)/bin/pytest -m "" -n 2 --dist worksteal

benchmarks: $(INSTALLED)  ## measure every figure in the README again; takes some hours
	$(BIN)/python -m benchmarks.run_all

scoreboard: $(SCOREBOARD)/installed  ## put every framework to `holdfast chaos`, alone and with holdfast; takes about ten minutes
	PYTHONPATH=$(CURDIR)/$(SCOREBOARD) $(BIN)/python -m evals.scoreboard

# As for SpeechBrain: torchvision, which Composer imports, does without its compiled part too.
$(SCOREBOARD)/installed: $(INSTALLED)
	rm -rf $(SCOREBOARD)
	$(BIN)/$(PIP) -c constraints.txt --no-deps --target $(SCOREBOARD) \
		speechbrain torchaudio hyperpyyaml ruamel.yaml sentencepiece torchdata==0.11.0 mosaicml==0.32.1 mosaicml-cli==0.8.3 \
		torchvision==0.28.0 torch_optimizer==0.3.0 pytorch_ranger==0.1.1 coolname==5.0.0 argcomplete==3.7.2 arrow==1.4.0 \
		backoff==2.2.1 gql==4.4.0 graphql-core==3.3.2 tenacity==9.2.1 anyio==4.16.0 importlib_metadata==8.9.0 zipp==4.1.2 \
		py-cpuinfo==9.0.0 questionary==2.1.1 prompt_toolkit==3.0.53 tabulate==0.10.0 termcolor==3.3.0 validators==0.36.0 \
		websockets==17.4
	rm $(SCOREBOARD)/torchaudio/lib/*.so $(SCOREBOARD)/torchvision/*.so
	: > $(SCOREBOARD)/torchvision/_meta_registrations.py
	@touch $@

# The environment is made anew when what goes into it has changed.
$(FOR_DEMO): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "holdfast needs Python 3.11 or later; $(PYTHON) is older. Fix: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	$(PYTHON) -m venv --clear .venv
	$(BIN)/$(PIP) -c constraints.txt -e '.[demo,report,torch]'
	@touch $@

$(INSTALLED): $(FOR_DEMO)
	$(BIN)/$(PIP) -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

clean:  ## remove what make has made
	rm -rf .venv demo dist build site
