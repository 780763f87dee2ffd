"""Using goal states and reward models while generating: step beam search, live filtered voting, and their baselines."""
