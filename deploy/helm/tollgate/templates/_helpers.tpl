{{- define "tollgate.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "tollgate.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- $name := include "tollgate.name" . }}
{{- if contains $name .Release.Name }}
{{- .Release.Name | trunc 63 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name $name | trunc 63 | trimSuffix "-" }}
{{- end }}
{{- end }}
{{- end }}

{{- define "tollgate.cellService" -}}
{{- printf "%s-cell" (include "tollgate.fullname" . | trunc 58 | trimSuffix "-") }}
{{- end }}

{{- define "tollgate.selector" -}}
app.kubernetes.io/name: {{ include "tollgate.name" . | toYaml }}
app.kubernetes.io/instance: {{ .Release.Name | toYaml }}
{{- end }}

{{- define "tollgate.labels" -}}
{{ include "tollgate.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tollgate.serviceAccount" -}}
{{- if .Values.serviceAccount.create }}
{{- default (include "tollgate.fullname" .) .Values.serviceAccount.name }}
{{- else }}
{{- default "default" .Values.serviceAccount.name }}
{{- end }}
{{- end }}

{{- define "tollgate.image" -}}
{{- if .Values.image.digest }}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest }}
{{- else }}
{{- printf "%s:%s" .Values.image.repository (default .Chart.AppVersion .Values.image.tag) }}
{{- end }}
{{- end }}

{{/* The address of a port on all addresses of the pod, or `off` for port 0. */}}
{{- define "tollgate.listen" -}}
{{- $host := .host }}
{{- if contains ":" $host }}{{ $host = printf "[%s]" $host }}{{ end }}
{{- if .port }}{{ printf "%s:%v" $host .port }}{{ else }}off{{ end }}
{{- end }}

{{/* Whether several pods can run at a time. */}}
{{- define "tollgate.several" -}}
{{- if or .Values.autoscaling.enabled (gt (int .Values.replicas) 1) }}yes{{ end }}
{{- end }}

{{/* A probe of the HTTP port: by the kubelet, or if clients must show a certificate, which it has not, by the program itself. */}}
{{- define "tollgate.probe" -}}
{{- $tls := .values.tls.http -}}
{{- if and $tls.secret $tls.clientCertificates -}}
exec:
  command:
    - /bin/tollgate
    - health
    {{- if eq .path "/readyz" }}
    - --ready
    {{- end }}
    - --cert=/etc/tollgate/tls/http/tls.crt
    - --cert-key=/etc/tollgate/tls/http/tls.key
{{- else if $tls.secret -}}
httpGet: {path: {{ .path }}, port: http, scheme: HTTPS}
{{- else -}}
httpGet: {path: {{ .path }}, port: http}
{{- end }}
{{- end }}

