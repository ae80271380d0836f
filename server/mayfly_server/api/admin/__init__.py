"""Probes, the fleet's status and the live page."""
