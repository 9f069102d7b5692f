//go:build tools

// Package kwok pins the fake-node controller that tests of many nodes and Pods use.
package kwok

import _ "sigs.k8s.io/kwok/cmd/kwok"
