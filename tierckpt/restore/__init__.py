"""Finding a checkpoint and bringing its bytes back into live state."""
