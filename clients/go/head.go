package tollgate

import (
	"encoding/json"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"unicode/utf8"
)

// Head is the head of a request that a program has received. The server identifies the caller by it, with the settings of
// the gateway. Rejected: identity rules in the client, which are many, and whose differences from the server's would be
// ways around a limit.
type Head struct {
	Method string
	// Path is the request target as it was received.
	Path string
	// Peer is the address that connected, with or without a port. Without one (a Unix socket) it is this machine.
	Peer string
	// Fields are the names and values of the header.
	Fields [][2]string
}

// HeadOf returns the head of a request of net/http, without the query.
func HeadOf(request *http.Request) Head {
	path := request.RequestURI
	if path == "" {
		path = request.URL.EscapedPath()
	}
	path, _, _ = strings.Cut(path, "?")
	head := Head{Method: request.Method, Path: path, Peer: request.RemoteAddr}
	// net/http moves it out of the header.
	if request.Host != "" {
		head.Fields = append(head.Fields, [2]string{"Host", request.Host})
	}
	for _, name := range slices.Sorted(maps.Keys(request.Header)) {
		for _, value := range request.Header[name] {
			head.Fields = append(head.Fields, [2]string{name, value})
		}
	}
	return head
}

// Request is the caller of a request, as the server identifies it. The attributes are checked besides; nil is none.
func Request(head Head, attributes map[string]string) Subject {
	return Subject{field: "request", value: headSubject{head, attributes}}
}

type headSubject struct {
	head       Head
	attributes map[string]string
}

// json returns the members of a JSON object.
func (h headSubject) json() string {
	request := struct {
		Method  string      `json:"method"`
		Target  string      `json:"target"`
		Peer    string      `json:"peer"`
		Headers [][2]string `json:"headers"`
	}{latin1(h.head.Method), latin1(h.head.Path), peerAddress(h.head.Peer), make([][2]string, len(h.head.Fields))}
	for at, field := range h.head.Fields {
		request.Headers[at] = [2]string{latin1(field[0]), latin1(field[1])}
	}
	text, _ := json.Marshal(request)
	if len(h.attributes) == 0 {
		return `"request":` + string(text)
	}
	more, _ := json.Marshal(h.attributes)
	return `"request":` + string(text) + `,"attributes":` + string(more)
}

func peerAddress(peer string) string {
	if host, _, err := net.SplitHostPort(peer); err == nil {
		peer = host
	}
	peer, _, _ = strings.Cut(peer, "%")
	if peer == "" || peer == "@" {
		return "127.0.0.1"
	}
	return peer
}

// latin1 returns a string of which each character stands for one byte.
func latin1(text string) string {
	for at := range len(text) {
		if text[at] >= utf8.RuneSelf {
			runes := make([]rune, len(text))
			for at := range len(text) {
				runes[at] = rune(text[at])
			}
			return string(runes)
		}
	}
	return text
}
