package policy

import "sync"

// Calibration finds a replica's Speed from Observations. It lives as long as the
// replica; its methods may be called from any goroutine and allocate nothing. The
// zero value knows nothing and has DefaultSpeed.
type Calibration struct {
	mu sync.Mutex // guards the rest
}

// Estimate is what a Calibration has found. It is a value.
type Estimate struct {
	Speed Speed
	// Samples is how many observations it is made of, 0 for none: then Speed is
	// what SetPrior has given.
	Samples int
	// Error is the median, of the last observations, of how far the prediction
	// was from what was seen, relative to that.
	Error float64
}

// SetPrior gives what Speed starts from: the median of the model's replicas, or of
// the fleet's. It has no weight once there are observations enough.
func (k *Calibration) SetPrior(s Speed) {}

// Observe takes an observation.
func (k *Calibration) Observe(o Observation) {}

// Speed is what was found. It waits for nobody.
func (k *Calibration) Speed() Speed { return DefaultSpeed }

// Estimate is what was found.
func (k *Calibration) Estimate() Estimate { return Estimate{Speed: DefaultSpeed} }

// MedianSpeed is the median of each coefficient, DefaultSpeed of none.
func MedianSpeed(speeds []Speed) Speed { return DefaultSpeed }
