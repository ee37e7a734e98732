# Each command installs what it needs, once, on a Debian machine with a Rust toolchain:
#   make run     builds the server and starts it on its sample rules (make run ARGS="--rules my.yaml")
#   make demo    sends traffic to it for two minutes (make demo ARGS="--seconds 600")
#   make test    runs every check; what CI runs
#   make clients-test   runs the tests of the clients in other languages (part of `make test`)
#   make clients-next-test   runs the TypeScript client's route handlers inside a real Next.js
#   make bench   runs the short benchmarks
#   make bench-cells   three nodes, then three regions that fail, keep one limit over long links, beside gubernator; the cost
#   make bench-clients   measures a call of each client beside a bare one
#   make matrix  meets every pair of features at every door, and compares what is decided with what is said (minutes)
#   make sim     simulates leases, cells and quota streams in virtual time, SEEDS=100000 runs
#   make cluster starts three nodes without Redis on loopback, and shows one limit over all of them
#   make envoy-gateway-test   a real Envoy Gateway with envoyproxy/ratelimit, then with Tollgate in its place (needs Go; minutes)
#   make h2spec  has h2spec examine the HTTP/2 of the gRPC port (needs Go)
#   make fuzz    fuzzes each parser of untrusted input for SECONDS=60
#   make fuzz-nightly  the same, 20 seconds each
#   make fmt     formats the code
#   make protos  writes the code of the protobuf messages, when a file in proto/ has changed
#   make build-dist   builds the optimized binary, for make install
#   make install copies the optimized binary, its manual pages and completions to PREFIX=/usr/local
#   make dist    builds what is released, into dist/: static binary, image, Debian package, archive, chart, SBOM, checksums
#   make image   builds the container image, without a container engine
#   make deb     builds the Debian package
#   make chart   packs the Helm chart
#   make manifests   renders deploy/kubernetes from the chart
#   make package-test  builds, installs, starts, upgrades and removes what is released (minutes; some of it as root)
#   make package-layout  the part of it that needs no static build (part of `make test`)
#   make docs-test   runs the commands in README and docs/, and compares the references with the binary
#   make docs-cli    writes docs/cli.md from the command line's own help
#   make deny    enforces deny.toml: licenses, banned crates, sources
#   make screenshots   takes the screenshots in docs/images from the real server
#   make package   packs the library crates as for publishing, and builds each from its package
#   make msrv    checks that the oldest supported Rust compiles everything
#   make setup   installs everything, for working without a network afterwards

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.NOTPARALLEL:
.DEFAULT_GOAL := help

CARGO ?= cargo
# Enables the tests that need other servers and programs; `cargo test` alone needs nothing but Rust.
EXTERNAL := --features external-tests
# Makes cargo compile the crates of the workspace by Clippy, with warnings as errors, and programs of tests without optimizing
# them. It is part of what cargo keeps a built crate by, so every build of `make test` has it. Incremental files, debug
# information and many units of code for each crate would make a first build longer, and take gigabytes; a panic tells its
# file and line without.
LINTED := CARGO_INCREMENTAL=0 CARGO_PROFILE_DEV_DEBUG=0 CARGO_PROFILE_DEV_BUILD_OVERRIDE_DEBUG=0 \
  CARGO_PROFILE_DEV_CODEGEN_UNITS=2 CARGO_PROFILE_DEV_BUILD_OVERRIDE_CODEGEN_UNITS=2 \
  RUSTC_WORKSPACE_WRAPPER=$(CURDIR)/scripts/compile-linted CLIPPY_ARGS=-D__CLIPPY_HACKERY__warnings__CLIPPY_HACKERY__
TARGET := $(or $(CARGO_TARGET_DIR),target)
DEBUG := $(TARGET)/debug/tollgate
RELEASE := $(TARGET)/release/tollgate
# The profile that is released and measured: optimized, and slow to build. `make run` builds faster (see Cargo.toml).
DIST := $(TARGET)/dist

