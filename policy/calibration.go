package policy

import (
	"math"
	"slices"
	"sync"
	"sync/atomic"
)

// Calibration finds a replica's Speed from Observations. It lives as long as the
// replica; its methods may be called from any goroutine and allocate nothing. The
// zero value knows nothing and has DefaultSpeed.
//
// It is least squares, with the errors taken relative to what was observed, so that
// short prompts count as much as long ones, and with old observations fading. Where
// they do not tell the coefficients apart, as with prompts that are all of one length,
// these keep the proportions that they had last when they were told apart, or else the
// prior's; unless what was observed contradicts those.
//
//   - An observation that is far off, measured by how far off they usually are, is
//     clipped; one that is absurd is left out, if there are only few of that kind.
//   - When nearly all of the last ones are off to the same side, or the last few by far,
//     the replica has become slower or faster. All coefficients change by their median
//     then, and what was known of how fast it is as a whole is forgotten; of how the
//     coefficients are to each other some is kept.
//   - No coefficient is less than 0, or more than slowest's.
//
// How many sequences are generated meanwhile is left out: it goes with load, as does
// much else, and what it takes on average is found in the coefficients.
type Calibration struct {
	view board // the coefficients, for Speed; a fourth number is 0 when there are none

	mu      sync.Mutex // guards the rest, and writing the above
	samples int
	changes int
	// A coefficient is its unit times its factor. anchor are the factors that it
	// has as far as nothing was observed.
	unit, factor, anchor vector
	// The normal equations: information·factor = evidence.
	information matrix
	evidence    vector
	// recent are the last observations, in no order, and errors how far off the
	// predictions of the last ones were.
	recent [window]Observation
	errors errorWindow
	// lean is near 1 when all observations, for a while, took longer than predicted,
	// and near -1 when all took less; what is hardly off counts as neither.
	lean float64
	// strange is the share of observations, lately, that were too far off to be
	// learned. Where it is large it is the coefficients that are wrong.
	strange float64
	// doubt is how uncertain each factor is: its standard error.
	doubt vector
	// supposed is what Suppose was told, until an observation fits what was found
	// better.
	supposed Speed
	// shown: supposed is what Speed says.
	shown atomic.Bool
}

const (
	// memory is after how many observations one has a third of its weight left.
	memory = 500
	// window is how many observations are looked at to see a change: enough of them
	// must be off to the same side. Before there are so many, but from fewest on,
	// the prior is made slower or faster as they are in the median.
	window = 8
	enough = 7
	fewest = 3
	// clearly is by how much the last observations are off of which enough show a change.
	// Of those that are farther off it takes fewer, by their logarithms, which count up to
	// mostClearly times as much: fewest of them if they took 2.2 times as long. What is
	// usual is known from usualErrors of them, counted anew after each change.
	clearly     = 1.4
	mostClearly = 3
	usualErrors = 16
	// leaning is over how many observations lean is taken. From leant on it has
	// become slower, or from -leant on faster, by less than is seen in a window.
	leaning = 16
	leant   = 0.85
	// kept is how much of what is known of the coefficients' proportions is kept
	// when the replica has become slower or faster.
	kept = 0.25
	// strangers is over how many observations strange is taken, and from tooStrange
	// on all of them are learned.
	strangers  = 32
	tooStrange = 0.1
	// weightOfSum is how much the anchor says of how fast the replica is as a whole.
	weightOfSum = 0.1
	// firstSpread is what is taken for the usual error while there are only a few.
	firstSpread = 0.1
)

// fastest is how many seconds an observation has at least.
const fastest = 1e-6

// slowest are bounds of A, B and D.
var slowest = vector{1, 1e-4, 60}

