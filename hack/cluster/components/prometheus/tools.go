//go:build tools

// Package prometheus pins the Prometheus 3.x that the chart's discovery is tested on.
package prometheus

import _ "github.com/prometheus/prometheus/cmd/prometheus"
