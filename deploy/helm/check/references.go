package main

import (
	"fmt"

	apps "k8s.io/api/apps/v1"
	autoscaling "k8s.io/api/autoscaling/v2"
	core "k8s.io/api/core/v1"
	networking "k8s.io/api/networking/v1"
	policy "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// file is what the objects of one file can refer to.
type file struct {
	deployments []*apps.Deployment
	configs     map[string]*core.ConfigMap
	claims      map[string]bool
	errs        []error
}

// references finds what an object of the file points at and nothing there provides. Secrets are made by others.
func references(objects []runtime.Object) []error {
	f := &file{configs: map[string]*core.ConfigMap{}, claims: map[string]bool{}}
	for _, object := range objects {
		switch object := object.(type) {
		case *apps.Deployment:
			f.deployments = append(f.deployments, object)
		case *core.ConfigMap:
			f.configs[object.Name] = object
		case *core.PersistentVolumeClaim:
			f.claims[object.Name] = true
		}
	}
	for _, deployment := range f.deployments {
		f.deployment(deployment)
	}
	for _, object := range objects {
		switch object := object.(type) {
		case *core.Service:
			f.service(object)
		case *policy.PodDisruptionBudget:
			f.selects("PodDisruptionBudget "+object.Name, object.Spec.Selector.MatchLabels)
		case *networking.NetworkPolicy:
			f.networkPolicy(object)
		case *autoscaling.HorizontalPodAutoscaler:
			f.autoscaler(object)
		}
	}
	return f.errs
}

func (f *file) fail(format string, values ...any) {
	f.errs = append(f.errs, fmt.Errorf(format, values...))
}

// selects returns the deployments whose pods have these labels; none is a failure.
func (f *file) selects(what string, wanted map[string]string) []*apps.Deployment {
	var found []*apps.Deployment
	for _, deployment := range f.deployments {
		if labels.SelectorFromSet(wanted).Matches(labels.Set(deployment.Spec.Template.Labels)) {
			found = append(found, deployment)
		}
	}
	if len(found) == 0 {
		f.fail("%s: no pod has the labels %v", what, wanted)
	}
	return found
}

func (f *file) deployment(d *apps.Deployment) {
	pod := d.Spec.Template
	if !labels.SelectorFromSet(d.Spec.Selector.MatchLabels).Matches(labels.Set(pod.Labels)) {
		f.fail("Deployment %s: its selector does not match its own pods", d.Name)
	}
	volumes := map[string]bool{}
	for _, volume := range pod.Spec.Volumes {
		volumes[volume.Name] = true
		if config := volume.ConfigMap; config != nil && f.configs[config.Name] == nil {
			f.fail("Deployment %s: no ConfigMap %s in this file", d.Name, config.Name)
		}
		if claim := volume.PersistentVolumeClaim; claim != nil && !f.claims[claim.ClaimName] {
			f.fail("Deployment %s: no PersistentVolumeClaim %s in this file", d.Name, claim.ClaimName)
		}
	}
	for _, container := range pod.Spec.Containers {
		where := fmt.Sprintf("Deployment %s, container %s", d.Name, container.Name)
		paths := map[string]bool{}
		for _, mount := range container.VolumeMounts {
			if !volumes[mount.Name] {
				f.fail("%s: no volume %s", where, mount.Name)
			}
			if paths[mount.MountPath] {
				f.fail("%s: two volumes at %s", where, mount.MountPath)
			}
			paths[mount.MountPath] = true
		}
		names := map[string]bool{}
		for _, variable := range container.Env {
			if names[variable.Name] {
				f.fail("%s: %s is set twice", where, variable.Name)
			}
			names[variable.Name] = true
		}
		for _, probe := range []*core.Probe{container.StartupProbe, container.LivenessProbe, container.ReadinessProbe} {
			if probe != nil && probe.HTTPGet != nil && !hasPort(container, probe.HTTPGet.Port) {
				f.fail("%s: a probe asks port %s, which it does not have", where, probe.HTTPGet.Port.String())
			}
		}
		security := container.SecurityContext
		if security == nil || security.ReadOnlyRootFilesystem == nil || !*security.ReadOnlyRootFilesystem {
			f.fail("%s: its root is writable", where)
		}
	}
}

func hasPort(container core.Container, port intstr.IntOrString) bool {
	for _, one := range container.Ports {
		if one.Name == port.StrVal || (port.Type == intstr.Int && one.ContainerPort == port.IntVal) {
			return true
		}
	}
	return false
}

func (f *file) hasPort(deployments []*apps.Deployment, port intstr.IntOrString) bool {
	for _, deployment := range deployments {
		for _, container := range deployment.Spec.Template.Spec.Containers {
			if hasPort(container, port) {
				return true
			}
		}
	}
	return false
}

func (f *file) service(s *core.Service) {
	if len(s.Spec.Selector) == 0 {
		return
	}
	behind := f.selects("Service "+s.Name, s.Spec.Selector)
	for _, port := range s.Spec.Ports {
		target := port.TargetPort
		if target == (intstr.IntOrString{}) {
			target = intstr.FromInt32(port.Port)
		}
		if len(behind) > 0 && !f.hasPort(behind, target) {
			f.fail("Service %s: no container has the port %s", s.Name, target.String())
		}
	}
}

func (f *file) networkPolicy(n *networking.NetworkPolicy) {
	behind := f.selects("NetworkPolicy "+n.Name, n.Spec.PodSelector.MatchLabels)
	for _, rule := range n.Spec.Ingress {
		for _, port := range rule.Ports {
			if len(behind) > 0 && port.Port != nil && !f.hasPort(behind, *port.Port) {
				f.fail("NetworkPolicy %s: no container has the port %s", n.Name, port.Port.String())
			}
		}
	}
}

func (f *file) autoscaler(h *autoscaling.HorizontalPodAutoscaler) {
	if len(h.Spec.Metrics) == 0 {
		f.fail("HorizontalPodAutoscaler %s: no metric", h.Name)
	}
	for _, deployment := range f.deployments {
		if deployment.Name == h.Spec.ScaleTargetRef.Name {
			if deployment.Spec.Replicas != nil {
				f.fail("Deployment %s: replicas would fight with its autoscaler", deployment.Name)
			}
			return
		}
	}
	f.fail("HorizontalPodAutoscaler %s: no Deployment %s", h.Name, h.Spec.ScaleTargetRef.Name)
}
