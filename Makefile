# Two commands do everything: `make demo` and `make check`. The work is in `cargo xtask`.

PREFIX ?= /usr/local
DESTDIR ?=
CARGO ?= cargo
PROFILED ?=
SEEDS ?= 1000000
RUNS ?= 10000000
FILTER ?=
LIBUV ?=
# Without optimisation across crates a build takes a third of the time: the demonstration and the tests ask what
# the libraries do, not how fast they are.
QUICKLY = CARGO_PROFILE_RELEASE_LTO=off CARGO_PROFILE_RELEASE_CODEGEN_UNITS=16 CARGO_PROFILE_RELEASE_DEBUG=0

.PHONY: help demo check soak soak-fuzz soak-suites toolchain build install uninstall clean

help:
	@echo 'make demo                    build, then run RDMA programs of the distribution over Quipu'
	@echo 'make check                   install what the tests need, and run all of them'
	@echo 'make soak SEEDS=N            N seeds of the simulator (a million): about 2 hours'
	@echo 'make soak-fuzz RUNS=N        N inputs (ten millions) for each fuzz target, guided by coverage: hours'
	@echo 'make soak-suites             suites of other projects with and without `quipu sockets`: half an hour'
	@echo 'make build                   build the libraries and the command into target/quipu, as fast as they get'
	@echo 'make build PROFILED=1        the same, built twice: for what a minute of the benchmark does most'
	@echo 'make install PREFIX=DIR      install them (default /usr/local)'
	@echo 'make uninstall PREFIX=DIR    remove them again'
	@echo 'make clean                   remove everything that was built'

toolchain:
	@command -v $(CARGO) >/dev/null 2>&1 || { \
	    echo 'cargo is missing: install Rust 1.95 or later, with rustup or otherwise.' >&2; \
	    exit 1; }
	@tests/clients/install.sh build

demo: toolchain
	@tests/clients/install.sh demo
	@$(QUICKLY) $(CARGO) xtask demo

# What cargo would keep for a next build that differs a little costs time.
check: toolchain
	@tests/clients/install.sh demo check
	@CARGO_INCREMENTAL=0 $(QUICKLY) $(CARGO) xtask ci

# Goes on where it was interrupted. The seeds follow from the commit.
soak: toolchain
	@$(CARGO) xtask soak --seeds '$(SEEDS)'

# Goes on with what it has found before, in fuzz/corpus.
soak-fuzz: toolchain
	@$(CARGO) xtask fuzz --guided --runs '$(RUNS)'

# FILTER=TEXT runs only suites whose name contains it; LIBUV=PROGRAM is the uv_run_tests of a build of libuv.
soak-suites: build
	@$(CARGO) xtask suites --filter '$(FILTER)' $(if $(LIBUV),--libuv '$(LIBUV)')

build: toolchain
	@$(CARGO) xtask stage $(if $(PROFILED),--profiled)

install: build
	@$(CARGO) xtask install --prefix '$(PREFIX)' $(if $(DESTDIR),--destdir '$(DESTDIR)')

uninstall:
	@$(CARGO) xtask install --prefix '$(PREFIX)' $(if $(DESTDIR),--destdir '$(DESTDIR)') --remove

clean:
	@$(CARGO) clean
