"""From signals to a Decision: replicas, limits and the reasons for both."""
