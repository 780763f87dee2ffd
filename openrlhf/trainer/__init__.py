"""Configuration, engines and trainers."""
