package bpf

import "slices"

// Why is the reason a packet was not carried: of a refusal to start, or of a
// pause. The numbers mirror enum why in splice.h.
type Why uint32

// whyNames are metric labels, in the order of enum why.
var whyNames = [...]string{
	"", "socket", "unread", "order", "held", "request", "timestamps", "options", "mss", "flags",
	"gap", "frames", "large", "loop", "surplus", "owed", "race", "write", "pmtu",
}

func (w Why) String() string {
	if int(w) < len(whyNames) {
		return whyNames[w]
	}
	return "unknown"
}

// Whys are the reasons why a packet was not carried, as metric labels.
func Whys() []string { return slices.Clone(whyNames[1:]) }

// SocketWhys are the reasons for which a socket is never spliced.
func SocketWhys() []string { return []string{WhyUnseen, WhyFull, WhySystem, WhyFamily} }

// Reasons for which a socket is never spliced, from Splicer.Enter.
const (
	WhyUnseen = "unseen" // its packets were not seen at a hook
	WhyFull   = "full"   // no free id
	WhySystem = "system" // a system call failed
	WhyFamily = "family" // IPv4 on one side, IPv6 on the other
)
