"""The mapping tables, installed as ckptbridge.mappings; README.md teaches their language."""
