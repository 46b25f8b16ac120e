//go:build race

package template

const raceDetector = true
