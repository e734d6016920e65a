"""These tests need MindFormers, and run by scripts/peer_mindformers.sh only: elsewhere nothing here is collected."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("mindformers") else ["test_*.py"]
