package main

import (
	"context"

	"github.com/compose-spec/compose-go/v2/cli"
)

// compose loads a compose file as `docker compose` does: against the schema of the specification, with its services,
// volumes and dependencies resolved.
func compose(path string) (int, error) {
	options, err := cli.NewProjectOptions([]string{path}, cli.WithResolvedPaths(true))
	if err != nil {
		return 0, err
	}
	project, err := options.LoadProject(context.Background())
	if err != nil {
		return 0, err
	}
	return len(project.Services), nil
}
