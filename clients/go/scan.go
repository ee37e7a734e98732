package tollgate

import (
	"bytes"
	"encoding/json"
)

// Splits JSON into its members without decoding what is not needed: encoding/json into a map of raw messages took more
// time than the rest of this client. The text is valid where these functions are called, so they only look for ends.

type jsonMember struct {
	key   []byte
	value json.RawMessage
}

// object is a JSON object in its order.
type object []jsonMember

// readObject reads a body of at most maxBody bytes.
func readObject(body []byte) (object, error) {
	if len(body) > maxBody || !json.Valid(body) {
		return nil, errInvalid
	}
	found, ok := splitObject(body)
	if !ok {
		return nil, errInvalid
	}
	return found, nil
}

// get returns a member's value; nil if there is none. Of several the last one counts.
func (o object) get(name string) json.RawMessage {
	for at := len(o) - 1; at >= 0; at-- {
		if string(o[at].key) == name {
			return o[at].value
		}
	}
	return nil
}

// splitObject returns the members of an object; false if the text is something else.
func splitObject(text []byte) (object, bool) {
	at := skipSpace(text, 0)
	if text[at] != '{' {
		return nil, false
	}
	found := make(object, 0, 12)
	for at = skipSpace(text, at+1); text[at] != '}'; {
		end := valueEnd(text, at)
		key := text[at+1 : end-1]
		if bytes.IndexByte(key, '\\') >= 0 {
			var plain string
			_ = json.Unmarshal(text[at:end], &plain)
			key = []byte(plain)
		}
		at = skipSpace(text, skipSpace(text, end)+1)
		end = valueEnd(text, at)
		found = append(found, jsonMember{key, text[at:end]})
		at = nextValue(text, end)
	}
	return found, true
}

// splitArray returns the elements of an array; false if the text is something else.
func splitArray(text []byte) ([]json.RawMessage, bool) {
	if len(text) == 0 || text[0] != '[' {
		return nil, false
	}
	var found []json.RawMessage
	for at := skipSpace(text, 1); text[at] != ']'; {
		end := valueEnd(text, at)
		found = append(found, text[at:end])
		at = nextValue(text, end)
	}
	return found, true
}

func skipSpace(text []byte, at int) int {
	for at < len(text) && (text[at] == ' ' || text[at] == '\n' || text[at] == '\t' || text[at] == '\r') {
		at++
	}
	return at
}

// nextValue returns where the next value, or the closing bracket, begins after a value.
func nextValue(text []byte, at int) int {
	at = skipSpace(text, at)
	if text[at] == ',' {
		at = skipSpace(text, at+1)
	}
	return at
}

// valueEnd returns where the value that begins at a place ends.
func valueEnd(text []byte, at int) int {
	depth := 0
	for {
		switch text[at] {
		case '"':
			at++
			for text[at] != '"' {
				if text[at] == '\\' {
					at++
				}
				at++
			}
			at++
		case '{', '[':
			depth++
			at++
			continue
		case '}', ']':
			depth--
			at++
		default:
			at++
			if depth == 0 {
				for at < len(text) && text[at] != ',' && text[at] != '}' && text[at] != ']' && text[at] > ' ' {
					at++
				}
				return at
			}
			continue
		}
		if depth == 0 {
			return at
		}
	}
}
