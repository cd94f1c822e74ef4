"""The comparison with other attention kernels, for anyone to repeat: `python -m gemattn.bench --help`."""