// Estimate is what a Calibration has found. It is a value.
type Estimate struct {
	Speed Speed
	// Samples is how many observations it is made of, 0 for none: then Speed is
	// what SetPrior has given.
	Samples int
	// Error is the median, of the last observations, of how far the prediction
	// was from what was seen, relative to that.
	Error float64
	// Determined: the observations tell the coefficients apart. Otherwise Speed is
	// right for prompts such as there were, and less so for others.
	Determined bool
	// Changes is how often the replica has become slower or faster as a whole.
	Changes int
}

// SetPrior gives what Speed starts from: the median of the model's replicas, or of
// the fleet's. Each observation leaves it less weight; when there is a window of
// them, another prior is not taken any more.
func (k *Calibration) SetPrior(s Speed) {
	p := vector{s.A, s.B, s.D}
	for i, c := range p {
		if !(c >= 0) || math.IsInf(c, 1) {
			return
		}
		p[i] = min(c, slowest[i])
	}
	if p == (vector{}) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.samples >= window {
		return
	}
	k.startLocked(p)
	if k.samples >= fewest {
		k.rescaleLocked(window)
	} else {
		for i := range k.samples {
			k.learnLocked(&k.recent[i])
		}
	}
	k.showLocked()
}

// startLocked forgets all but the recent observations.
func (k *Calibration) startLocked(prior vector) {
	typical := Prefill(1000, 1000)
	s := Speed{prior[0], prior[1], prior[2]}
	ratio := s.Time(typical) / DefaultSpeed.Time(typical)
	for i, c := range [...]float64{DefaultSpeed.A, DefaultSpeed.B, DefaultSpeed.D} {
		k.unit[i] = max(prior[i], 0.05*ratio*c)
		k.anchor[i] = prior[i] / k.unit[i]
	}
	k.boundLocked()
	k.factor = k.anchor
	k.information, k.evidence = matrix{}, vector{}
}

// Observe takes an observation. What cannot be one is left out.
func (k *Calibration) Observe(o Observation) {
	const longest = 1e7 // tokens that a token may have before it
	if w := &o.Work; !(o.Seconds >= fastest && o.Seconds <= 3600) || !(w.Prompts >= 1 && w.Prompts <= 1e6) ||
		!(w.Tokens >= 0 && w.Tokens <= 1e9) || !(w.Attention >= 0 && w.Attention <= w.Tokens*longest) {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.unit == (vector{}) {
		k.startLocked(vector{DefaultSpeed.A, DefaultSpeed.B, DefaultSpeed.D})
	}
	if k.supposed != (Speed{}) {
		// Nearer to what was supposed than to what was found?
		found, supposed := k.predictLocked(&o), max(k.supposed.Time(o.Work), fastest)
		fits := math.Abs(math.Log(o.Seconds/supposed)) < math.Abs(math.Log(o.Seconds/found))
		if !fits {
			k.supposed = Speed{}
		}
		k.shown.Store(fits)
	}
	k.recent[k.samples%window] = o
	k.samples++
	off := (o.Seconds - k.predictLocked(&o)) / o.Seconds
	k.errors.push(math.Abs(off))
	side := 0.0
	if math.Abs(off) > k.spreadLocked()/4 {
		side = math.Copysign(1, off)
	}
	k.lean += (side - k.lean) / leaning
	if k.samples >= fewest && k.samples < window || k.changedLocked() {
		k.rescaleLocked(window)
	} else if n := k.clearLocked(); n > 0 {
		k.rescaleLocked(n)
	} else {
		k.learnLocked(&o)
	}
	k.showLocked()
}

// Suppose lets Speed be s, for one prompt, although something else was found. A
// replica that has proved to be slow gets nothing any more where others do, and so
// whether it is slow still would never be known. If the observation of that prompt
// fits s better than what was found, the next is for s again, until enough of them
// are a change; else all is as before. The agent calls it when nothing was observed
// for long and nothing is under way.
func (k *Calibration) Suppose(s Speed) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if sum := s.A + s.B + s.D; k.samples == 0 || !(sum > 0) || math.IsInf(sum, 1) {
		return
	}
	k.supposed = s
	k.shown.Store(true)
	k.showLocked()
}

