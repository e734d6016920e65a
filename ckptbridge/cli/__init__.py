"""The commands: parse, call, print; no logic."""
