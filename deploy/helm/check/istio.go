package main

import (
	"k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// EnvoyFilter has the fields of networking.istio.io/v1alpha3 that the example uses. Istio's own types are generated from
// protobuf and bring its whole API.
type EnvoyFilter struct {
	v1.TypeMeta   `json:",inline"`
	v1.ObjectMeta `json:"metadata,omitempty"`
	Spec          EnvoyFilterSpec `json:"spec"`
}

// EnvoyFilterSpec selects proxies and patches their configuration.
type EnvoyFilterSpec struct {
	WorkloadSelector struct {
		Labels map[string]string `json:"labels"`
	} `json:"workloadSelector,omitempty"`
	ConfigPatches []EnvoyFilterPatch `json:"configPatches"`
	Priority      int32              `json:"priority,omitempty"`
}

// EnvoyFilterPatch is one change; its value is Envoy's own configuration.
type EnvoyFilterPatch struct {
	ApplyTo string `json:"applyTo"`
	Match   struct {
		Context  string `json:"context,omitempty"`
		Listener *struct {
			FilterChain struct {
				Filter struct {
					Name      string `json:"name"`
					SubFilter struct {
						Name string `json:"name"`
					} `json:"subFilter,omitempty"`
				} `json:"filter"`
			} `json:"filterChain"`
		} `json:"listener,omitempty"`
		RouteConfiguration *struct {
			Vhost struct {
				Name  string `json:"name,omitempty"`
				Route struct {
					Action string `json:"action,omitempty"`
				} `json:"route,omitempty"`
			} `json:"vhost"`
		} `json:"routeConfiguration,omitempty"`
	} `json:"match"`
	Patch struct {
		Operation string         `json:"operation"`
		Value     map[string]any `json:"value"`
	} `json:"patch"`
}

// DeepCopyObject completes runtime.Object; nothing here changes an object.
func (f *EnvoyFilter) DeepCopyObject() runtime.Object { return f }

func addIstio(scheme *runtime.Scheme) error {
	version := schema.GroupVersion{Group: "networking.istio.io", Version: "v1alpha3"}
	scheme.AddKnownTypes(version, &EnvoyFilter{})
	return nil
}
