//go:build tools

// Package helm pins the helm client that the chart is installed and tested with.
package helm

import _ "helm.sh/helm/v3/cmd/helm"
