package prompt

import (
	"fmt"
	"os"
)

func resolve(name, hubCache string) (dir string, err error) {
	if _, err := os.Stat(name); err != nil {
		return "", fmt.Errorf("tokenizer %s: %w", name, err)
	}
	return name, nil
}