{{/* Combinations of values that would start and not do what they say. */}}
{{- define "tollgate.validate" -}}
{{- range $path := list "image" "config" "rules" "listeners" "tls" "tls.http" "tls.grpc" "store" "store.passwordSecret" "database" "database.urlSecret" "persistence" "secret" "region" "region.apiKeySecret" "region.service" "service" "serviceAccount" "probes" "probes.startup" "probes.liveness" "probes.readiness" "disruptionBudget" "autoscaling" "serviceMonitor" "networkPolicy" }}
{{- $value := $.Values }}
{{- range $key := splitList "." $path }}
{{- $value = index $value $key }}
{{- if not (kindIs "map" $value) }}
{{- fail (printf "%s is null; leave it out for its defaults, or write {}." $path) }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := concat (keys (include "tollgate.labels" . | fromYaml)) (list "checksum/config" "checksum/secret") }}
{{- range $name, $given := dict "podLabels" .Values.podLabels "podAnnotations" .Values.podAnnotations "serviceMonitor.labels" .Values.serviceMonitor.labels }}
{{- range $key, $_ := $given }}
{{- if has $key $own }}
{{- fail (printf "%s: the chart itself sets %s, and selects pods by its labels; choose another name." $name $key) }}
{{- end }}
{{- end }}
{{- end }}
{{- $ports := dict }}
{{- range $name := list "http" "grpc" "resp" "admin" }}
{{- with index $.Values.listeners $name }}
{{- $port := toString . }}
{{- with get $ports $port }}
{{- fail (printf "listeners.%s and %s are both port %s; give each its own." $name . $port) }}
{{- end }}
{{- $_ := set $ports $port (printf "listeners.%s" $name) }}
{{- end }}
{{- end }}
{{- with .Values.region.cellPort }}
{{- with get $ports (toString .) }}
{{- fail (printf "region.cellPort and %s are the same port; give each its own." .) }}
{{- end }}
{{- end }}
{{- with .Values.autoscaling }}
{{- if and .enabled (gt (int .minReplicas) (int .maxReplicas)) }}
{{- fail (printf "autoscaling.minReplicas (%v) is more than autoscaling.maxReplicas (%v)." .minReplicas .maxReplicas) }}
{{- end }}
{{- end }}
{{- if le (int .Values.terminationGracePeriodSeconds) (int .Values.preStopSeconds) }}
{{- fail (printf "terminationGracePeriodSeconds (%v) contains preStopSeconds (%v) and the time for draining; make it longer." .Values.terminationGracePeriodSeconds .Values.preStopSeconds) }}
{{- end }}
{{- if and .Values.database.sqlite (include "tollgate.several" .) }}
{{- fail "database.sqlite is for one replica: a file cannot be shared by pods. Use PostgreSQL (database.urlSecret), or replicas: 1 without autoscaling." }}
{{- end }}
{{- if and .Values.database.sqlite (or .Values.database.urlSecret.name .Values.secret.databaseUrl) }}
{{- fail "database.sqlite and a database URL exclude each other; set one." }}
{{- end }}
{{- if and (eq .Values.store.address "memory") (include "tollgate.several" .) }}
{{- fail "store.address is memory, and there are several replicas: each would count alone, and admit the whole limit. Set store.address to a Redis URL, or replicas: 1." }}
{{- end }}
{{- range $port := list "http" "grpc" }}
{{- with index $.Values.tls $port }}
{{- if and .clientCertificates (not .secret) }}
{{- fail (printf "tls.%s.clientCertificates needs tls.%s.secret: clients show certificates over TLS alone." $port $port) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not .Values.listeners.http }}
{{- fail "listeners.http is off: probes and metrics need it." }}
{{- end }}
{{- if and .Values.listeners.exposeAdmin (not (or .Values.database.sqlite .Values.database.urlSecret.name .Values.secret.databaseUrl)) }}
{{- fail "listeners.exposeAdmin needs a database for tokens: set database.urlSecret or database.sqlite." }}
{{- end }}
{{- if and (or .Values.persistence.enabled .Values.persistence.existingClaim) (include "tollgate.several" .) }}
{{- fail "persistence is one volume for one replica; without it, several replicas keep their state in memory." }}
{{- end }}
{{- if and (eq .Values.store.address "memory") (or .Values.store.passwordSecret.name .Values.secret.storePassword) }}
{{- fail "store.address is memory, which has no password: set store.address to a Redis URL, or leave out store.passwordSecret and secret.storePassword." }}
{{- end }}
{{- if regexMatch "://[^/@]*:[^/@]*@" .Values.store.address }}
{{- fail "store.address has a password, which anyone who may read the Deployment would see: put it into a Secret, and name that in store.passwordSecret." }}
{{- end }}
{{- if not (or .Values.rules .Values.existingRules) }}
{{- fail "rules has no file: add one, or name a ConfigMap of your own in existingRules." }}
{{- end }}
{{- if and .Values.service.headless (ne .Values.service.type "ClusterIP") }}
{{- fail (printf "service.headless has no address of its own, which service.type %s needs; set one of them." .Values.service.type) }}
{{- end }}
{{- if and .Values.region.peers (not .Values.region.cellPort) }}
{{- fail "region.peers needs region.cellPort: cells exchange what they have admitted in both directions." }}
{{- end }}
{{- if and .Values.region.peers (not .Values.region.name) }}
{{- fail "region.peers needs region.name: the name of this release's own region." }}
{{- end }}
{{- with .Values.region }}
{{- if and .cellPort (not (and .name .url .tlsSecret .apiKeySecret.name)) }}
{{- fail "region.cellPort needs region.name, region.url, region.tlsSecret and region.apiKeySecret.name: cells of other regions connect over mutual TLS." }}
{{- end }}
{{- end }}
{{- end }}