# Programs that the end-to-end tests use: Envoy, Traefik, gRPC's own client, OpenTelemetry's messages. Each has its own
# environment, because some contain the same Python packages.
VENVS := $(CURDIR)/.venv
export TOLLGATE_TEST_ENVOY := $(VENVS)/envoy/bin/envoy
export TOLLGATE_TEST_PYTHON := $(VENVS)/foreign/bin/python
export TOLLGATE_TEST_OPENTELEMETRY := $(VENVS)/opentelemetry/bin/python
export TOLLGATE_TEST_TRAEFIK := $(VENVS)/traefik/bin/traefik
export TOLLGATE_TEST_SCHEMATHESIS := $(VENVS)/schemathesis/bin/schemathesis
export TOLLGATE_TEST_RATELIMIT := $(CURDIR)/.tools/test/service_cmd
FOREIGN := $(VENVS)/envoy/installed $(VENVS)/foreign/installed $(VENVS)/opentelemetry/installed $(VENVS)/traefik/installed $(VENVS)/schemathesis/installed

# Peers in the benchmarks; the second and the third only if there is a Go toolchain to build them.
THROTTLECRAB := .tools/bin/throttlecrab-server
RATELIMIT := $(if $(shell command -v go),.tools/bin/service_cmd)
# The same for tests, not optimized: it is compiled in two thirds of the time.
TEST_RATELIMIT := $(if $(shell command -v go),.tools/test/service_cmd)
GUBERNATOR := $(if $(shell command -v go),.tools/bin/gubernator-node)

# The dashboard, which the server embeds. Without Node (or with an old one) the server is built without it, and says so.
NODE := $(VENVS)/node/bin
export PATH := $(NODE):$(PATH)
DASHBOARD_MODULES := dashboard/node_modules/.package-lock.json
DASHBOARD_PAGE := dashboard/dist/index.html
DASHBOARD := $(if $(shell scripts/setup has-node && echo yes),$(DASHBOARD_PAGE))

# Rule files among the examples, and the tests of them.
EXAMPLE_TESTS := $(sort $(wildcard examples/*.test.yaml examples/*/*.test.yaml))
EXAMPLE_RULES := $(filter-out $(EXAMPLE_TESTS) %/envoy.yaml %/ext_authz.yaml %/gateway.yaml,$(sort $(wildcard examples/*.yaml examples/*/*.yaml)))

.PHONY: help
help:
	@sed -n '/^#   make/s/^#   //p' Makefile

.PHONY: run
run: toolchain
	@# Cargo downloads dependencies while the page is built.
	@$(CARGO) fetch --locked --quiet --target "$$(rustc --print host-tuple)" & $(if $(DASHBOARD),$(MAKE) --silent --no-print-directory $(DASHBOARD);) wait
	$(CARGO) build --release --locked -p tollgate
	TOLLGATE_DB=$${TOLLGATE_DB-sqlite:tollgate.db} TOLLGATE_GUARD_FILES=$${TOLLGATE_GUARD_FILES-true} exec $(RELEASE) serve $(ARGS)

# The binary that is released, on the PATH.
PREFIX ?= /usr/local
.PHONY: build-dist
build-dist: toolchain $(DASHBOARD)
	$(CARGO) build --profile dist --locked -p tollgate

.PHONY: install
install:
	@test -x $(DIST)/tollgate || { echo "run \`make build-dist\` first, as yourself: it needs Rust, and this only copies" >&2; exit 1; }
	install -D -m 755 $(DIST)/tollgate $(DESTDIR)$(PREFIX)/bin/tollgate
	@share=$(DESTDIR)$(PREFIX)/share; tollgate=$(DIST)/tollgate; \
	  mkdir -p "$$share"/{man/man1,bash-completion/completions,zsh/site-functions,fish/vendor_completions.d} && \
	  "$$tollgate" man --dir "$$share/man/man1" && \
	  "$$tollgate" completions bash > "$$share/bash-completion/completions/tollgate" && \
	  "$$tollgate" completions zsh > "$$share/zsh/site-functions/_tollgate" && \
	  "$$tollgate" completions fish > "$$share/fish/vendor_completions.d/tollgate.fish"

# Needs a running server; on loopback only.
.PHONY: demo
demo:
	@scripts/setup packages python3=python3
	@python3 examples/demo.py $(ARGS)

# What needs the server's binary and nothing of each other, the longest first: it runs among the test programs.
STAGES := clients-python-test dashboard-test docs-test clients-typescript-test clients-go-test package-layout deploy examples
.PHONY: test
test: format deny dashboard-tools
	@# By another make: now there is a Node to build the page with, which the binary of all stages contains.
	@$(MAKE) --no-print-directory unit BESIDE="$(STAGES)"
	@echo "make test: every check has passed"

.PHONY: format
format: toolchain
	$(CARGO) fmt --all --check
	@$(foreach crate,$(PROTOS),(cd $(crate) && sha256sum --check --quiet --strict SHA256SUMS) || { echo "$(crate) has changed: run \`make protos\`" >&2; exit 1; };)

