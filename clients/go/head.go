package tollgate

import (
	"encoding/json"
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
	// Path is the request target as it was received; the query is not sent.
	Path string
	// Peer is the address that connected, with or without a port. Without one (a Unix socket) it is this machine.
	Peer   string
	Header http.Header
}

// HeadOf returns the head of a request of net/http.
func HeadOf(request *http.Request) Head {
	path := request.RequestURI
	if path == "" {
		path = request.URL.EscapedPath()
	}
	header := request.Header
	// net/http moves it out of the header.
	if request.Host != "" {
		header = header.Clone()
		if header == nil {
			header = http.Header{}
		}
		header.Set("Host", request.Host)
	}
	return Head{request.Method, path, request.RemoteAddr, header}
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
	path, _, _ := strings.Cut(h.head.Path, "?")
	request := struct {
		Method  string      `json:"method"`
		Target  string      `json:"target"`
		Peer    string      `json:"peer"`
		Headers [][2]string `json:"headers"`
	}{latin1(h.head.Method), latin1(path), peerAddress(h.head.Peer), [][2]string{}}
	names := make([]string, 0, len(h.head.Header))
	for name := range h.head.Header {
		if !strings.HasPrefix(name, ":") {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		for _, value := range h.head.Header[name] {
			request.Headers = append(request.Headers, [2]string{latin1(name), latin1(value)})
		}
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
