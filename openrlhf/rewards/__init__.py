"""Sources of rewards and the grading of answers."""
