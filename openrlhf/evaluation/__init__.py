"""Goal states, scoring of completions, metrics and filtered voting."""