# The code of the protobuf messages is kept beside them: compiling a compiler for them takes more than a minute.
PROTOS := crates/server/proto crates/tollgate/proto
.PHONY: protos
protos: toolchain
	$(CARGO) run --quiet --locked --manifest-path scripts/protos/Cargo.toml --target-dir $(TARGET)/tools
	@$(foreach crate,$(PROTOS),(cd $(crate) && find . -type f ! -name SHA256SUMS | LC_ALL=C sort | xargs sha256sum > SHA256SUMS);)

# Clippy alone, for working on the code. `make test` has Clippy compile the test programs instead: one pass, not two.
.PHONY: lint
lint: toolchain
	$(CARGO) clippy --workspace --all-targets $(EXTERNAL) --locked -- -D warnings

# Licenses, banned crates and sources of all dependencies. CI runs cargo-deny on the same file, for its advisories.
.PHONY: deny
deny: toolchain
	@scripts/setup packages python3=python3
	@scripts/check-dependencies

# The clients in other languages, against the real server.
.PHONY: clients-test
clients-test: clients-typescript-test clients-python-test clients-go-test

# A missing Node is said, and fails in CI.
.PHONY: clients-typescript-test
clients-typescript-test: $(DEBUG)
	@if scripts/setup has-node; then \
	  cd clients/typescript && npm install --no-save --no-fund --no-audit --loglevel=error && \
	  TOLLGATE_TEST_BINARY=$(abspath $(DEBUG)) npm test --silent; \
	else \
	  echo "no Node 20.19 or later: the TypeScript client was NOT tested; install Node, or run scripts/setup node .venv/node" >&2; \
	  test -z "$${CI:-}"; \
	fi

# Route handlers inside a real Next.js, which is too large for every run of `make test`.
.PHONY: clients-next-test
clients-next-test: $(DEBUG)
	cd clients/typescript && npm install --no-save --no-fund --no-audit --loglevel=error && npm run --silent build && \
	  TOLLGATE_TEST_BINARY=$(abspath $(DEBUG)) node --test --test-reporter=spec --test-timeout=600000 next/next.test.mjs

.PHONY: clients-python-test
clients-python-test: $(DEBUG) $(VENVS)/clients-python/installed
	cd clients/python && $(VENVS)/clients-python/bin/python -m mypy --strict --cache-dir=/dev/null src
	@# Most of these tests wait for times that servers ask for, so three files run at a time.
	cd clients/python/tests && TOLLGATE_BINARY=$(abspath $(DEBUG)) PYTHON=$(VENVS)/clients-python/bin/python \
	  bash -c 'ls -S test_*.py | xargs -P 3 -n 1 $$PYTHON -B -W ignore::ResourceWarning -m unittest'

# Without a Go toolchain this says so; CI has one.
.PHONY: clients-go-test
clients-go-test: $(DEBUG)
	@if command -v go >/dev/null; then \
	  for module in clients/go clients/go/grpc; do \
	    (cd $$module && go vet ./... && TOLLGATE_BINARY=$(abspath $(DEBUG)) go test -count=1 ./...) || exit 1; \
	  done; \
	else echo "clients-go-test: NOT RUN, there is no Go toolchain; install Go 1.23 or later"; fi

# Unit, property, integration, end-to-end and documentation tests; BESIDE names what else runs once they are compiled.
.PHONY: unit
unit: toolchain $(DASHBOARD)
	@scripts/setup packages python3=python3
	$(LINTED) scripts/run-tests --setup "make --no-print-directory test-setup" $(foreach stage,$(BESIDE),--beside "make --no-print-directory $(stage)") -- --workspace $(EXTERNAL) --locked

# The servers, programs and packages that tests use: downloads take no time while everything is compiled. Later stages find
# them installed.
.PHONY: test-setup
test-setup: test-tools $(FOREIGN) $(TEST_RATELIMIT) $(VENVS)/clients-python/installed
	@if scripts/setup has-node; then cd clients/typescript && npm install --no-save --no-fund --no-audit --loglevel=error; fi

