"""Rows, templates, tokenised preference pairs and completions."""
