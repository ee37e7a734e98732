// A Go server that answers with the paths that handlers route by, in hexadecimal.
package main

import (
	"fmt"
	"net/http"
	"os"
	"path"
)

func main() {
	answer := func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "path %x\ncleaned %x\nescaped %x\n", r.URL.Path, path.Clean(r.URL.Path), r.URL.EscapedPath())
	}
	panic(http.ListenAndServe("127.0.0.1:"+os.Args[1], http.HandlerFunc(answer)))
}