# Leases, cells and quota streams in virtual time, with failures injected. `make test` runs 2,000 seeds (256 cases of quota
# streams); this is for nightly runs.
SEEDS ?= 100000
.PHONY: sim
sim: toolchain
	$(CARGO) build --profile dist --locked -p tollgate-sim
	$(DIST)/tollgate-sim --seeds $(SEEDS)
	$(DIST)/tollgate-sim --cells --seeds $(SEEDS)
	PROPTEST_CASES=$(SEEDS) CARGO_PROFILE_DIST_LTO=off $(CARGO) test -p tollgate-server --profile dist --locked --lib rlqs::table

# Every pair of features through every integration, in simulated time. `make test` runs a sample that covers each feature and
# each integration; TOLLGATE_MATRIX_ONLY='soft + candidate' runs one case.
.PHONY: matrix
matrix: toolchain
	@if scripts/setup has-node; then \
	  cd clients/typescript && npm install --no-save --no-fund --no-audit --loglevel=error && npm run --silent build; fi
	TOLLGATE_TEST_TYPESCRIPT=$(CURDIR)/clients/typescript TOLLGATE_MATRIX=$${TOLLGATE_MATRIX-all} \
	  $(LINTED) $(CARGO) test --workspace $(EXTERNAL) --locked --test matrix -- --nocapture

# Three nodes without Redis on free ports of loopback, and one limit over all of them.
.PHONY: cluster
cluster: $(DEBUG)
	scripts/cluster $(DEBUG)

# A real Envoy Gateway without Kubernetes, with envoyproxy/ratelimit and then with Tollgate: same policies, same answers.
.PHONY: envoy-gateway-test
envoy-gateway-test: $(DEBUG) test-tools $(VENVS)/envoy/installed .tools/bin/service_cmd .tools/bin/envoy-gateway
	scripts/envoy-gateway-test --gateway .tools/bin/envoy-gateway --envoy $(TOLLGATE_TEST_ENVOY) \
	  --ratelimit .tools/bin/service_cmd --tollgate $(DEBUG)

# The HTTP/2 of the gRPC port, by a program that sends what clients must not.
.PHONY: h2spec
h2spec: $(DEBUG) .tools/bin/h2spec
	scripts/h2spec --h2spec .tools/bin/h2spec --tollgate $(DEBUG)

# The example rules are valid and pass their tests.
.PHONY: examples
examples: $(DEBUG)
	@for file in $(EXAMPLE_RULES); do echo "check $$file"; $(DEBUG) check "$$file"; done
	$(DEBUG) test $(EXAMPLE_TESTS)

# Every command in README and docs/ runs, rule and configuration files load, references match the binary.
.PHONY: docs-test
docs-test: $(DEBUG) test-tools $(FOREIGN)
	@scripts/docs test --binary $(DEBUG)

# The library crates as others get them: each is built from its own package, in the order of their dependencies.
LIBRARY := core rules store engine replica http sdk
.PHONY: package
package: toolchain
	$(CARGO) package --allow-dirty $(LIBRARY:%=-p tollgate-%)

# The oldest Rust that is supported (`rust-version` in Cargo.toml) compiles everything.
.PHONY: msrv
msrv:
	@version="$$(sed -n 's/^rust-version = "\(.*\)"/\1/p' Cargo.toml)" && \
	  rustup toolchain install --profile minimal "$$version" && \
	  rustup run "$$version" $(CARGO) check --workspace --all-targets $(EXTERNAL) --locked

.PHONY: docs-cli
docs-cli: $(DEBUG)
	@scripts/docs cli --binary $(DEBUG) --write

# Alerts fire on their symptoms, and Grafana's dashboards match its own types (if there is Node to check them).
.PHONY: deploy
deploy: test-tools
	promtool check rules deploy/prometheus/alerts.yml deploy/prometheus/rate-limiter.yml
	cd deploy/prometheus && promtool test rules alerts.test.yml rate-limiter.test.yml
	@if command -v npm > /dev/null; then cd deploy/grafana/check && npm install --no-save --silent && node check.mjs; \
	  else echo "no Node: skipping the check of Grafana's dashboards"; fi

# The binary that the tests use. `unit` has built it: this is for `make examples` alone.
$(DEBUG): toolchain
	@test -x $@ || $(LINTED) $(CARGO) build --workspace $(EXTERNAL) --locked

