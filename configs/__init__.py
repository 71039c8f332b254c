"""Presets (YAML, JSON) and the embedded samples; no logic."""
