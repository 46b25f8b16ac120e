package agent

import "fmt"

// reconfigure stands in for the real one.
func (f *fleet) reconfigure(*Config) error { return nil }

// ailments stands in for the real one.
func (f *fleet) ailments() []string {
	if up, of := f.upCount(); up < of {
		return []string{fmt.Sprintf("%d of %d replicas are up", up, of)}
	}
	return nil
}