# In process, over gRPC with h2load, RESP with redis-benchmark, counters in Redis, in the place of envoyproxy/ratelimit, quota
# streams, leases, HTTP and the gateway with wrk, overload beside Envoy: Tollgate and its peers in one run.
.PHONY: bench
bench: toolchain bench-tools $(THROTTLECRAB) $(RATELIMIT) $(VENVS)/envoy/installed
	$(CARGO) build --profile dist --locked -p tollgate -p bench
	$(DIST)/bench inprocess --short
	$(DIST)/bench observe --short
	$(DIST)/bench grpc --short
	$(DIST)/bench resp --short
	$(DIST)/bench redis --short
	$(if $(RATELIMIT),$(DIST)/bench ratelimit --short,@echo "bench ratelimit: NOT RUN, there is no Go toolchain to build envoyproxy/ratelimit with")
	$(DIST)/bench rlqs --short
	$(DIST)/bench leases --short
	$(DIST)/bench http --short
	$(DIST)/bench gateway --short
	$(DIST)/bench overload --short

# An upstream that gets more than it can serve: without protection, behind Envoy and behind Tollgate. About 13 minutes on an
# otherwise idle machine.
.PHONY: bench-overload
bench-overload: toolchain bench-tools $(VENVS)/envoy/installed
	$(CARGO) build --profile dist --locked -p tollgate -p bench
	$(DIST)/bench overload

# Three nodes that keep one limit over links of 0, 80 and 200 ms, and three regions that fail, beside gubernator, which needs
# Go; then what the modes of `region` cost. About 25 minutes on an otherwise idle machine.
.PHONY: bench-cells
bench-cells: toolchain bench-tools $(GUBERNATOR)
	$(CARGO) build --profile dist --locked -p tollgate -p bench
	$(DIST)/bench cells
	$(DIST)/bench cells --regions
	$(DIST)/bench cells --cost

# Ten million requests through the gateway, and eighteen minutes of decisions with every output broken: memory must not grow.
.PHONY: bench-memory
bench-memory: toolchain bench-tools
	$(CARGO) build --profile dist --locked -p tollgate -p bench
	$(DIST)/bench gateway --memory
	$(DIST)/bench observe-memory

# `limit` of the clients in other languages beside a bare call of the same check, in turn, on the released build. What has no
# toolchain here is said.
CALLS ?= 5000
.PHONY: bench-clients
bench-clients: toolchain $(VENVS)/clients-python/installed
	$(CARGO) build --profile dist --locked -p tollgate
	@if scripts/setup has-node; then \
	  cd clients/typescript && npm install --no-save --no-fund --no-audit --loglevel=error && npm run --silent build && \
	  TOLLGATE_TEST_BINARY=$(abspath $(DIST))/tollgate node scripts/overhead.mjs $(CALLS); \
	else echo "bench-clients: no Node 20.19 or later, TypeScript is NOT measured"; fi
	cd clients/python && TOLLGATE_BINARY=$(abspath $(DIST))/tollgate $(VENVS)/clients-python/bin/python -B tests/overhead.py $(CALLS)
	@if command -v go >/dev/null; then \
	  cd clients/go && TOLLGATE_BINARY=$(abspath $(DIST))/tollgate go test -run '^$$' -bench Overhead -benchtime $(CALLS)x; \
	else echo "bench-clients: no Go toolchain, Go is NOT measured"; fi

# Not `npm ci`: it rejects a lock file without the compiled packages of every platform, and not all of them are available.
$(DASHBOARD_MODULES): dashboard/package-lock.json dashboard/.npmrc
	cd dashboard && npm install --no-save --no-fund --no-audit --loglevel=error
	@touch $@

$(DASHBOARD_PAGE): $(DASHBOARD_MODULES) dashboard/index.html dashboard/vite.config.ts dashboard/svelte.config.js dashboard/tsconfig.json $(shell find dashboard/src -type f)
	cd dashboard && npm run --silent build -- --logLevel=warn

# Together with a test, so that it is the binary of `make unit` and not built twice.
BUILD_TESTED := $(LINTED) $(CARGO) build --workspace $(EXTERNAL) --locked --bin tollgate --test crate_layering

# The dashboard in Debian's headless Chromium, on the real server; its types first.
.PHONY: dashboard-test
dashboard-test: toolchain dashboard-tools
	@$(MAKE) --no-print-directory $(DASHBOARD_PAGE)
	cd dashboard && npm run --silent check
	$(BUILD_TESTED)
	cd dashboard && TOLLGATE_TEST_BINARY=$(abspath $(DEBUG)) npm run --silent test

.PHONY: screenshots
screenshots: toolchain dashboard-tools
	@$(MAKE) --no-print-directory $(DASHBOARD_PAGE)
	$(CARGO) build --release --locked -p tollgate
	cd dashboard && TOLLGATE_TEST_BINARY=$(abspath $(RELEASE)) npm run --silent screenshots

