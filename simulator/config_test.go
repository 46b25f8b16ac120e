package simulator

import (
	"strings"
	"testing"
)

// A configuration that asks for more memory than there is, or for what an engine does
// not have, is refused before anything is started.
func TestConfigRefused(t *testing.T) {
	f := func(c Config, want string) {
		t.Helper()
		if _, err := c.Completed(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want %s", err, want)
		}
	}
	f(Config{DataParallelSize: 100_000}, "data-parallel-size must be at most 256, got 100000")
	f(Config{NumGPUBlocks: 1 << 40}, "num-gpu-blocks-override and host-blocks of all ranks must be at most 16777216 blocks together")
	f(Config{HostBlocks: 1 << 62}, "num-gpu-blocks-override and host-blocks of all ranks")
	f(Config{DataParallelSize: 200, NumGPUBlocks: 1 << 20}, "num-gpu-blocks-override and host-blocks of all ranks")
	f(Config{BlockSize: 1 << 40}, "block-size must be at most")
	f(Config{Engine: "llamacpp", MaxNumSeqs: 1 << 40, MaxNumBatchedTokens: 1 << 41}, "max-num-seqs must be at most")
	for _, engine := range []string{"tgi", "llamacpp", "ollama"} {
		f(Config{Engine: engine, KVEvents: KVEvents{Endpoint: "tcp://127.0.0.1:0"}}, "kv-events are not for the engine "+engine)
	}
}
