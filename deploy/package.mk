# What is released: a static binary, and from it the image, the Debian package and the archive; the chart, the SBOM, the
# checksums. Included by the Makefile. The version is the workspace's, from Cargo.toml, everywhere.
#   make dist ARCH="amd64 arm64"      for several machines; arm64 is cross-compiled
#   make image STATIC_PROFILE=dev     from a development build, which is quick

VERSION := $(shell sed -n '/^\[workspace.package\]/,/^\[/s/^version = "\(.*\)"/\1/p' Cargo.toml)
ARCH ?= amd64
IMAGE ?= tollgate.dev/tollgate
STATIC_PROFILE ?= dist
MUSL_amd64 := x86_64-unknown-linux-musl
MUSL_arm64 := aarch64-unknown-linux-musl
# The binary of $(1): amd64 or arm64.
static_binary = $(TARGET)/$(MUSL_$(1))/$(if $(filter dev,$(STATIC_PROFILE)),debug,$(STATIC_PROFILE))/tollgate
# One that runs on this machine, for manual pages and completions.
RUNNABLE = $(call static_binary,$(if $(filter aarch64,$(shell uname -m)),arm64,amd64))
# The time in what is packed, so that the same commit gives the same bytes. Not for compilers: each commit would rebuild.
PACK := SOURCE_DATE_EPOCH=$(or $(SOURCE_DATE_EPOCH),$(shell git log -1 --format=%ct 2>/dev/null),0)

# C code (SQLite, ring, mimalloc) is compiled for musl too. Debian has no musl compiler for arm64: its glibc compiler
# serves, without the 64-bit file functions that only glibc has (they are the ordinary ones on such machines) and the
# checked functions of -D_FORTIFY_SOURCE, and with its atomics inline.
STATIC_ENV := CARGO_PROFILE_DIST_STRIP=symbols CC_x86_64_unknown_linux_musl=musl-gcc \
  CC_aarch64_unknown_linux_musl=aarch64-linux-gnu-gcc AR_aarch64_unknown_linux_musl=aarch64-linux-gnu-ar \
  CFLAGS_aarch64_unknown_linux_musl="-U_FORTIFY_SOURCE -DSQLITE_DISABLE_LFS -mno-outline-atomics" \
  CARGO_TARGET_AARCH64_UNKNOWN_LINUX_MUSL_LINKER=aarch64-linux-gnu-gcc

.PHONY: static
static: toolchain $(DASHBOARD)
	@scripts/setup packages $(if $(filter amd64,$(ARCH)),musl-gcc=musl-tools) \
	  $(if $(filter arm64,$(ARCH)),aarch64-linux-gnu-gcc=gcc-aarch64-linux-gnu aarch64-linux-gnu-gcc=libc6-dev-arm64-cross)
	@for target in $(foreach arch,$(ARCH),$(MUSL_$(arch))); do \
	  rustup target list --installed | grep -qx "$$target" || rustup target add "$$target"; \
	  $(STATIC_ENV) $(CARGO) build --profile $(STATIC_PROFILE) --target "$$target" --locked -p tollgate; \
	done

# The image as an OCI archive, for `podman load`, `docker load` and `skopeo copy oci-archive:FILE docker://…`.
.PHONY: image
image: static
	@scripts/setup packages python3=python3
	@$(PACK) deploy/image/oci-image --version $(VERSION) --name $(IMAGE) --output dist/tollgate-$(VERSION)-image.tar \
	  $(foreach arch,$(ARCH),--binary $(arch)=$(call static_binary,$(arch)))

.PHONY: deb
deb: static
	@$(foreach arch,$(ARCH),$(PACK) deploy/debian/build-deb --version $(VERSION) --arch $(arch) --binary $(call static_binary,$(arch)) --runnable $(RUNNABLE) --output dist &&) true

# The static binary with the examples and the documentation.
.PHONY: tarball
tarball: static
	@$(foreach arch,$(ARCH),$(PACK) scripts/tarball --name tollgate-$(VERSION)-$(MUSL_$(arch)) --binary $(call static_binary,$(arch)) --runnable $(RUNNABLE) --output dist &&) true