.PHONY: dashboard-tools
dashboard-tools:
	@scripts/setup packages chromium-headless-shell=chromium-headless-shell python3=python3
	@scripts/setup node $(VENVS)/node

# Installs a nightly compiler. Findings are written to fuzz/artifacts and fail the run.
SECONDS ?= 60
# Every parser that strangers reach, and those of what other nodes and files say.
FUZZ_TARGETS := request_head chunks proxy_protocol rule_yaml resp_commands json_bodies rls_request forwarded_fields paths \
  tokens snapshot import_line peer_sample cell_message http2
CARGO_FUZZ := .tools/bin/cargo-fuzz
.PHONY: fuzz
fuzz: toolchain $(CARGO_FUZZ)
	@scripts/setup nightly
	@for target in $(FUZZ_TARGETS); do \
	  echo "fuzz $$target"; mkdir -p fuzz/corpus/$$target; \
	  PATH="$(CURDIR)/.tools/bin:$$PATH" $(CARGO) +nightly fuzz run --fuzz-dir fuzz $$target \
	    fuzz/corpus/$$target fuzz/seeds/$$target -- -max_total_time=$(SECONDS) -max_len=16384 -timeout=10 -print_final_stats=1; \
	done

# A short run of each, for every night.
.PHONY: fuzz-nightly
fuzz-nightly:
	@$(MAKE) --no-print-directory fuzz SECONDS=20

$(CARGO_FUZZ):
	$(CARGO) install cargo-fuzz --version 0.13.2 --locked --root .tools --target-dir $(TARGET)/tools

# Import, export and startup with a million quotas; LENGTH= for ten million.
LENGTH ?= --short
.PHONY: bench-control
bench-control: toolchain bench-tools
	$(CARGO) build --profile dist --locked -p tollgate -p bench
	$(DIST)/bench control $(LENGTH)

.PHONY: fmt
fmt: toolchain
	$(CARGO) fmt --all

.PHONY: setup
setup: toolchain test-tools bench-tools dashboard-tools $(THROTTLECRAB) $(RATELIMIT) $(TEST_RATELIMIT) $(FOREIGN)
	$(CARGO) fetch --locked
	@$(MAKE) --no-print-directory $(DASHBOARD_MODULES)

.PHONY: toolchain
toolchain:
	@scripts/setup toolchain

# The tests of the Redis store and of proxies start their own servers.
.PHONY: test-tools
test-tools:
	@scripts/setup packages redis-server=redis-server curl=curl openssl=openssl h2load=nghttp2-client redis-benchmark=redis-tools nginx=nginx-light haproxy=haproxy caddy=caddy \
	  pg_createcluster=postgresql psql=postgresql-client promtool=prometheus

.PHONY: bench-tools
bench-tools:
	@scripts/setup packages h2load=nghttp2-client taskset=util-linux redis-server=redis-server \
	  redis-benchmark=redis-tools protoc=protobuf-compiler wrk=wrk nginx=nginx-light \
	  pg_createcluster=postgresql psql=postgresql-client

$(THROTTLECRAB): | bench-tools
	$(CARGO) install throttlecrab-server --version 0.4.40 --locked --root .tools --target-dir $(TARGET)/tools

.tools/bin/service_cmd .tools/test/service_cmd:
	GOBIN=$(CURDIR)/$(@D) GOFLAGS=-mod=mod go install $(if $(filter .tools/test/%,$@),$(UNOPTIMIZED)) \
	  github.com/envoyproxy/ratelimit/src/service_cmd@v1.4.1-0.20260122083618-3fb702589d36

.tools/bin/h2spec:
	GOBIN=$(CURDIR)/.tools/bin go install github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible

# gubernator with a fixed list of peers: its own daemon, started by a few lines.
.tools/bin/gubernator-node: bench/gubernator/main.go bench/gubernator/go.mod
	cd bench/gubernator && go build -o $(CURDIR)/$@ .

.tools/bin/envoy-gateway:
	GOBIN=$(CURDIR)/.tools/bin GOFLAGS=-mod=mod go install github.com/envoyproxy/gateway/cmd/envoy-gateway@v1.9.1

$(VENVS)/%/installed: scripts/requirements/%.txt scripts/setup
	scripts/setup venv $* $(dir $@) $<

include deploy/package.mk
