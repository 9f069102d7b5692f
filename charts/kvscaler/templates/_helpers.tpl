{{/* Prefix of all names: the release's, or release-chart. */}}
{{- define "kvscaler.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "kvscaler.operator" -}}
{{ include "kvscaler.fullname" . }}-operator
{{- end -}}

{{/* Labels that select the operator's Pod; a Deployment's selector can't change later. */}}
{{- define "kvscaler.selector" -}}
app.kubernetes.io/name: kvscaler
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{/* Labels of every object, without the component. */}}
{{- define "kvscaler.labels" -}}
app.kubernetes.io/name: kvscaler
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/part-of: kvscaler
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "kvscaler.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{ .Values.serviceAccount.name | default (include "kvscaler.operator" .) }}
{{- else -}}
{{ .Values.serviceAccount.name | default "default" }}
{{- end -}}
{{- end -}}

{{/* An image's full name: of (dict "image" … "root" $). */}}
{{- define "kvscaler.image" -}}
{{- if .image.digest -}}
{{ .image.repository }}@{{ .image.digest }}
{{- else -}}
{{ .image.repository }}:{{ .image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{- define "kvscaler.adminKeySecret" -}}
{{ .Values.adminKey.secretName | default (printf "%s-admin-key" (include "kvscaler.fullname" .)) }}
{{- end -}}

{{/* Whether to make PodMonitors: "true" or nothing. */}}
{{- define "kvscaler.podMonitors" -}}
{{- $wanted := .Values.metrics.podMonitor.enabled | toString -}}
{{- if or (eq $wanted "true") (and (eq $wanted "auto") (.Capabilities.APIVersions.Has "monitoring.coreos.com/v1/PodMonitor")) -}}
true
{{- end -}}
{{- end -}}

{{/* What Pod Security "restricted" asks of a Pod, and of a container. */}}
{{- define "kvscaler.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "kvscaler.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* Rules for InferenceServices and what they are made of, in one namespace or in all. */}}
{{- define "kvscaler.rules" -}}
- apiGroups: [kvscaler.io]
  resources: [inferenceservices]
  verbs: [get, list, watch]
- apiGroups: [kvscaler.io]
  resources: [inferenceservices/status, inferenceservices/scale]
  verbs: [patch]
# The children of a service. They go with their owner: none is ever deleted by the operator.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, watch, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch]
# Pods are found by their owners, and annotated when one is chosen to drain.
- apiGroups: [apps]
  resources: [replicasets]
  verbs: [list, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [list, watch, patch]
# When someone else has scaled a service or its Deployment: is it an autoscaler, so that we give way?
- apiGroups: [autoscaling]
  resources: [horizontalpodautoscalers]
  verbs: [list]
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create, patch]
{{- end -}}

{{/* The file of Prometheus servers, as the operator reads it. */}}
{{- define "kvscaler.prometheusServers" -}}
{{- $servers := dict }}
{{- range $name, $server := .Values.prometheus.servers }}
{{- $folder := printf "/etc/kvscaler/prometheus/%s" $name }}
{{- $entry := dict "url" $server.url }}
{{- with $server.headers }}{{ $_ := set $entry "headers" . }}{{ end }}
{{- if $server.bearerTokenSecret }}{{ $_ := set $entry "bearerTokenFile" (printf "%s/token" $folder) }}{{ end }}
{{- if or $server.caSecret $server.caConfigMap }}{{ $_ := set $entry "caFile" (printf "%s/ca.crt" $folder) }}{{ end }}
{{- if $server.clientCertificateSecret }}
{{- $_ := set $entry "certificateFile" (printf "%s/tls.crt" $folder) }}
{{- $_ := set $entry "keyFile" (printf "%s/tls.key" $folder) }}
{{- end }}
{{- $_ := set $servers $name $entry }}
{{- end }}
{{- toYaml (dict "servers" $servers) }}
{{- end -}}

{{/* Sources of the volume with one server's credentials; nothing when it has none. */}}
{{- define "kvscaler.prometheusCredentials" -}}
{{- with .bearerTokenSecret }}
- secret:
    name: {{ .name }}
    items: [{key: {{ .key | quote }}, path: token}]
{{- end }}
{{- with .caSecret }}
- secret:
    name: {{ .name }}
    items: [{key: {{ .key | quote }}, path: ca.crt}]
{{- end }}
{{- with .caConfigMap }}
- configMap:
    name: {{ .name }}
    items: [{key: {{ .key | quote }}, path: ca.crt}]
{{- end }}
{{- with .clientCertificateSecret }}
- secret:
    name: {{ .name }}
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end -}}
