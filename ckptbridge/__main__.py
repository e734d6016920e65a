"""``python -m ckptbridge``."""

from ckptbridge.cli.main import main

main()
