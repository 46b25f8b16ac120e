{{- define "inferrail.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 63 | trimSuffix "-" -}}
{{- end -}}

{{- define "inferrail.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 63 | trimSuffix "-" -}}
{{- else if contains (include "inferrail.name" .) .Release.Name -}}
{{- .Release.Name | trunc 63 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name (include "inferrail.name" .) | trunc 63 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "inferrail.selector" -}}
app.kubernetes.io/name: {{ include "inferrail.name" . }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "inferrail.labels" -}}
{{ include "inferrail.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "inferrail.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "inferrail.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{/* The configuration of the agent, checked for what would not go together with the rest. */}}
{{- define "inferrail.config" -}}
{{- $config := deepCopy .Values.config -}}
{{- $server := $config.server | default dict -}}
{{- if hasKey $server "shutdown_timeout" -}}
{{- fail "config.server.shutdown_timeout is what shutdownTimeoutSeconds says; set that in its place" -}}
{{- end -}}
{{- $_ := set $server "shutdown_timeout" (printf "%ds" (int .Values.shutdownTimeoutSeconds)) -}}
{{- $_ := set $config "server" $server -}}
{{- $local := include "inferrail.adminIsLocal" . -}}
{{- if and $local (not .Values.hostNetwork) -}}
{{- fail (printf "config.admin_listen (%s) is on loopback, where without hostNetwork the kubelet does not reach the probes: set it to \":9090\", and config.admin_token_sha256" $config.admin_listen) -}}
{{- end -}}
{{- if and (not $local) (not $config.admin_token_sha256) -}}
{{- fail (printf "config.admin_token_sha256 is missing, and config.admin_listen (%s) is not on loopback; make one with: printf %%s \"$TOKEN\" | sha256sum" $config.admin_listen) -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled $local -}}
{{- fail "podMonitor wants config.admin_listen beyond loopback, such as \":9090\", and config.admin_token_sha256" -}}
{{- end -}}
{{- if and .Values.podMonitor.enabled (not .Values.podMonitor.tokenSecret.name) -}}
{{- fail "podMonitor.tokenSecret.name is missing: the Secret that holds the token whose hash config.admin_token_sha256 is" -}}
{{- end -}}
{{- if and .Values.networkPolicy.enabled .Values.hostNetwork -}}
{{- fail "networkPolicy has no effect on pods in the node's network; set hostNetwork to false, or restrict the ports by the node's firewall" -}}
{{- end -}}
{{- toYaml $config -}}
{{- end -}}

{{- define "inferrail.adminIsLocal" -}}
{{- if regexMatch "^(127\\.|localhost:|\\[::1\\])" .Values.config.admin_listen -}}yes{{- end -}}
{{- end -}}

{{- define "inferrail.port" -}}
{{- regexFind "[0-9]+$" .Values.config.listen -}}
{{- end -}}

{{- define "inferrail.adminPort" -}}
{{- regexFind "[0-9]+$" .Values.config.admin_listen -}}
{{- end -}}

{{- define "inferrail.usesKernel" -}}
{{- if ne (dig "datapath" "mode" "auto" .Values.config) "copy" -}}yes{{- end -}}
{{- end -}}

{{- define "inferrail.probe" -}}
httpGet:
  path: {{ .path }}
  port: {{ include "inferrail.adminPort" .root }}
  {{- if include "inferrail.adminIsLocal" .root }}
  host: 127.0.0.1
  {{- end }}
{{- end -}}
