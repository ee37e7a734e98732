package tollgate

import (
	"encoding/json"
	"strings"
	"testing"
)

var objects = []string{
	`{}`, ` { } `, `{"a":1}`, `{"a" : 1 , "b" : [ ] }`, "\t{\"a\":\n{\"b\":[1,{\"c\":\"]}\"}]},\"d\":null}\r\n", `{"a":"\\","b":"\"}"}`,
	`{"a":1,"a":2}`, `{"\u0061":true,"b":-1.5e+3}`, `{"a\"b":false}`, `{"":""}`, `{"a":[[],[{}],"[",1]}`, `{"a":"ü","ü":0}`,
	`[]`, `1`, `null`, `"x"`, ``, ` `, `{`, `{"a"}`, `{"a":1,}`, `{"a":1}{}`, `{"a":tru}`, `{"a":"` + "\x01" + `"}`, "{\"a\":\"\xff\"}",
	`{"a":` + strings.Repeat("[", 20_000) + strings.Repeat("]", 20_000) + `}`,
}

// sameAsEncodingJSON compares the members of a text with what encoding/json finds.
func sameAsEncodingJSON(t *testing.T, text string) {
	t.Helper()
	var want map[string]json.RawMessage
	isObject := json.Unmarshal([]byte(text), &want) == nil && want != nil
	found, err := readObject([]byte(text))
	if (err == nil) != isObject {
		t.Fatalf("%q: %v, is an object: %v", text, err, isObject)
	}
	keys := map[string]bool{}
	for _, member := range found {
		// encoding/json replaces what is no UTF-8.
		key := strings.ToValidUTF8(string(member.key), "\ufffd")
		keys[key] = true
		var got any
		if strings.ToValidUTF8(text, "") == text {
			if json.Unmarshal(found.get(key), &got) != nil || string(want[key]) != string(found.get(key)) {
				t.Fatalf("%q: %s is %q, not %q", text, key, found.get(key), want[key])
			}
		}
		if elements, ok := splitArray(member.value); ok {
			var all []json.RawMessage
			_ = json.Unmarshal(member.value, &all)
			same(t, text, len(elements), len(all))
			for at := range all {
				same(t, text, string(elements[at]), string(all[at]))
			}
		}
	}
	if strings.ToValidUTF8(text, "") == text {
		same(t, text, len(keys), len(want))
	}
}

func TestObjectsAreReadAsByEncodingJSON(t *testing.T) {
	for _, text := range objects {
		sameAsEncodingJSON(t, text)
	}
}

func FuzzObjects(f *testing.F) {
	for _, text := range objects {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if len(text) <= maxBody {
			sameAsEncodingJSON(t, text)
		}
	})
}
