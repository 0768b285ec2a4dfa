"""What happens to a staged shard: drained to durable places, committed by the coordinator, retired by policy."""
