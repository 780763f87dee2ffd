"""Reward model, policy and losses, as functions of tensors."""
