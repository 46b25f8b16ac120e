package tokenizer

import (
	"slices"
	"strings"
	"unicode/utf8"
)

// addedToken is a token that is recognised in the text before anything else is
// done with it.
type addedToken struct {
	id   uint32
	text string
	// singleWord drops the match when a letter or its like is beside it.
	// leftSpace and rightSpace take the spaces beside it into the token.
	singleWord, leftSpace, rightSpace bool
}

// plain tells whether a match depends on nothing beside it.
func (a *addedToken) plain() bool { return !a.singleWord && !a.leftSpace && !a.rightSpace }

// addedTokens finds added tokens in text: the leftmost, and of several there
// the longest. It is built once and then used from any goroutine. The zero
// value finds none.
type addedTokens struct {
	tokens []addedToken
	// first are the bytes that tokens begin with, isFirst the same.
	first   []byte
	isFirst [256]bool
	// nodes are a trie; the first is its root. A node's edges lie side by side
	// in the order of their bytes.
	nodes []addedNode
	edges []addedEdge
}

type addedNode struct {
	edges, end uint32
	token      int32 // index in tokens, or -1
}

type addedEdge struct {
	on   byte
	node uint32
}

// fewFirst is how many first bytes are searched for one by one, each at the
// speed of memory. With more of them, every byte of the text is looked at.
const fewFirst = 6

// newAddedTokens takes tokens, whose texts all differ and are not empty.
func newAddedTokens(tokens []addedToken) addedTokens {
	a := addedTokens{tokens: tokens}
	if len(tokens) == 0 {
		return a
	}
	order := make([]int32, len(tokens))
	for i := range order {
		order[i] = int32(i)
		first := tokens[i].text[0]
		if !a.isFirst[first] {
			a.isFirst[first] = true
			a.first = append(a.first, first)
		}
	}
	slices.SortFunc(order, func(x, y int32) int { return strings.Compare(tokens[x].text, tokens[y].text) })
	a.build(order, 0)
	return a
}

// build appends the node for tokens that have their first depth bytes in
// common, in the order of their texts.
func (a *addedTokens) build(order []int32, depth int) uint32 {
	node := uint32(len(a.nodes))
	a.nodes = append(a.nodes, addedNode{token: -1})
	if len(a.tokens[order[0]].text) == depth {
		a.nodes[node].token = order[0]
		order = order[1:]
	}
	var edges []addedEdge
	for len(order) > 0 {
		on := a.tokens[order[0]].text[depth]
		n := 1
		for n < len(order) && a.tokens[order[n]].text[depth] == on {
			n++
		}
		edges = append(edges, addedEdge{on, a.build(order[:n], depth+1)})
		order = order[n:]
	}
	a.nodes[node].edges = uint32(len(a.edges))
	a.edges = append(a.edges, edges...)
	a.nodes[node].end = uint32(len(a.edges))
	return node
}

// longest returns the longest token that s[i:] begins with, or nil.
func (a *addedTokens) longest(s string, i int) *addedToken {
	found, node := int32(-1), uint32(0)
walk:
	for ; i < len(s); i++ {
		on := s[i]
		n := a.nodes[node]
		for _, e := range a.edges[n.edges:n.end] {
			if e.on == on {
				node = e.node
				if t := a.nodes[node].token; t >= 0 {
					found = t
				}
				continue walk
			}
		}
		break
	}
	if found < 0 {
		return nil
	}
	return &a.tokens[found]
}

// addedSearch is one walk over the added tokens of a text. It lives on the
// stack of whoever walks.
type addedSearch struct {
	of   *addedTokens
	text string
	at   int
	// next are where the first bytes are next, from at on.
	next [fewFirst]int
	// done is where the match before ended, with the spaces it took.
	done int
}

func (a *addedTokens) search(text string) addedSearch {
	s := addedSearch{of: a, text: text}
	if len(a.first) <= fewFirst {
		for i, b := range a.first {
			s.next[i] = indexByte(text, 0, b)
		}
	}
	return s
}

func indexByte(s string, from int, b byte) int {
	if i := strings.IndexByte(s[from:], b); i >= 0 {
		return from + i
	}
	return len(s)
}

// candidate moves at to the next byte that a token can begin with.
func (s *addedSearch) candidate() bool {
	a := s.of
	switch {
	case len(a.tokens) == 0:
		return false
	case len(a.first) > fewFirst:
		for s.at < len(s.text) && !a.isFirst[s.text[s.at]] {
			s.at++
		}
		return s.at < len(s.text)
	}
	least := len(s.text)
	for i, b := range a.first {
		if s.next[i] < s.at {
			s.next[i] = indexByte(s.text, s.at, b)
		}
		least = min(least, s.next[i])
	}
	s.at = least
	return least < len(s.text)
}

// find returns the next token and the text it takes. Between two matches, and
// before and after them, lies text without added tokens. start and end may lie
// before the end of the match before it, when that has taken spaces in: as in the
// library, the text goes on from end then.
func (s *addedSearch) find() (token *addedToken, start, end int) {
	for s.candidate() {
		token = s.of.longest(s.text, s.at)
		if token == nil {
			s.at++
			continue
		}
		start, end = s.at, s.at+len(token.text)
		s.at = end
		if token.plain() {
			s.done = end
			return token, start, end
		}
		if token.singleWord && (endsWithWord(s.text[:start]) || startsWithWord(s.text[end:])) {
			continue
		}
		if token.leftSpace {
			start = max(spacesFrom(s.text[:start]), s.done)
		}
		if token.rightSpace {
			end = skip(s.text, end, classSpace)
		}
		if start >= end {
			continue // the match before it has taken all of it
		}
		s.done = end
		return token, start, end
	}
	return nil, len(s.text), len(s.text)
}

func startsWithWord(s string) bool {
	c, _ := classAt(s, 0)
	return c&classWord != 0
}

func endsWithWord(s string) bool {
	r, n := utf8.DecodeLastRuneInString(s)
	return n > 0 && classOf(r)&classWord != 0
}

// spacesFrom is where the spaces at the end of s begin.
func spacesFrom(s string) int {
	for {
		r, n := utf8.DecodeLastRuneInString(s)
		if n == 0 || classOf(r)&classSpace == 0 {
			return len(s)
		}
		s = s[:len(s)-n]
	}
}
