//go:build !race

package prompt

const raceDetector = false
