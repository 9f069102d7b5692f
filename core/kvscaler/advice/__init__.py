"""From a traffic pattern to optimizations with computed gain. Empty until it is built."""
