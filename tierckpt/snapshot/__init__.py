"""From live state to the bytes of a shard."""
