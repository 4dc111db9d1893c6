"""Simulation and measurement without a device: traces, curves, the prefix check-up, the simulator."""
