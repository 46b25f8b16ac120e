package agent

// reconfigure stands in for the real one.
func (f *fleet) reconfigure(*Config) {}
