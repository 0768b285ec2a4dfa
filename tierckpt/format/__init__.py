"""Every stored byte: what it means, how it is written and how it is checked. See docs/format.md."""
