package tollgate

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The example of the documentation runs, and prints what the page says.
func TestTheExample(t *testing.T) {
	folder := filepath.Join("..", "..", "examples", "go")
	rules, err := os.ReadFile(filepath.Join(folder, "rules.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(filepath.Join("..", "..", "docs", "sdk", "go.md"))
	if err != nil {
		t.Fatal(err)
	}
	run := exec.Command("go", "run", ".")
	run.Dir = folder
	run.Env = append(os.Environ(), "TOLLGATE_URL="+startServerWith(t, string(rules)), "GOPROXY=off")
	run.Stderr = os.Stderr
	output, err := run.Output()
	if err != nil {
		t.Fatal(err)
	}
	same(t, "output", string(output), "plain http.Client: refused\npolite http.Client: not refused\ntokens used: 12\n")
	same(t, "on the page", strings.Contains(string(page), string(output)), true)
}
