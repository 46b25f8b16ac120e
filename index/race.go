//go:build race

package index

// raceDetector: the program is built with it. The table can then be paused
// between the steps of a change, which is how tests meet half-done ones.
const raceDetector = true
