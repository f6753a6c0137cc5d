# On a fresh machine `make demo` or `make test` sets up everything; it needs Python 3.11+, git, make.

SHELL := /bin/bash
BIN := .venv/bin
OVER_TLS := $(if $(TLS),QMQ_TEST_TLS=1 )
# Folders and files whose tests need no program beside Python.
QUICK := tests/format tests/broker/[a-z]*/ tests/storage/[a-z]*/ tests/net/[a-z]*/ tests/sim/test_disk.py tests/test_names.py tests/test_errors.py \
	tests/test_imports.py tests/test_settings.py tests/test_public_surface.py tests/test_types.py tests/test_durations.py
.DEFAULT_GOAL := help
.PHONY: help env env-spark env-hdfs env-ops env-console env-sql console-pictures demo serve check test test-pythons coverage lint bench sim fuzz errors kills consumer-kills faults soak mutants bench-peers bench-history docs

help:  ## show this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

env: .venv/ready  ## make .venv with the qmq command
.venv/ready: pyproject.toml requirements.lock
	@scripts/make-env

env-spark: .venv/spark-ready  ## add Spark to .venv, for archives and tests; installs Java if there is none
.venv/spark-ready: .venv/ready requirements-spark.lock
	@scripts/make-spark-env

env-hdfs: .venv/hdfs-ready  ## fetch the servers of HDFS, for the tests; installs Maven if there is none
.venv/hdfs-ready: .venv/spark-ready scripts/hdfs/pom.xml
	@scripts/make-hdfs-env

env-ops: .venv/ops-ready  ## add what checks the files of ops/ to .venv; installs systemd-analyze if there is none
.venv/ops-ready: .venv/ready requirements-ops.lock
	@scripts/make-ops-env

env-console: .venv/console-ready  ## add what clicks through the console to .venv; installs Chromium if there is none
.venv/console-ready: .venv/ready requirements-console.lock
	@scripts/make-console-env

env-sql: .venv/sql-ready  ## add database drivers to .venv, for the tests; installs PostgreSQL and MariaDB if there are none
.venv/sql-ready: .venv/ready requirements-sql.lock
	@scripts/make-sql-env

demo: env  ## run a broker, real orders through it, and show the result (ARGS=... for examples/demo.py)
	@$(BIN)/python -m examples.demo $(ARGS)

serve: env  ## run a broker on ./qmq-data (ARGS=... for qmq serve)
	@exec $(BIN)/qmq serve $(ARGS)

lint: env-spark  ## run ruff and mypy
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: .venv-docs/ready  ## build the site of all documents into build/site; a dead link is an error
	@NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict
	@echo "the site begins at build/site/index.html; to search it: python3 -m http.server --directory build/site"

.venv-docs/ready: .venv/ready requirements-docs.lock
	@scripts/make-docs-env

check: env  ## ruff, mypy and the tests of rules, storage and wire: a quick loop that needs only Python (ARGS=... for pytest)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy qmq examples fuzz
	$(BIN)/pytest --quiet --no-header --numprocesses 3 --dist worksteal -m "not no_cover" $(QUICK) $(ARGS)

test: lint docs env-hdfs env-ops env-console env-sql  ## lint, then run every test, four at a time, since many wait (ARGS=... for pytest)
	@scripts/compile-tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest --numprocesses 4 --dist worksteal $(ARGS)

test-pythons:  ## run a fast part of the tests on each of Python 3.11 to 3.13 (PYTHONS="3.12" for some, ARGS=... for pytest)
	@PYTHONS="$(PYTHONS)" scripts/test-pythons $(ARGS)

coverage: env-hdfs env-ops env-console env-sql  ## run every test, and list the lines that none runs (ARGS=... for pytest)
	$(BIN)/pytest --numprocesses 2 --dist worksteal --cov --cov-report=term $(ARGS)

bench: env  ## measure its speed on this machine (ARGS=... for qmq bench)
	@$(BIN)/qmq bench $(ARGS)

bench-peers: .venv-peers/ready  ## measure QMQ beside other brokers: PEERS=kafka,redis WORK=move,latency ROUNDS=3 (ARGS=...)
	@.venv-peers/bin/python -m bench.peers run --peers "$(PEERS)" --work "$(WORK)" --rounds $(or $(ROUNDS),3) $(ARGS)

bench-history: env-hdfs  ## measure Spark, archives and Parquet, beside plain copies (ARGS='--quick --messages 10000000')
	@$(BIN)/python -m bench.history run $(ARGS)

.venv-peers/ready: .venv/ready pyproject.toml
	@scripts/make-peers-env

sim: env  ## run random histories (power loss, bad disks, consumers), batches, frames, names: ROUNDS=10 seeds
	@$(BIN)/python -m tests.sim consumption $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 1000 ))
	@$(BIN)/python -m tests.sim modes $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 200 ))
	@$(BIN)/python -m tests.sim law $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 1000 ))
	@$(BIN)/python -m tests.sim public $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 100 ))
	@$(BIN)/python -m tests.sim world $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 200 ))
	@$(BIN)/python -m tests.sim narrowing $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 200 ))
	@$(BIN)/python -m tests.sim brokers $$((RANDOM * 32768)) $$(( $(or $(ROUNDS),10) * 20 ))
	@scripts/with-seeds $(or $(ROUNDS),10) tests/broker tests/storage tests/sim tests/format tests/net tests/test_names.py

fuzz: env  ## try hostile frames, batches, answers and files, guided by coverage: COUNT=10000000, an hour (SEED=... TARGET=...)
	@scripts/with-atheris -m fuzz --count $(or $(COUNT),10000000) $(if $(SEED),--seed $(SEED)) \
		$(if $(TARGET),--target $(TARGET))

errors: env  ## cause an I/O error of each kind at every operation of a broker's life, once and lasting
	@QMQ_IO_ERRORS=all $(BIN)/pytest -q --no-header -o faulthandler_timeout=0 tests/broker/test_io_errors.py

kills: env  ## kill -9 under load, ROUNDS=1000 times, and check every message (SEED=... repeats a run, TLS=1: by TLS)
	@$(OVER_TLS)$(BIN)/python -m tests.faults.kills --rounds $(or $(ROUNDS),1000) $(if $(SEED),--seed $(SEED))

consumer-kills: env  ## kill -9 of broker and consumers, and SIGSTOP: ROUNDS=100 faults (SEED=... repeats a run, TLS=1: by TLS)
	@$(OVER_TLS)$(BIN)/python -m tests.faults.consumer_kills --rounds $(or $(ROUNDS),100) $(if $(SEED),--seed $(SEED))

faults: env  ## run the tests of faults alone; TLS=1: with all connections by TLS (ARGS=... for pytest)
	@$(OVER_TLS)$(BIN)/pytest --numprocesses 2 --dist worksteal tests/faults $(ARGS)

console-pictures: env-console  ## take the pictures of docs/console.md again
	@$(BIN)/python -m tests.console.browser.pictures docs/console

soak: env  ## run everything at half load with kills: MINUTES=60, BROKERS=1 or 2 (SEED=... RATE=... OUT=DIR)
	@scripts/with-matplotlib -m tests.soak --minutes $(or $(MINUTES),60) --brokers $(or $(BROKERS),1) \
		$(if $(SEED),--seed $(SEED)) $(if $(RATE),--rate $(RATE)) $(if $(OUT),--out $(OUT))

mutants: env  ## switch off each safeguard, one at a time: some test must fail (ARGS='NAME'... for some)
	@$(BIN)/python -m tests.mutants $(ARGS)
