// Command check decodes Kubernetes objects strictly into the types of their own projects: an unknown or misspelled field,
// or a value of the wrong type, is an error, as it would be with `kubectl apply --validate=strict` on a cluster.
//
//	check [-json] FILE...    a file may hold several documents; each file's references are resolved within it
//	check -compose FILE      a compose file, by the types of its specification
//
// Types know nothing of references, so it also looks for what they point at: labels that select nothing, ports and
// volumes that no container has, ConfigMaps that are never created. -json prints the decoded objects for other checks.
package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	envoygateway "github.com/envoyproxy/gateway/api/v1alpha1"
	contour "github.com/projectcontour/contour/apis/projectcontour/v1"
	contouralpha "github.com/projectcontour/contour/apis/projectcontour/v1alpha1"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	"k8s.io/apimachinery/pkg/util/yaml"
)

func main() {
	asJSON := flag.Bool("json", false, "print the decoded objects, one a line")
	composeFile := flag.String("compose", "", "check this compose file")
	flag.Parse()
	if *composeFile != "" {
		services, err := compose(*composeFile)
		if err != nil {
			fmt.Fprintf(os.Stderr, "%s: %v\n", *composeFile, err)
			os.Exit(1)
		}
		fmt.Printf("%s: %d services\n", *composeFile, services)
		return
	}
	if flag.NArg() == 0 {
		fmt.Fprintln(os.Stderr, "usage: check [-json] FILE... | check -compose FILE")
		os.Exit(2)
	}
	decoder := newDecoder()
	failed := false
	for _, path := range flag.Args() {
		objects, errs := read(decoder, path)
		errs = append(errs, references(objects)...)
		for _, err := range errs {
			failed = true
			fmt.Fprintf(os.Stderr, "%s: %v\n", path, err)
		}
		if *asJSON {
			for _, object := range objects {
				if err := json.NewEncoder(os.Stdout).Encode(object); err != nil {
					fmt.Fprintln(os.Stderr, err)
					os.Exit(1)
				}
			}
		} else if len(errs) == 0 {
			fmt.Printf("%s: %d objects\n", path, len(objects))
		}
	}
	if failed {
		os.Exit(1)
	}
}

// newDecoder knows every kind that the chart and the examples have; another kind is an error.
func newDecoder() runtime.Decoder {
	scheme := runtime.NewScheme()
	for _, add := range []func(*runtime.Scheme) error{
		core.AddToScheme, apps.AddToScheme, autoscaling.AddToScheme, networking.AddToScheme, policy.AddToScheme,
		monitoring.AddToScheme, envoygateway.AddToScheme, contour.AddToScheme, contouralpha.AddToScheme,
		addEnvoyGateway, addIstio,
	} {
		if err := add(scheme); err != nil {
			panic(err)
		}
	}
	return serializer.NewCodecFactory(scheme, serializer.EnableStrict).UniversalDeserializer()
}

// addEnvoyGateway adds the configuration that Envoy Gateway reads from a file, which is no resource of a cluster.
func addEnvoyGateway(scheme *runtime.Scheme) error {
	scheme.AddKnownTypes(envoygateway.GroupVersion, &envoygateway.EnvoyGateway{})
	return nil
}

func read(decoder runtime.Decoder, path string) ([]runtime.Object, []error) {
	file, err := os.ReadFile(path)
	if err != nil {
		return nil, []error{err}
	}
	var objects []runtime.Object
	var errs []error
	documents := yaml.NewDocumentDecoder(io.NopCloser(bytes.NewReader(file)))
	defer documents.Close()
	buffer := make([]byte, len(file)+1)
	for number := 1; ; number++ {
		n, err := documents.Read(buffer)
		if errors.Is(err, io.EOF) {
			return objects, errs
		}
		if err != nil {
			return objects, append(errs, err)
		}
		if isEmpty(buffer[:n]) {
			continue
		}
		object, kind, err := decoder.Decode(buffer[:n], nil, nil)
		if err != nil {
			errs = append(errs, fmt.Errorf("document %d (%v): %w", number, kind, err))
			continue
		}
		objects = append(objects, object)
		if config, ok := object.(*core.ConfigMap); ok {
			errs = append(errs, embedded(decoder, config)...)
		}
	}
}

// embedded decodes the object that Envoy Gateway reads from a ConfigMap.
func embedded(decoder runtime.Decoder, config *core.ConfigMap) []error {
	text, found := config.Data["envoy-gateway.yaml"]
	if !found {
		return nil
	}
	if _, _, err := decoder.Decode([]byte(text), nil, nil); err != nil {
		return []error{fmt.Errorf("ConfigMap %s: envoy-gateway.yaml: %w", config.Name, err)}
	}
	return nil
}

// isEmpty reports whether a document has only comments and white space.
func isEmpty(document []byte) bool {
	for _, line := range bytes.Split(document, []byte("\n")) {
		line = bytes.TrimSpace(line)
		if len(line) > 0 && line[0] != '#' && !bytes.Equal(line, []byte("---")) {
			return false
		}
	}
	return true
}