// Sent tells that a prompt was sent to the replica: the one that Suppose is for.
func (k *Calibration) Sent() {
	if !k.shown.Load() {
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.shown.Store(false)
	k.showLocked()
}

// predictLocked is how long o is taken to last.
func (k *Calibration) predictLocked(o *Observation) float64 {
	x := vector{o.Work.Tokens, o.Work.Attention, o.Work.Prompts}
	t := 0.0
	for i := range x {
		t += x[i] * k.unit[i] * k.factor[i]
	}
	return max(t, fastest)
}

// spreadLocked is how far off predictions usually are.
func (k *Calibration) spreadLocked() float64 {
	if k.errors.n < window {
		return firstSpread
	}
	return max(k.errors.median(), 0.005)
}

// boundLocked keeps the units within numbers that can be counted with.
func (k *Calibration) boundLocked() {
	for i, most := range slowest {
		k.unit[i] = min(max(k.unit[i], 1e-12*most), most)
	}
}

// changedLocked reports that the replica has become slower or faster.
func (k *Calibration) changedLocked() bool {
	if k.samples < window {
		return false
	}
	// Usual errors, and those of some 10 %, are no change; one by a quarter is,
	// unless that is usual.
	spread := k.spreadLocked()
	limit := math.Exp(max(min(max(4*spread, math.Log(1.1)), math.Log(1.25)), 2*spread))
	slower, faster := 0, 0
	for i := range k.recent {
		switch r := k.ratioLocked(i); {
		case r > limit:
			slower++
		case r*limit < 1:
			faster++
		}
	}
	return max(slower, faster) >= enough ||
		math.Abs(k.lean) > leant && math.Abs(math.Log(k.medianRatioLocked(window))) > spread
}

// clearLocked is how many of the last observations show clearly that the replica has
// become slower or faster, 0 when they do not. An engine that is throttled gets few
// requests more, and each of them pays for it: a window of them takes long.
func (k *Calibration) clearLocked() int {
	if k.errors.n < usualErrors {
		return 0
	}
	unit, sum := max(math.Log(clearly), 2*k.spreadLocked()), 0.0
	for n := 1; n < enough; n++ {
		off := math.Log(k.ratioLocked(k.recentLocked(n))) / unit
		if math.Abs(off) < 1 || off*sum < 0 {
			return 0
		}
		sum += min(max(off, -mostClearly), mostClearly)
		if n >= fewest && math.Abs(sum) >= enough && k.alikeLocked(n) {
			return n
		}
	}
	return 0
}

// alikeLocked reports that the last n observations are off by as much as one another, as
// absurd ones are not.
func (k *Calibration) alikeLocked(n int) bool {
	by := k.medianRatioLocked(n)
	for i := range n {
		if r := k.ratioLocked(k.recentLocked(i+1)) / by; r > 1.5 || r*1.5 < 1 {
			return false
		}
	}
	return true
}

// recentLocked is where the n-th last observation is, counted from 1.
func (k *Calibration) recentLocked(n int) int { return (k.samples - n) % window }

// ratioLocked is how many times longer recent observation i took than is predicted.
func (k *Calibration) ratioLocked(i int) float64 {
	return k.recent[i].Seconds / k.predictLocked(&k.recent[i])
}

// medianRatioLocked is the median of that of the last n.
func (k *Calibration) medianRatioLocked(n int) float64 {
	var ratios [window]float64
	for i := range n {
		ratios[i] = k.ratioLocked(k.recentLocked(i + 1))
	}
	slices.Sort(ratios[:n])
	return (ratios[(n-1)/2] + ratios[n/2]) / 2
}

// rescaleLocked makes all coefficients so many times what they were as the last n
// observations say, or as many as there are, and learns those anew.
func (k *Calibration) rescaleLocked(n int) {
	n, first := min(k.samples, n), k.samples < window
	if first {
		k.factor, k.information = k.anchor, matrix{}
	}
	by := k.medianRatioLocked(n)
	for i := range k.unit {
		k.unit[i] *= by
	}
	k.boundLocked()
	if !first {
		k.changes++
		k.anchor = k.factor
		// What is known of the sum is taken out, but for one observation's worth.
		v := k.information.times(k.factor)
		if q := v.dot(k.factor); q > 1 {
			for i := range v {
				for j := range v {
					k.information[i][j] -= v[i] * v[j] / q * (1 - 1/q)
				}
			}
		}
		for i := range v {
			for j := range v {
				k.information[i][j] *= kept
			}
		}
	}
	k.errors, k.lean = errorWindow{}, 0
	// Those that are as far off as before are from before the change.
	var of [window]bool
	fit := 0
	for i := range n {
		r := k.ratioLocked(k.recentLocked(n - i))
		if of[i] = first || r < 1.25 && r > 1/1.25; of[i] {
			fit++
		}
	}
	if 2*fit < n && !first {
		// Nor are the proportions what they were.
		k.information = matrix{}
		for i := range of {
			of[i] = true
		}
	}
	k.evidence = k.information.times(k.factor)
	for i := range n {
		if of[i] {
			k.learnLocked(&k.recent[k.recentLocked(n-i)])
		}
	}
	for i := range n {
		if o := &k.recent[k.recentLocked(n-i)]; of[i] {
			k.errors.push(math.Abs(k.predictLocked(o)-o.Seconds) / o.Seconds)
		}
	}
}

// learnLocked takes o into the equations and solves them.
func (k *Calibration) learnLocked(o *Observation) {
	predicted := k.predictLocked(o)
	// Relative to the larger of both no error is more than 1.
	norm := max(predicted, o.Seconds)
	off, spread := math.Abs(o.Seconds-predicted)/norm, k.spreadLocked()
	weight := 1.0
	if clip := min(4*spread, 0.5); off > clip {
		weight = clip / off
	}
	far := norm > max(5, 1+16*spread)*min(predicted, o.Seconds)
	if far {
		k.strange += (1 - k.strange) / strangers
	} else {
		k.strange -= k.strange / strangers
	}
	if far && k.samples > window && k.strange < tooStrange {
		return
	}
	x := vector{o.Work.Tokens * k.unit[0] / norm, o.Work.Attention * k.unit[1] / norm, o.Work.Prompts * k.unit[2] / norm}
	// Where a factor is nearly 0, one observation must not weigh like thousands.
	for i := range x {
		if lever := x[i] * max(k.factor[i], 0.1); lever > 2 {
			weight = min(weight, 4/(lever*lever))
		}
	}
	for i := range x {
		k.evidence[i] = k.evidence[i]*(1-1.0/memory) + weight*x[i]*o.Seconds/norm
		for j := range x {
			k.information[i][j] = k.information[i][j]*(1-1.0/memory) + weight*x[i]*x[j]
		}
	}
	k.solveLocked(min(max(1.5*spread, 0.01), 0.3))
}

// solveLocked finds the factors that fit best, where noise is the standard
// deviation of an observation.
func (k *Calibration) solveLocked(noise float64) {
	var m matrix
	k.factor, m = k.fitLocked(noise * noise)
	for i, d := range m.inverseDiagonal() {
		k.doubt[i] = noise * math.Sqrt(d)
	}
	if k.determinedLocked() {
		k.anchor = k.factor
	} else if k.samples >= window {
		// Where the anchor holds the factors off from what fits by more than noise
		// can, it is wrong: it is given up as far as that takes.
		free, _ := k.fitLocked(noise * noise * 1e-4)
		least, wrong := k.misfitLocked(free), false
		for weight := 0.1; weight > 1e-4 && k.misfitLocked(k.factor)-least > 9*noise*noise; weight /= 10 {
			k.factor, _ = k.fitLocked(noise * noise * weight)
			wrong = true
		}
		if wrong {
			k.anchor = k.factor
		}
	}
	for i, most := range slowest {
		k.factor[i] = min(k.factor[i], most/k.unit[i])
	}
}

// fitLocked returns the factors that fit best, and the equations. The anchor counts
// as so much of an observation of each factor that is off by as much as itself; but
// of all of them together it says little: it holds the proportions.
func (k *Calibration) fitLocked(weight float64) (vector, matrix) {
	m, v := k.information, k.evidence
	var f, a vector
	for i := range v {
		scale := max(k.anchor[i], 0.1)
		f[i] = weight / (scale * scale)
		a[i] = f[i] * k.anchor[i]
	}
	sum := max(a.dot(k.anchor), 1e-300)
	for i := range v {
		m[i][i] += f[i]
		for j := range v {
			m[i][j] -= (1 - weightOfSum) * a[i] * a[j] / sum
		}
		v[i] += weightOfSum * a[i]
	}
	return m.solve(v), m
}

// misfitLocked is how much factors are off from what was observed: the sum of the
// squares, less what they all have in common.
func (k *Calibration) misfitLocked(factor vector) float64 {
	v := k.information.times(factor)
	return v.dot(factor) - 2*k.evidence.dot(factor)
}

// determinedLocked reports that each factor is known to some 15 %, or to be small.
func (k *Calibration) determinedLocked() bool {
	for i, d := range k.doubt {
		if !(d <= 0.15*max(k.factor[i], 0.25)) {
			return false
		}
	}
	return k.samples >= window
}

func (k *Calibration) speedLocked() Speed {
	if k.unit == (vector{}) {
		return DefaultSpeed
	}
	return Speed{A: k.unit[0] * k.factor[0], B: k.unit[1] * k.factor[1], D: k.unit[2] * k.factor[2]}
}

func (k *Calibration) showLocked() {
	s := k.speedLocked()
	if k.shown.Load() {
		s = k.supposed
	}
	n := k.view.begin()
	for i, c := range [...]float64{s.A, s.B, s.D} {
		n.set(i, math.Float64bits(c))
	}
	n.set(3, 1)
	k.view.end()
}

// Speed is what was found. It waits for nobody.
func (k *Calibration) Speed() Speed {
	var v [4]uint64
	if k.view.read(v[:]); v[3] == 0 {
		return DefaultSpeed
	}
	return Speed{A: math.Float64frombits(v[0]), B: math.Float64frombits(v[1]), D: math.Float64frombits(v[2])}
}

// Estimate is what was found.
func (k *Calibration) Estimate() Estimate {
	k.mu.Lock()
	defer k.mu.Unlock()
	return Estimate{Speed: k.speedLocked(), Samples: k.samples, Error: k.errors.median(),
		Determined: k.determinedLocked(), Changes: k.changes}
}

// sound reports that it is a speed: of numbers, none below 0, that are not all 0.
func (s *Speed) sound() bool {
	least, most := min(s.A, s.B, s.D), max(s.A, s.B, s.D)
	return least >= 0 && !math.IsInf(most, 1) && most > 0
}

// slowness is how many times longer whole answers take a replica than they take others
// of its model, as their Filters have them: all are the means of those of which enough is
// known, s among them, in order. It is for those of which no first token was ever seen,
// since nobody has their answers streamed: nothing better tells which of them are slow.
// Answers are of all lengths, and wait for one another: what is less than three times the
// median or more than a third is 1, and so it is while only a few answers were seen. With
// 2 in place of 3 chance alone makes some look slow.
func (s *FilterState) slowness(all []float64) float64 {
	const clear = 3
	if s.Samples < fewAnswers || len(all) < 2 {
		return 1
	}
	if by := s.Mean / all[len(all)/2]; by >= clear || by > 0 && by <= 1.0/clear {
		return by
	}
	return 1
}

// fewAnswers is from how many on they tell something.
const fewAnswers = 20

// Times is a speed at which all takes so many times as long.
func (s Speed) Times(by float64) Speed { return Speed{A: by * s.A, B: by * s.B, D: by * s.D} }

// errorWindow are the last errors and their median.
type errorWindow struct {
	n      int // of them, at most all
	next   int
	last   [32]float64 // in the order in which they came, from next on
	sorted [32]float64
}

func (w *errorWindow) push(e float64) {
	count := w.n
	if count == len(w.last) {
		i, _ := slices.BinarySearch(w.sorted[:], w.last[w.next])
		copy(w.sorted[i:], w.sorted[i+1:])
		count--
	}
	w.n = count + 1
	i, _ := slices.BinarySearch(w.sorted[:count], e)
	copy(w.sorted[i+1:w.n], w.sorted[i:count])
	w.sorted[i] = e
	w.last[w.next] = e
	w.next = (w.next + 1) % len(w.last)
}

func (w *errorWindow) median() float64 {
	if w.n == 0 {
		return 0
	}
	return (w.sorted[(w.n-1)/2] + w.sorted[w.n/2]) / 2
}

type vector [3]float64

func (v vector) dot(u vector) float64 { return v[0]*u[0] + v[1]*u[1] + v[2]*u[2] }

// matrix is symmetric.
type matrix [3]vector

func (m *matrix) times(v vector) vector { return vector{m[0].dot(v), m[1].dot(v), m[2].dot(v)} }

// solve returns x, of which none is less than 0, for which m·x is nearest v. m is
// positive definite. Those that would be less are made 0, the worst first, and the
// others found again.
func (m *matrix) solve(v vector) (x vector) {
	free := [3]bool{true, true, true}
	for range free {
		x = m.solveFree(v, free)
		worst := 0
		for i := range x {
			if x[i] < x[worst] {
				worst = i
			}
		}
		if x[worst] >= 0 {
			break
		}
		free[worst] = false
	}
	for i := range x {
		x[i] = max(x[i], 0)
	}
	return x
}

// solveFree solves for the free ones, the others being 0.
func (m *matrix) solveFree(v vector, free [3]bool) (x vector) {
	// Scaled so that its diagonal is 1, then Cholesky.
	var scale, y vector
	for i := range scale {
		if free[i] {
			scale[i] = 1 / math.Sqrt(m[i][i])
		}
	}
	var l matrix
	for i := range l {
		for j := range i {
			s := m[i][j] * scale[i] * scale[j]
			for q := range j {
				s -= l[i][q] * l[j][q]
			}
			l[i][j] = s / l[j][j]
		}
		d := 1.0
		for q := range i {
			d -= l[i][q] * l[i][q]
		}
		l[i][i] = math.Sqrt(max(d, 1e-12))
	}
	for i := range y {
		y[i] = v[i] * scale[i]
		for q := range i {
			y[i] -= l[i][q] * y[q]
		}
		y[i] /= l[i][i]
	}
	for i := 2; i >= 0; i-- {
		x[i] = y[i]
		for q := i + 1; q < 3; q++ {
			x[i] -= l[q][i] * x[q]
		}
		x[i] /= l[i][i]
	}
	for i := range x {
		x[i] *= scale[i]
	}
	return x
}

// inverseDiagonal is the diagonal of the inverse of m, which is positive definite.
func (m *matrix) inverseDiagonal() (d vector) {
	determinant := m[0].dot(vector{m.minor(0, 0), -m.minor(0, 1), m.minor(0, 2)})
	for i := range d {
		d[i] = math.Inf(1)
		if determinant > 0 {
			d[i] = max(m.minor(i, i)/determinant, 0)
		}
	}
	return d
}

// minor is the determinant of what is left without a row and a column.
func (m *matrix) minor(row, column int) float64 {
	a, b := (row+1)%3, (row+2)%3
	c, d := (column+1)%3, (column+2)%3
	if a > b {
		a, b = b, a
	}
	if c > d {
		c, d = d, c
	}
	return m[a][c]*m[b][d] - m[a][d]*m[b][c]
}