.PHONY: sbom
sbom: toolchain
	@scripts/setup packages python3=python3
	@mkdir -p dist && $(PACK) scripts/sbom --version $(VERSION) --output dist/tollgate-$(VERSION).cdx.json

# Helm's binary comes in a Python wheel where there is one, and is built by Go (minutes) where there is none: the same version,
# that of the wheel, so that the chart is packed alike everywhere. The check of
# Kubernetes objects is built by Go, once; what only runs here is compiled in two thirds of the time without optimizing.
HELM_VERSION := $(shell sed -n 's/^helm-binary==\([0-9]*\.[0-9]*\.[0-9]*\).*/v\1/p' scripts/requirements/helm.txt)
BUILT_HELM := .tools/helm-$(HELM_VERSION)/helm
HELM := $(if $(filter Linux/x86_64,$(shell uname -s)/$(shell uname -m)),$(VENVS)/helm/bin/helm,$(BUILT_HELM))
DEPLOY_CHECK := .tools/bin/deploy-check
UNOPTIMIZED := '-gcflags=all=-N -l' '-ldflags=-s -w'
$(VENVS)/helm/bin/helm: $(VENVS)/helm/installed
$(BUILT_HELM):
	GOBIN=$(CURDIR)/$(@D) go install $(UNOPTIMIZED) helm.sh/helm/v3/cmd/helm@$(HELM_VERSION)
$(DEPLOY_CHECK): $(wildcard deploy/helm/check/*.go) deploy/helm/check/go.mod
	cd deploy/helm/check && go build $(UNOPTIMIZED) -o $(CURDIR)/$@ .

.PHONY: chart
chart: $(HELM)
	@mkdir -p dist && $(HELM) package deploy/helm/tollgate --version $(VERSION) --app-version $(VERSION) --destination dist

# The plain manifests and the chart's version, from the values and Cargo.toml.
.PHONY: manifests
manifests: $(HELM)
	@deploy/test/chart --helm $(HELM) --version $(VERSION) --write

# The chart is valid, every object is one of Kubernetes, the manifests are current.
.PHONY: chart-test
chart-test: $(DEBUG)
	@if command -v go >/dev/null; then $(MAKE) --no-print-directory chart-check; \
	  else echo "chart-test: NOT RUN, there is no Go toolchain to build the check with; install Go 1.26 or later"; fi

.PHONY: chart-check
chart-check: $(HELM) $(DEPLOY_CHECK)
	@deploy/test/chart --helm $(HELM) --check $(DEPLOY_CHECK) --version $(VERSION) --binary $(DEBUG)

# Built while the tests are compiled.
test-setup: $(VENVS)/sbom/installed $(if $(shell command -v go),$(HELM) $(DEPLOY_CHECK))

# The layout of image and Debian package around a small program, the SBOM, the compose file: what needs no static build.
.PHONY: package-layout
package-layout: chart-test $(DEBUG) $(VENVS)/sbom/installed test-tools
	@scripts/setup packages umoci=umoci
	@deploy/test/layout --version $(VERSION) --binary $(DEBUG) --python $(VENVS)/sbom/bin/python

# All of it: builds the static binary (minutes), then unpacks, installs, starts, upgrades and removes what comes of it.
.PHONY: package-test
package-test: package-layout image deb tarball
	@deploy/test/image dist/tollgate-$(VERSION)-image.tar
	@deploy/test/deb dist/tollgate_$(VERSION)_amd64.deb
	@deploy/test/tarball dist/tollgate-$(VERSION)-$(MUSL_amd64).tar.gz

# Only what this run made: dist/ is emptied first.
.PHONY: dist
dist: clean-dist image deb tarball sbom
	@if [ $(HELM) != $(BUILT_HELM) ] || command -v go >/dev/null; then $(MAKE) --no-print-directory chart; \
	  else echo "dist: without the chart, there is no Go toolchain to build Helm with" >&2; fi
	@cd dist && sha256sum * > SHA256SUMS && cat SHA256SUMS

.PHONY: clean-dist
clean-dist:
	@rm -rf dist
