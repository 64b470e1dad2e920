"""Algorithms: functions from tensors to tensors, without a model, a process or a configuration file."""
