"""Pipelines: tasks of every kind of model, with real batching."""
