//go:build race

package kvevent

const raceDetector = true
